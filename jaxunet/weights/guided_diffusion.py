"""guided-diffusion's state dict (ADM UNet): names, inferred architecture, flags of its scripts.

improved-diffusion uses the same names; it lacks some of the options.

Source: openai/guided-diffusion, `guided_diffusion/unet.py` (module names, attention orders) and
`script_util.py` (options); Dhariwal & Nichol 2021, arXiv 2105.05233.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from jaxunet.config import Config
from jaxunet.runtime.errors import UserError, itemized
from jaxunet.weights import names
from jaxunet.weights.fields import NVLABS_ONLY
from jaxunet.weights.inference import OBJECTIVES, Inferred, Shapes, Stated
from jaxunet.weights.names import BlockNames, Entry, Shape, entries

PROGRAM = 'guided-diffusion'
FIRST = 'input_blocks.0.0.weight'
IMAGE_CHANNELS, NUM_CLASSES = 3, 1000  # constants of its scripts
CHANNEL_MULT = {  # by image size; used if the script's flag channel_mult is empty
    32: (1, 2, 2, 2),
    64: (1, 2, 3, 4),
    128: (1, 1, 2, 3, 4),
    256: (1, 1, 2, 2, 4, 4),
    512: (0.5, 1, 1, 2, 2, 4, 4),
}
SUPER_RESOLUTION_MULT = {  # by large_size; the super-resolution scripts have no such flag
    64: (1, 2, 3, 4),
    256: (1, 1, 2, 2, 4, 4),
    512: (1, 1, 2, 2, 4, 4),
}
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
# Our options that guided-diffusion lacks, with its fixed values.
FIXED = {
    'model.time_embedding': 'adm',
    'model.max_period': 10000,
    'model.norm_groups': 32,
    'model.norm_eps': 1e-5,
    'model.downsample_padding': 'symmetric',
    'model.condition_channels': 0,
    **{f'model.{name}': value for name, value in NVLABS_ONLY.items()},
}
FIXED_MODEL = {name.removeprefix('model.'): value for name, value in FIXED.items()}


def table(config: Config) -> list[Entry]:
    """Returns the tensors of guided-diffusion's state dict, in its order."""
    return entries(config, NAMES)


def infer(shapes: Mapping[str, Shape], source: str) -> Inferred:
    """Infers the architecture from a state dict's names and shapes.

    Names and shapes do not show the number of heads, the order of qkv's rows and the image size. A
    super-resolution network with a learned variance looks like a plain network of twice the image
    channels, and is inferred as such; `settle_super_resolution` corrects this.

    Raises:
      UserError: a required tensor is missing or has an impossible shape, or the network is a
        classifier.
    """
    tensors = Shapes(shapes, source, PROGRAM)
    base = _base_channels(tensors)
    inputs = tensors.get(FIRST, 4)[1]
    _check_is_diffusion_model(tensors)
    # Kind of resampling -> indices of the output blocks that end with it.
    upsampling = {
        'conv_resample': _ends(tensors, 'conv'),
        'resblock_updown': _ends(tensors, 'in_layers.0'),
    }
    blocks, levels = _blocks_and_levels(tensors, [i for ends in upsampling.values() for i in ends])
    firsts = [1 + level * (blocks + 1) for level in range(levels)]
    channels = [tensors.get(f'input_blocks.{i}.0.in_layers.2.weight', 4)[0] for i in firsts]
    out = tensors.get('out.2.weight', 4)[0]
    inner = tensors.get('input_blocks.1.0.emb_layers.1.weight', 2)[0]
    super_resolution = 2 * out == inputs
    image_channels = out if super_resolution else inputs
    if not super_resolution and out not in (inputs, 2 * inputs):
        expected = f'{inputs} output channels, or {2 * inputs} with a learned variance'
        raise UserError(f'{source}: out.2.weight: expected {expected}, found {out}')
    fields = FIXED_MODEL | {
        'image_channels': image_channels,
        'base_channels': base,
        'channel_mult': tuple(multiplier(c, base) for c in channels),
        'num_res_blocks': blocks,
        'conv_resample': bool(upsampling['conv_resample']),
        'resblock_updown': bool(upsampling['resblock_updown']),
        'scale_shift_norm': inner == 2 * channels[0],
        'num_classes': tensors.get('label_emb.weight', 2)[0] if 'label_emb.weight' in shapes else 0,
    }
    attention = tuple(
        level for level, i in enumerate(firsts) if f'input_blocks.{i}.1.qkv.weight' in shapes
    )
    return Inferred(
        PROGRAM, fields, attention, out == 2 * image_channels, {}, super_resolution=super_resolution
    )


def without_pictures(shapes: dict[str, Shape], channels: int) -> dict[str, Shape]:
    """Returns shapes as if the first convolution did not read a picture of so many channels."""
    if not channels or len(shapes.get(FIRST, ())) != 4:
        return shapes
    out, inputs, *kernel = shapes[FIRST]
    return shapes | {FIRST: (out, inputs - channels, *kernel)}


def settle_super_resolution(
    inferred: Inferred, known: Config | None, stated: Stated, source: str
) -> Inferred:
    """Decides if the network of a file is plain or for super-resolution.

    A network with as many channels out as in is either a plain one without a learned variance, or
    one for super-resolution with a learned variance. Without further knowledge, six channels mean
    super-resolution.

    Args:
      inferred: the model from `infer`.
      known: the config that the file's model must have; None = it is inferred.
      stated: what else is stated about the model.

    Raises:
      UserError: the config is of a plain network, but the file's network is for super-resolution.
    """
    channels = inferred.fields['image_channels']
    as_many = not inferred.super_resolution and not inferred.learn_sigma and channels % 2 == 0
    known_plain = known is not None and known.model.image_channels == channels
    has_pictures = known is not None and known.model.low_res_size != ()
    likely = 'low_res_size' in stated or has_pictures or channels == 2 * IMAGE_CHANNELS
    if as_many and likely and not known_plain:
        fields = inferred.fields | {'image_channels': channels // 2}
        inferred = inferred._replace(fields=fields, learn_sigma=True, super_resolution=True)
    if inferred.super_resolution and known is not None and not known.model.low_res_size:
        halves = 2 * inferred.fields['image_channels']
        raise UserError(
            f'{source}: this is a super-resolution network: its first convolution takes {halves} '
            'channels, half of them of a low-resolution picture; expected one that draws from '
            'noise alone, as the config has no model.low_res_size'
        )
    return inferred


def _check_is_diffusion_model(tensors: Shapes) -> None:
    """Raises UserError for a network without output blocks, such as the noisy classifier."""
    if not any(name.startswith('output_blocks.') for name in tensors.by_name):
        raise UserError(
            f'{tensors.source}: output_blocks is missing: this is a classifier of noisy images '
            '(EncoderUNetModel), which draws nothing; give the diffusion model that it guides, '
            'and this one with --classifier'
            if any(name.startswith('middle_block.') for name in tensors.by_name)
            else f'{tensors.source}: output_blocks is missing: this is not a whole UNet'
        )


def _base_channels(tensors: Shapes) -> int:
    """Returns the base channels.

    Our own files have wider sinusoids with `model.channel_mult_noise`.
    """
    width, waves = tensors.get('time_embed.0.weight', 2)
    wider = width % 4 == 0 < width < 4 * waves and waves % (width // 4) == 0
    return width // 4 if wider else tensors.base_channels('time_embed.0.weight')


def _ends(tensors: Shapes, layer: str) -> list[int]:
    """Returns the indices of the output blocks whose second or third module has this layer."""
    return [
        i
        for i in range(len(tensors))
        for j in (1, 2)
        if f'output_blocks.{i}.{j}.{layer}.weight' in tensors.by_name
    ]


def _blocks_and_levels(tensors: Shapes, upsampled: list[int]) -> tuple[int, int]:
    """Returns the residual blocks per level, and the number of levels.

    Args:
      upsampled: output blocks that end with an upsampling that has parameters.
    """
    inputs, present = count_inputs(tensors), _input_blocks(tensors)
    # The first resampling of the output blocks comes after num_res_blocks + 1 blocks. A resampling
    # without parameters shows only as a gap in the numbers of the input blocks.
    gaps = [i - 1 for i in range(1, inputs) if i not in present]
    blocks = min([*upsampled, *gaps, inputs - 1])
    levels, rest = divmod(inputs, blocks + 1)
    if blocks < 1 or rest:
        raise UserError(
            f'{tensors.source}: {inputs} input_blocks do not make whole levels of {blocks} '
            'residual blocks and one resampling'
        )
    return blocks, levels


def _input_blocks(tensors: Shapes) -> set[int]:
    """Returns the numbers of the input blocks that have parameters."""
    matches = (re.match(r'input_blocks\.([0-9]{1,9})\.', name) for name in tensors.by_name)
    return {int(match[1]) for match in matches if match}


def count_inputs(tensors: Shapes) -> int:
    """Returns the number of input blocks.

    Raises:
      UserError: the number is larger than that of the tensors.
    """
    inputs = 1 + max(_input_blocks(tensors))
    if inputs > len(tensors):
        raise UserError(
            f'{tensors.source}: input_blocks.{inputs - 1}: more blocks than the file has tensors '
            f'({len(tensors)})'
        )
    return inputs


def multiplier(channels: int, base: int) -> float:
    """Returns a multiplier with int(multiplier · base) == channels."""
    if channels % base == 0:
        return channels // base
    mult = channels / base
    return mult if int(mult * base) == channels else math.nextafter(mult, math.inf)


def check_expressible(config: Config) -> None:
    """Checks that guided-diffusion can run this model.

    Raises:
      UserError: guided-diffusion lacks an option; the message lists the fields.
    """
    model = config.model
    values = {name: getattr(model, name.removeprefix('model.')) for name in FIXED}
    if not model.conv_resample or model.resblock_updown:
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
        raise UserError(
            'guided-diffusion has no such model, so it would misread this .pt; '
            f'write .safetensors instead:{itemized(problems)}'
        )


def flags(config: Config, *, new_attention_order: bool) -> str:
    """Returns the flags with which guided-diffusion's scripts read a .pt of this model.

    All flags are given, because the .pt does not hold them and improved-diffusion has other
    defaults. After a semicolon follows what has no flag.
    """
    model, diffusion = config.model, config.diffusion
    height, width, channels = config.image_shape
    heads = (
        {'num_heads': model.num_heads, 'num_heads_upsample': model.num_heads_upsample or -1}
        if model.num_heads
        else {'num_head_channels': model.num_head_channels}
    )
    known_mult = (SUPER_RESOLUTION_MULT if model.low_res_size else CHANNEL_MULT).get(height)
    # The flag takes whole numbers, and the super-resolution scripts do not have it.
    has_flag = not model.low_res_size and all(mult == int(mult) for mult in model.channel_mult)
    sizes: dict[str, object] = {'image_size': height}
    if model.low_res_size:
        sizes = {'large_size': height, 'small_size': model.low_res_size[0]}
    values = {
        **sizes,
        'num_channels': model.base_channels,
        'num_res_blocks': model.num_res_blocks,
        **({'channel_mult': ','.join(map(str, model.channel_mult))} if has_flag else {}),
        # Side 1 means no level at all, because the scripts expect a number.
        'attention_resolutions': ','.join(map(str, model.attention_resolutions)) or 1,
        **heads,
        'use_scale_shift_norm': model.scale_shift_norm,
        'resblock_updown': model.resblock_updown,
        **({} if model.low_res_size else {'use_new_attention_order': new_attention_order}),
        'class_cond': model.num_classes > 0,
        'learn_sigma': diffusion.learn_sigma,
        'diffusion_steps': diffusion.steps,
        'noise_schedule': diffusion.schedule,
        'rescale_timesteps': diffusion.rescale_timesteps,
        'predict_xstart': diffusion.objective == 'x0',
    }
    others = {
        'channel_mult': model.channel_mult
        if not has_flag and model.channel_mult != known_mult
        else None,
        'use_new_attention_order': True if model.low_res_size and new_attention_order else None,
        'image width': width if width != height else None,
        'in_channels': channels if channels != IMAGE_CHANNELS else None,
        'NUM_CLASSES': model.num_classes if model.num_classes not in (0, NUM_CLASSES) else None,
        'conv_resample': False
        if len(model.channel_mult) > 1 and not (model.conv_resample or model.resblock_updown)
        else None,
    }
    without = [f'{name}={value}' for name, value in others.items() if value is not None]
    given = ' '.join(f'--{name} {value}' for name, value in values.items())
    return given + (f'; in its code: {", ".join(without)}' if without else '')


def from_tree(
    params: Mapping[str, object], config: Config, *, new_attention_order: bool
) -> dict[str, np.ndarray]:
    """Returns the state dict of our parameter tree.

    Args:
      new_attention_order: order of qkv's rows in the result (`use_new_attention_order`).
    """
    return names.from_tree(params, table(config), interleaved=not new_attention_order)
