"""guided-diffusion's state dict (ADM UNet): its names, the architecture that its shapes show, and the order of qkv's rows.

Source: openai/guided-diffusion, `guided_diffusion/unet.py` (module names, attention orders) and `script_util.py` (options);
Dhariwal & Nichol 2021, arXiv 2105.05233.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxunet.config import Config, resolve, to_dict
from jaxunet.runtime.errors import UserError
from jaxunet.weights.fields import differences
from jaxunet.weights.names import (
    BlockNames,
    Entry,
    Shape,
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
USUAL_HEAD_WIDTH = 64
USUAL_IMAGE_SIZE = 64
# Options of ours that guided-diffusion's network lacks, with what it has instead.
FIXED = {
    'model.time_embedding': 'adm',
    'model.max_period': 10000,
    'model.norm_groups': 32,
    'model.norm_eps': 1e-5,
    'model.downsample_padding': 'symmetric',
}


class Inferred(NamedTuple):
    """What names and shapes show: fields of the model, levels with attention, whether a variance is predicted."""

    fields: dict[str, Any]
    attention_levels: tuple[int, ...]
    learn_sigma: bool


def table(config: Config) -> list[Entry]:
    """The tensors of guided-diffusion's state dict in its order: path in our tree, its name, shape."""
    return entries(config, NAMES)


def infer_model_config(shapes: Mapping[str, Shape], source: str) -> Inferred:
    """The architecture that a state dict's names and shapes show. Heads, the order of qkv and the image size cannot be seen.

    Raises:
      UserError: a tensor that tells is missing or has an impossible shape.
    """

    def shape(name: str, rank: int) -> Shape:
        if name not in shapes:
            some = ', '.join(list(shapes)[:3])
            raise UserError(
                f"{source}: {name} is missing: this is no UNet with guided-diffusion's names (found {len(shapes)} tensors: {some}, ...)"
            )
        if len(shapes[name]) != rank:
            raise UserError(f'{source}: {name}: expected {rank} axes, found shape {shapes[name]}')
        return shapes[name]

    width, base = shape('time_embed.0.weight', 2)
    if width != 4 * base:
        raise UserError(
            f'{source}: time_embed.0.weight: expected shape (4 base, base), found {(width, base)}'
        )
    image_channels = shape('input_blocks.0.0.weight', 4)[1]
    learned = {}  # kind of resampling on the way up -> output blocks that end with it
    for kind, layer in (('conv_resample', 'conv'), ('resblock_updown', 'in_layers.0')):
        learned[kind] = [
            i
            for i in range(len(shapes))
            for j in (1, 2)
            if f'output_blocks.{i}.{j}.{layer}.weight' in shapes
        ]
    present = {
        int(match[1])
        for name in shapes
        if (match := re.match(r'input_blocks\.([0-9]{1,9})\.', name))
    }
    inputs = 1 + max(present)
    if inputs > len(shapes):
        raise UserError(
            f'{source}: input_blocks.{inputs - 1}: more blocks than the file has tensors ({len(shapes)})'
        )
    gaps = [i for i in range(1, inputs) if i not in present]
    # The way up resamples first after num_res_blocks + 1 blocks; where that leaves no trace, the way down has a gap there.
    blocks = min(
        [
            *learned['conv_resample'],
            *learned['resblock_updown'],
            *(gap - 1 for gap in gaps),
            inputs - 1,
        ]
    )
    levels, rest = divmod(inputs, blocks + 1)
    if blocks < 1 or rest:
        raise UserError(
            f'{source}: {inputs} input_blocks do not make whole levels of {blocks} residual blocks and one resampling'
        )
    firsts = [1 + level * (blocks + 1) for level in range(levels)]
    channels = [shape(f'input_blocks.{i}.0.in_layers.2.weight', 4)[0] for i in firsts]
    out, inner = shape('out.2.weight', 4)[0], shape('input_blocks.1.0.emb_layers.1.weight', 2)[0]
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
        'conv_resample': bool(learned['conv_resample']),
        'resblock_updown': bool(learned['resblock_updown']),
        'scale_shift_norm': inner == 2 * channels[0],
        'num_classes': shape('label_emb.weight', 2)[0] if 'label_emb.weight' in shapes else 0,
        'label_dropout': 0.0,
        'num_head_channels': 0,
    }
    attention = tuple(
        level for level, i in enumerate(firsts) if f'input_blocks.{i}.1.qkv.weight' in shapes
    )
    return Inferred(fields, attention, out == 2 * image_channels)


def _multiplier(channels: int, base: int) -> float:
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
    """The config of a state dict, and what had to be assumed since shapes do not show it.

    Raises:
      UserError: no such network, or hints that do not fit it.
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
        train={'sample_every': 0},  # there are no grids of images with any number of channels
    )
    try:
        config = resolve(to_dict(config))
        parameter_shapes(config)
    except UserError as error:
        said = f'\n(assumed, as the shapes do not show it: {", ".join(assumed)}; give the config of the model instead)'
        raise UserError(
            f'{source}: the shapes do not make a network that can be run: {error}{said}'
        ) from None
    return config, assumed


def check_against_shapes(config: Config, shapes: Mapping[str, Shape], source: str) -> None:
    """Checks a config that a file brings against its shapes, before a network of whatever size it asks for is built.

    Raises:
      UserError: it describes another network, or none.
    """
    m, inferred = config.model, infer_model_config(shapes, source).fields
    names = ('image_channels', 'base_channels', 'num_res_blocks', 'num_classes', 'channel_mult')
    expected = {f'model.{name}': inferred[name] for name in names}
    found = {f'model.{name}': getattr(m, name) for name in names}
    # The same widths may be written as other fractions.
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
    """Raises `UserError` listing the fields for which guided-diffusion has no option, so that it would compute something else."""
    m = config.model
    values = {name: getattr(m, name.removeprefix('model.')) for name in FIXED}
    if not m.conv_resample or m.resblock_updown:
        del values['model.downsample_padding']
    problems = [
        f'{name}: expected {FIXED[name]!r}, found {value!r}'
        for name, value in values.items()
        if value != FIXED[name]
    ]
    if config.diffusion.prediction == 'v':
        problems.append("diffusion.prediction: expected 'epsilon' or 'x0', found 'v'")
    if problems:
        lines = '\n'.join(f'  {p}' for p in problems)
        raise UserError(
            f'guided-diffusion has no such model, so it would misread this .pt; write .safetensors instead:\n{lines}'
        )


def check_names(shapes: Mapping[str, Shape], config: Config, source: str) -> None:
    """Raises `UserError` naming the tensors that differ from those that the network of the config has."""
    expected = {entry.name: entry.shape for entry in table(config)}
    check_shapes(
        shapes, expected, source, "expected guided-diffusion's names and shapes for this model"
    )


def to_tree(read: Any, config: Config, *, new_attention_order: bool) -> dict[str, Any]:
    """Our parameter tree from `read(name)`, which gives a tensor of the state dict.

    Args:
      new_attention_order: True: qkv's rows are all q, all k, all v; False: q, k, v of the first head, then of the second, ...
    """
    leaves = {}
    for entry in table(config):
        value = read(entry.name)
        if entry.heads and not new_attention_order:
            value = _swap(value, entry.heads, 3)
        leaves[entry.path] = from_file(entry, value)
    return unflatten(leaves)


def from_tree(
    params: Mapping[str, Any], config: Config, *, new_attention_order: bool
) -> dict[str, np.ndarray]:
    """The state dict of our parameter tree; the inverse of `to_tree`."""
    leaves = flatten(params)
    state = {}
    for entry in table(config):
        value = to_file(entry, np.asarray(leaves[entry.path]))
        if entry.heads and not new_attention_order:
            value = np.ascontiguousarray(_swap(value, 3, entry.heads))
        state[entry.name] = value
    return state


def _swap(value: np.ndarray, first: int, second: int) -> np.ndarray:
    """Rows (first, second, width) as (second, first, width)."""
    return value.reshape(first, second, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)
