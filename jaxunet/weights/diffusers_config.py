"""Reads the `config.json` of a `UNet2DModel`; see `jaxunet.weights.diffusers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import NUMBER, check_fields, shown
from jaxunet.weights.diffusers import (
    ATTENTION,
    FIXED,
    PADDINGS,
    PLAIN,
    PROGRAM,
    RESNET,
    TIME_EMBEDDINGS,
)
from jaxunet.weights.fields import NVLABS_ONLY
from jaxunet.weights.guided_diffusion import multiplier
from jaxunet.weights.inference import Inferred

# Options that a config.json may leave out.
DEFAULTS: dict[str, Any] = {
    'in_channels': 3,
    'out_channels': 3,
    'flip_sin_to_cos': True,
    'freq_shift': 0,
    'layers_per_block': 2,
    'downsample_padding': 1,
    'downsample_type': 'conv',
    'upsample_type': 'conv',
    'dropout': 0.0,
    'norm_num_groups': 32,
    'norm_eps': 1e-5,
    'resnet_time_scale_shift': 'default',
}
ADVICE = 'give the folder of an unconditional or class-conditional UNet2DModel'


def infer(unet: Mapping[str, Any], source: str) -> Inferred:
    """Returns the model that a `config.json` describes, up to its scheduler.

    Raises:
      UserError: a field is missing or has a value that our network does not have.
    """
    values = DEFAULTS | {name: default for name, (default, _) in FIXED.items()} | dict(unet)
    for name, (_, ours) in FIXED.items():
        expect(source, name, values[name], (ours,))
    kinds: dict[str, Any] = {name: type(value) for name, value in DEFAULTS.items()}
    kinds |= {'dropout': NUMBER, 'norm_eps': NUMBER, 'block_out_channels': list}
    kinds |= {'down_block_types': list, 'up_block_types': list}
    check_fields(values, kinds, source, advice=ADVICE)
    widths = values['block_out_channels']
    if not widths or not all(type(width) is int and width > 0 for width in widths):
        raise UserError(f'{source}: block_out_channels: expected channels, found {shown(widths)}')
    channels, base = values['in_channels'], widths[0]
    learned = values['out_channels'] == 2 * channels
    if not learned:
        expect(source, 'out_channels', values['out_channels'], (channels,))
    expect(source, 'time_embedding_dim', values.get('time_embedding_dim'), (None, 4 * base))
    time = values['flip_sin_to_cos'], values['freq_shift']
    expect(source, 'flip_sin_to_cos, freq_shift', time, tuple(TIME_EMBEDDINGS.values()))
    expect(source, 'downsample_padding', values['downsample_padding'], tuple(PADDINGS.values()))
    scales = values['resnet_time_scale_shift']
    expect(source, 'resnet_time_scale_shift', scales, ('default', 'scale_shift'))
    groups = values['norm_num_groups']
    # Without a number of its own, the attention of the middle has a norm only beside 'default'.
    absent = () if scales == 'scale_shift' else (None,)
    found = values.get('attn_norm_num_groups')
    expect(source, 'attn_norm_num_groups', found, (groups, *absent))
    levels, resblock = _levels(values, source)
    width, classes = values.get('attention_head_dim', 8), values.get('num_class_embeds')
    for name, value in (('attention_head_dim', width), ('num_class_embeds', classes)):
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f'{source}: {name}: expected a whole number, found {shown(value)}')
    attending = [widths[level] for level in levels] + widths[-1:]
    if wrong := [n for n in attending if width is not None and n % width]:
        raise UserError(
            f'{source}: attention_head_dim: {width} does not divide {wrong[0]} channels of '
            'block_out_channels'
        )
    fields = NVLABS_ONLY | {
        'image_channels': channels,
        'base_channels': base,
        'channel_mult': tuple(multiplier(n, base) for n in widths),
        'num_res_blocks': values['layers_per_block'],
        'num_heads': 1 if width is None else 0,
        'num_head_channels': 0 if width is None else width,
        'conv_resample': not resblock,
        'resblock_updown': resblock,
        'downsample_padding': _key(PADDINGS, values['downsample_padding']),
        'scale_shift_norm': scales == 'scale_shift',
        'dropout': values['dropout'],
        'num_classes': classes or 0,
        'time_embedding': _key(TIME_EMBEDDINGS, time),
        'norm_groups': groups,
        'norm_eps': values['norm_eps'],
    }
    size = _image_size(values.get('sample_size'), source)
    known = {'image_size': size, 'rescale_timesteps': False}
    constants = {name: value for name, value in known.items() if value is not None}
    return Inferred(PROGRAM, fields, levels, learned, constants)


def _levels(values: Mapping[str, Any], source: str) -> tuple[tuple[int, ...], bool]:
    """Returns the levels with attention, and True if residual blocks change the resolution."""
    down, up = values['down_block_types'], values['up_block_types']
    count = len(values['block_out_channels'])
    for name, kinds, side in (('down_block_types', down, 0), ('up_block_types', up, 1)):
        known = (PLAIN[side], ATTENTION[side], RESNET[side])
        if len(kinds) != count:
            raise UserError(
                f'{source}: {name}: expected {count}, as block_out_channels, found {len(kinds)}'
            )
        for kind in kinds:
            expect(source, name, kind, known)
    levels = tuple(level for level, kind in enumerate(down) if kind == ATTENTION[0])
    mirrored = tuple(level for level, kind in enumerate(up[::-1]) if kind == ATTENTION[1])
    if levels != mirrored:
        raise UserError(
            f'{source}: up_block_types: expected attention at the levels of down_block_types, '
            f'{levels}, found {mirrored}'
        )
    resampling: set[bool] = set()
    for name, kinds, side in (('downsample_type', down, 0), ('upsample_type', up, 1)):
        expect(source, name, values[name], ('conv', 'resnet'))
        # The last block of each side changes no resolution.
        for kind in kinds[: count - 1]:
            attends = kind == ATTENTION[side]
            resampling.add(values[name] == 'resnet' if attends else kind == RESNET[side])
    if len(resampling) > 1:
        raise UserError(
            f'{source}: down_block_types, downsample_type, up_block_types, upsample_type: expected '
            'resampling inside residual blocks at every level or at none, found some'
        )
    return levels, resampling == {True}


def _image_size(value: object, source: str) -> tuple[int, ...] | None:
    sides = value if isinstance(value, list) else [value]
    if value is None:
        return None
    if not 1 <= len(sides) <= 2 or not all(type(side) is int and side > 0 for side in sides):
        raise UserError(
            f'{source}: sample_size: expected a side or [height, width], found {shown(value)}'
        )
    return tuple(sides)


def expect(source: str, name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raises UserError if a value of a JSON file is not one of those that are implemented here."""
    if value not in allowed:
        wanted = ' or '.join('null' if one is None else str(one) for one in allowed)
        found = 'null' if value is None else shown(value)
        raise UserError(f'{source}: {name}: expected {wanted}, found {found}')


def _key(choices: Mapping[str, object], value: object) -> str:
    return next(name for name, found in choices.items() if found == value)
