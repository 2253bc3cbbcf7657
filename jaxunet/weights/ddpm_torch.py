"""ddpm-torch's state dict (DDPM's UNet): names and inferred architecture.

A checkpoint of ddpm-torch is a dict: `model`, `ema` with the averaged weights under `shadow`,
optimizer, scheduler and numbers. The blocks are DDPM's: attention has one head, the time embedding
has sines and then cosines, and convolutions of stride 2 are padded right and bottom.

Source: tqch/ddpm-torch, `ddpm_torch/models/unet.py`, `utils/train.py`, `diffusion.py`; Ho et al.
2020, arXiv 2006.11239.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from jaxunet.config import Config
from jaxunet.runtime.errors import UserError
from jaxunet.weights.fields import NVLABS_ONLY
from jaxunet.weights.inference import TIME_SCALE, Inferred, Shapes
from jaxunet.weights.names import BlockNames, Entry, Module, Shape, entries

PROGRAM = 'ddpm-torch'
FIRST = 'in_conv.weight'  # a name that no other program uses
NAMES = BlockNames(
    res_block={
        'norm_1': 'norm1',
        'conv_1': 'conv1',
        'embed': 'fc',
        'norm_2': 'norm2',
        'conv_2': 'conv2',
        'shortcut': 'skip',
    },
    attention={'norm': 'norm', 'qkv': 'project_in', 'proj': 'project_out'},
    unit_axes={'shortcut': 2, 'qkv': 2, 'proj': 2},
)
# Our options that ddpm-torch lacks, with its fixed values.
FIXED = {
    'num_heads': 1,
    'num_heads_upsample': 0,
    'num_head_channels': 0,
    'downsample_padding': 'same',
    'resblock_updown': False,
    'scale_shift_norm': False,
    'num_classes': 0,
    'time_embedding': 'ddpm',
    'max_period': 10000,
    'norm_groups': 32,
    'norm_eps': 1e-6,
    **NVLABS_ONLY,
}


def table(config: Config) -> list[Entry]:
    """Returns the tensors of ddpm-torch's state dict."""
    return entries(config, NAMES, _modules)


def _modules(config: Config) -> Iterator[Module]:
    model, levels, last = config.model, config.attention_levels, len(config.model.channel_mult) - 1
    yield Module('time_embed_0', 'embed.0', 'layer')
    yield Module('time_embed_1', 'embed.2', 'layer')
    yield Module('conv_in', 'in_conv', 'layer')
    for direction, side in (('down', 'downsamples'), ('up', 'upsamples')):
        blocks = model.num_res_blocks + (direction == 'up')
        for level in range(last + 1):
            prefix = f'{side}.level_{level}'
            for i in range(blocks):
                attends = level in levels
                block = f'{prefix}.{i}'
                yield Module(f'{direction}_{level}_res_{i}', block + '.0' * attends, 'res_block')
                if attends:
                    yield Module(f'{direction}_{level}_attention_{i}', f'{block}.1', 'attention')
            yield Module(f'{direction}_{level}_resample', f'{prefix}.{blocks}.1', 'layer')
    yield Module('middle_res_0', 'middle.0', 'res_block')
    yield Module('middle_attention', 'middle.1', 'attention')
    yield Module('middle_res_1', 'middle.2', 'res_block')
    yield Module('norm_out', 'out_conv.0', 'layer')
    yield Module('conv_out', 'out_conv.2', 'layer')


def infer(shapes: Mapping[str, Shape], source: str) -> Inferred:
    """Infers the architecture from a state dict's names and shapes.

    Raises:
      UserError: a required tensor is missing or has an impossible shape, or the network is not
        supported here: it has a learned variance, or shuffles pixels into channels.
    """
    if any(name.startswith('_model.') for name in shapes):
        raise UserError(
            f'{source}: _model.{FIRST}: a network of ddpm-torch with block_size above 1, which '
            'shuffles pixels into channels, is not supported; give one with block_size=1'
        )
    tensors = Shapes(shapes, source, PROGRAM)
    base = tensors.base_channels('embed.0.weight')
    image_channels = tensors.get(FIRST, 4)[1]
    out = tensors.get('out_conv.2.weight', 4)[0]
    if out == 2 * image_channels:
        raise UserError(
            f'{source}: out_conv.2.weight: {out} output channels for {image_channels} of the image:'
            " ddpm-torch's learned variance (model_var_type=learned) is a logarithm, which is not "
            'supported; give a network with a fixed variance'
        )
    if out != image_channels:
        raise UserError(
            f'{source}: out_conv.2.weight: expected {image_channels} output channels, found {out}'
        )
    places = [
        (int(match[1]), int(match[2]))
        for name in shapes
        if (match := re.match(r'downsamples\.level_([0-9]{1,4})\.([0-9]{1,4})\.', name))
    ]
    # The last level has no downsampling after its blocks.
    last = max((level for level, _ in places), default=0)
    blocks = 1 + max((i for level, i in places if level == last), default=0)
    prefixes = [f'downsamples.level_{level}.0' for level in range(last + 1)]
    attends = [f'{prefix}.1.project_in.weight' in shapes for prefix in prefixes]
    channels = [
        tensors.get(f'{prefix}{".0" * attention}.conv1.weight', 4)[0]
        for prefix, attention in zip(prefixes, attends, strict=True)
    ]
    if wrong := [n for n in channels if n % base]:
        raise UserError(
            f'{source}: downsamples: expected multiples of {base} channels, found {wrong[0]}'
        )
    fields = FIXED | {
        'image_channels': image_channels,
        'base_channels': base,
        'channel_mult': tuple(n // base for n in channels),
        'num_res_blocks': blocks,
        'conv_resample': f'downsamples.level_0.{blocks}.1.weight' in shapes,
    }
    levels = tuple(level for level, attention in enumerate(attends) if attention)
    return Inferred(PROGRAM, fields, levels, False, {'rescale_timesteps': False})


def check_diffusion(config: Config, source: str) -> None:
    """Checks that ddpm-torch has the diffusion process that is stated for a file.

    Raises:
      UserError: the noise schedule is not linear; or, for this number of steps, ddpm-torch's linear
        schedule differs from ours, because its end does not depend on the number.
    """
    diffusion = config.diffusion
    if diffusion.schedule != 'linear':
        raise UserError(
            f'{source}: schedule: expected linear for weights of ddpm-torch, found '
            f'{diffusion.schedule}; its other schedules are not supported'
        )
    if diffusion.steps != TIME_SCALE:
        raise UserError(
            f'{source}: diffusion_steps: expected {TIME_SCALE} for weights of ddpm-torch, found '
            f'{diffusion.steps}, at which its linear schedule differs from the one here'
        )
