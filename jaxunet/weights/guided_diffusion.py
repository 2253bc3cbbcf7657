"""guided-diffusion's state dict (ADM UNet): names, inferred architecture, order of qkv's rows.

Source: openai/guided-diffusion, `guided_diffusion/unet.py` (module names, attention orders) and
`script_util.py` (options); Dhariwal & Nichol 2021, arXiv 2105.05233.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from jaxunet.config import Config, resolve, to_dict
from jaxunet.config.schema import Fields
from jaxunet.runtime.errors import UserError
from jaxunet.weights.fields import check_reusable, differences
from jaxunet.weights.names import (
    BlockNames,
    Entry,
    Shape,
    Tree,
    check_shapes,
    entries,
    flatten,
    from_file,
    parameter_shapes,
    to_file,
    unflatten,
)

NAMES = BlockNames(
    res_block={
        'norm_1': 'in_layers.0',
        'conv_1': 'in_layers.2',
        'embed': 'emb_layers.1',
        'norm_2': 'out_layers.0',
        'conv_2': 'out_layers.3',
        'shortcut': 'skip_connection',
    },
    attention={'norm': 'norm', 'qkv': 'qkv', 'proj': 'proj_out'},
)
HIDDEN = ('num_head_channels', 'label_dropout')  # `Inferred.fields` that are no inference
USUAL_HEAD_WIDTH = 64  # assumed channels of a head
USUAL_IMAGE_SIZE = 64  # assumed image side, pixels
OBJECTIVES = ('epsilon', 'x0')  # that guided-diffusion has; the first is usual
# Our options that guided-diffusion lacks, with its fixed values.
FIXED = {
    'model.time_embedding': 'adm',
    'model.max_period': 10000,
    'model.norm_groups': 32,
    'model.norm_eps': 1e-5,
    'model.downsample_padding': 'symmetric',
}


class Inferred(NamedTuple):
    """The architecture that names and shapes show.

    Fields:
      fields: fields of `model`.
      attention_levels: levels with attention, 0 = full resolution.
      learn_sigma: the network also predicts a variance.
    """

    fields: Fields
    attention_levels: tuple[int, ...]
    learn_sigma: bool


def table(config: Config) -> list[Entry]:
    """Returns the tensors of guided-diffusion's state dict, in its order."""
    return entries(config, NAMES)


class _Shapes:
    """The shapes of a state dict by name, with checked look-ups."""

    def __init__(self, shapes: Mapping[str, Shape], source: str) -> None:
        self.by_name, self.source = shapes, source

    def __len__(self) -> int:
        return len(self.by_name)

    def get(self, name: str, rank: int) -> Shape:
        """Returns a tensor's shape. Raises UserError: it is missing or has another rank."""
        if name not in self.by_name:
            some = ', '.join(list(self.by_name)[:3])
            raise UserError(
                f"{self.source}: {name} is missing: this is not a UNet with guided-diffusion's "
                f'names (found {len(self)} tensors: {some}, ...)'
            )
        shape = self.by_name[name]
        if len(shape) != rank:
            raise UserError(f'{self.source}: {name}: expected {rank} axes, found shape {shape}')
        return shape

    def ends(self, layer: str) -> list[int]:
        """Returns the output blocks whose second or third module has this layer."""
        return [
            i
            for i in range(len(self))
            for j in (1, 2)
            if f'output_blocks.{i}.{j}.{layer}.weight' in self.by_name
        ]


def infer_model_config(shapes: Mapping[str, Shape], source: str) -> Inferred:
    """Infers the architecture from a state dict's names and shapes.

    They do not show the heads, the order of qkv and the image size.

    Args:
      source: begins every message.

    Raises:
      UserError: a required tensor is missing or has an impossible shape.
    """
    found = _Shapes(shapes, source)
    width, base = found.get('time_embed.0.weight', 2)
    if width != 4 * base:
        raise UserError(
            f'{source}: time_embed.0.weight: expected shape (4 base, base), found {(width, base)}'
        )
    image_channels = found.get('input_blocks.0.0.weight', 4)[1]
    # Kind of resampling -> output blocks that end with it.
    upsampling = {
        'conv_resample': found.ends('conv'),
        'resblock_updown': found.ends('in_layers.0'),
    }
    blocks, levels = _blocks_and_levels(found, [i for ends in upsampling.values() for i in ends])
    firsts = [1 + level * (blocks + 1) for level in range(levels)]
    channels = [found.get(f'input_blocks.{i}.0.in_layers.2.weight', 4)[0] for i in firsts]
    out = found.get('out.2.weight', 4)[0]
    inner = found.get('input_blocks.1.0.emb_layers.1.weight', 2)[0]
    if out not in (image_channels, 2 * image_channels):
        expected = (
            f'{image_channels} output channels, or {2 * image_channels} with a learned variance'
        )
        raise UserError(f'{source}: out.2.weight: expected {expected}, found {out}')
    fields = {
        'image_channels': image_channels,
        'base_channels': base,
        'channel_mult': tuple(_multiplier(c, base) for c in channels),
        'num_res_blocks': blocks,
        'conv_resample': bool(upsampling['conv_resample']),
        'resblock_updown': bool(upsampling['resblock_updown']),
        'scale_shift_norm': inner == 2 * channels[0],
        'num_classes': found.get('label_emb.weight', 2)[0] if 'label_emb.weight' in shapes else 0,
        'label_dropout': 0.0,
        'num_head_channels': 0,
    }
    attention = tuple(
        level for level, i in enumerate(firsts) if f'input_blocks.{i}.1.qkv.weight' in shapes
    )
    return Inferred(fields, attention, out == 2 * image_channels)


def _blocks_and_levels(found: _Shapes, upsampled: list[int]) -> tuple[int, int]:
    """Returns the residual blocks per level, and the number of levels.

    Args:
      upsampled: output blocks that end with an upsampling that has parameters.
    """
    present = {
        int(match[1])
        for name in found.by_name
        if (match := re.match(r'input_blocks\.([0-9]{1,9})\.', name))
    }
    inputs = 1 + max(present)
    if inputs > len(found):
        raise UserError(
            f'{found.source}: input_blocks.{inputs - 1}: more blocks than the file has tensors '
            f'({len(found)})'
        )
    # The output blocks resample first after num_res_blocks + 1 blocks. A resampling without
    # parameters shows only as a gap in the input blocks.
    gaps = [i - 1 for i in range(1, inputs) if i not in present]
    blocks = min([*upsampled, *gaps, inputs - 1])
    levels, rest = divmod(inputs, blocks + 1)
    if blocks < 1 or rest:
        raise UserError(
            f'{found.source}: {inputs} input_blocks do not make whole levels of {blocks} '
            'residual blocks and one resampling'
        )
    return blocks, levels


def _multiplier(channels: int, base: int) -> float:
    """Returns a multiplier with int(multiplier · base) == channels."""
    if channels % base == 0:
        return channels // base
    mult = channels / base
    return mult if int(mult * base) == channels else math.nextafter(mult, math.inf)


def infer_config(
    shapes: Mapping[str, Shape],
    source: str,
    *,
    image_size: tuple[int, ...] | None = None,
    num_heads: int | None = None,
    num_head_channels: int | None = None,
) -> tuple[Config, list[str]]:
    """Returns the config of a state dict, and the assumptions behind it.

    Args:
      source: begins every message.
      image_size, num_heads, num_head_channels: hints, as shapes do not show them; None = assume.

    Raises:
      UserError: another network, or hints that do not fit it.
    """
    model, attention, learn_sigma = infer_model_config(shapes, source)
    assumed = []
    if num_heads is None and num_head_channels is None:
        num_head_channels = USUAL_HEAD_WIDTH
        assumed.append(f'model.num_head_channels={USUAL_HEAD_WIDTH}')
    if image_size is None:
        side = max(USUAL_IMAGE_SIZE, 2 ** (len(model['channel_mult']) - 1))
        image_size = (side,)
        assumed.append(f'data.image_size=({side},)')
    assumed.append('diffusion.schedule=linear')
    model |= {
        'num_heads': num_heads or 0,
        'num_head_channels': num_head_channels or 0,
        'attention_resolutions': tuple(min(image_size) >> level for level in attention),
    }
    config = Config().replace(
        model=model,
        diffusion={'learn_sigma': learn_sigma},
        data={'image_size': tuple(image_size)},
        train={'sample_every': 0},  # sample grids need 1 or 3 channels
    )
    try:
        config = resolve(to_dict(config))
        parameter_shapes(config)
    except UserError as error:
        raise UserError(
            f'{source}: the shapes do not make a network that can be run: {error}\n'
            f'(assumed, as the shapes do not show it: {", ".join(assumed)}; '
            'give the config of the model instead)'
        ) from None
    return config, assumed


def config_like(shapes: Mapping[str, Shape], source: str, like: Config) -> Config:
    """Returns the config of a state dict, with `like`'s values for what the shapes do not show.

    Its objective is one that guided-diffusion has.

    Args:
      source: begins every message.

    Raises:
      UserError: another kind of file, or a network from which a run of `like` cannot start.
    """
    inferred = infer_model_config(shapes, source)
    fields = {k: v for k, v in inferred.fields.items() if k not in HIDDEN}
    side = min(like.image_shape[:2])
    base, mult = fields['base_channels'], like.model.channel_mult
    if [int(m * base) for m in mult] == [int(m * base) for m in fields['channel_mult']]:
        fields['channel_mult'] = mult  # other fractions of the same widths
    if inferred.attention_levels != like.attention_levels:
        fields['attention_resolutions'] = tuple(side >> n for n in inferred.attention_levels)
    diffusion: Fields = {'learn_sigma': inferred.learn_sigma}
    if like.diffusion.objective not in OBJECTIVES:
        diffusion['objective'] = OBJECTIVES[0]
    config = like.replace(model=fields, diffusion=diffusion)
    check_reusable(config, like, source)
    return config


def check_against_shapes(config: Config, shapes: Mapping[str, Shape], source: str) -> None:
    """Checks a file's config against its shapes, before a network of that size is built.

    Raises:
      UserError: it describes another network, or none.
    """
    m, inferred = config.model, infer_model_config(shapes, source).fields
    names = ('image_channels', 'base_channels', 'num_res_blocks', 'num_classes', 'channel_mult')
    expected = {f'model.{name}': inferred[name] for name in names}
    found = {f'model.{name}': getattr(m, name) for name in names}
    # Different fractions may give the same widths.
    if (
        len(m.channel_mult) == len(inferred['channel_mult'])
        and m.base_channels == inferred['base_channels']
    ):
        expected['model.channel_mult'] = [
            int(mult * m.base_channels) for mult in inferred['channel_mult']
        ]
        found['model.channel_mult'] = [int(mult * m.base_channels) for mult in m.channel_mult]
    if problems := differences(expected, found):
        raise UserError(
            f'{source}: not the network of the tensors beside it:\n'
            + '\n'.join(f'  {p}' for p in problems)
        )
    try:
        parameter_shapes(config)
    except UserError as error:
        raise UserError(f'{source}: {error}') from None


def check_expressible(config: Config) -> None:
    """Checks that guided-diffusion can run this model.

    Raises:
      UserError: it lacks an option; the message lists the fields.
    """
    m = config.model
    values = {name: getattr(m, name.removeprefix('model.')) for name in FIXED}
    if not m.conv_resample or m.resblock_updown:
        del values['model.downsample_padding']
    problems = [
        f'{name}: expected {FIXED[name]!r}, found {value!r}'
        for name, value in values.items()
        if value != FIXED[name]
    ]
    if config.diffusion.objective not in OBJECTIVES:
        problems.append(
            f"diffusion.objective: expected 'epsilon' or 'x0', found {config.diffusion.objective!r}"
        )
    if problems:
        lines = '\n'.join(f'  {p}' for p in problems)
        raise UserError(
            'guided-diffusion has no such model, so it would misread this .pt; '
            f'write .safetensors instead:\n{lines}'
        )


def check_names(shapes: Mapping[str, Shape], config: Config, source: str) -> None:
    """Checks the names and shapes of a state dict against the config's network.

    Raises:
      UserError: tensors differ; the message names them.
    """
    expected = {entry.name: entry.shape for entry in table(config)}
    check_shapes(
        shapes, expected, source, "expected guided-diffusion's names and shapes for this model"
    )


def to_tree(
    read: Callable[[str], np.ndarray], config: Config, *, new_attention_order: bool
) -> Tree:
    """Builds our parameter tree from a state dict.

    Args:
      read: name -> tensor of the state dict.
      new_attention_order: True if qkv's rows are all q, all k, all v; False if they are q, k, v of
        the first head, then of the second, ...
    """
    leaves = {}
    for entry in table(config):
        value = read(entry.name)
        if entry.heads and not new_attention_order:
            value = _swap(value, entry.heads, 3)
        leaves[entry.path] = from_file(entry, value)
    return unflatten(leaves)


def from_tree(
    params: Mapping[str, object], config: Config, *, new_attention_order: bool
) -> dict[str, np.ndarray]:
    """Returns the state dict of our parameter tree; the inverse of `to_tree`."""
    leaves = flatten(params)
    state = {}
    for entry in table(config):
        value = to_file(entry, np.asarray(leaves[entry.path]))
        if entry.heads and not new_attention_order:
            value = np.ascontiguousarray(_swap(value, 3, entry.heads))
        state[entry.name] = value
    return state


def _swap(value: np.ndarray, first: int, second: int) -> np.ndarray:
    """Reorders rows (first, second, width) as (second, first, width)."""
    return value.reshape(first, second, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)
