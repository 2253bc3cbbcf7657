"""NVlabs/edm's networks (SongUNet, DhariwalUNet): names, inferred architecture, config.

A SongUNet is DDPM++ or NCSN++, a DhariwalUNet is ADM's network. Both read ln(σ)/4 as the time. The
file states the network's kind and the preconditioning; everything else follows from the tensors'
names and shapes, and from constants of the program.

Source: NVlabs/edm (008a4e5), `training/networks.py`; Karras et al. 2022, arXiv 2206.00364.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxunet.config import Config, resolve, to_dict
from jaxunet.config.network_relations import FILTERS
from jaxunet.config.schema import AUGMENTATION_INPUTS
from jaxunet.model.encoder import AUGMENTATION, FREQUENCIES
from jaxunet.runtime.errors import UserError
from jaxunet.weights.guided_diffusion import multiplier
from jaxunet.weights.inference import Inferred, Shapes
from jaxunet.weights.names import BlockNames, Entry, Module, Shape, entries

PROGRAM = 'NVlabs/edm'
SONG, DHARIWAL = 'SongUNet', 'DhariwalUNet'
FILTER = 'resample_filter'  # buffers that hold the weights of a filter, which the config names
NAMES = BlockNames(
    res_block={
        'norm_1': 'norm0',
        'conv_1': 'conv0',
        'embed': 'affine',
        'norm_2': 'norm1',
        'conv_2': 'conv1',
        'shortcut': 'skip',
    },
    attention={'norm': 'norm2', 'qkv': 'qkv', 'proj': 'proj'},
    unit_axes={'shortcut': 2, 'qkv': 2, 'proj': 2},
)
FIXED = {  # fields of `model` that are constants of the program
    'conv_resample': False,
    'resblock_updown': True,
    'max_period': 10000,
    'norm_groups': 32,
    'norm_group_channels': 4,
    'num_heads_upsample': 0,
}
FIXED_OF = {  # and of its networks
    SONG: {
        'num_heads': 1,
        'num_head_channels': 0,
        'scale_shift_norm': False,
        'norm_eps': 1e-6,
        'init': 'edm',
        'skip_scale': 0.5**0.5,
        'resample_proj': True,
        'decoder_attention': 'last',
        'label_position': 'input',
    },
    DHARIWAL: {
        'num_heads': 0,
        'num_head_channels': 64,
        'scale_shift_norm': True,
        'norm_eps': 1e-5,
        'time_embedding': 'adm',
    },
}


def table(config: Config) -> list[Entry]:
    """Returns the tensors of a network's state dict that hold weights."""
    return entries(config, NAMES, _modules)


def _modules(config: Config) -> Iterator[Module]:
    model, last = config.model, len(config.model.channel_mult) - 1
    side = config.data.image_size[0]
    yield Module('time_embed_0', 'map_layer0', 'layer')
    yield Module('time_embed_1', 'map_layer1', 'layer')
    yield Module(FREQUENCIES, 'map_noise', 'layer')
    yield Module(AUGMENTATION, 'map_augment', 'layer')
    yield Module('label_embed', 'map_label', 'layer')
    for level in range(last + 1):
        res = side >> level
        prefix = f'enc.{res}x{res}'
        if level == 0:
            yield Module('conv_in', f'{prefix}_conv', 'layer')
        else:
            yield Module(f'down_{level - 1}_resample', f'{prefix}_down', 'res_block')
            yield Module(f'down_{level - 1}_residual', f'{prefix}_aux_residual', 'layer')
        for i in range(model.num_res_blocks):
            yield from _block(f'down_{level}', i, f'{prefix}_block{i}')
    for level in range(last, -1, -1):
        res = side >> level
        prefix = f'dec.{res}x{res}'
        if level == last:
            yield Module('middle_res_0', f'{prefix}_in0', 'res_block')
            yield Module('middle_attention', f'{prefix}_in0', 'attention')
            yield Module('middle_res_1', f'{prefix}_in1', 'res_block')
        else:
            yield Module(f'up_{level + 1}_resample', f'{prefix}_up', 'res_block')
        for i in range(model.num_res_blocks + 1):
            yield from _block(f'up_{level}', i, f'{prefix}_block{i}')
    song = model.label_position == 'input'
    yield Module('norm_out', f'dec.{side}x{side}_aux_norm' if song else 'out_norm', 'layer')
    yield Module('conv_out', f'dec.{side}x{side}_aux_conv' if song else 'out_conv', 'layer')


def _block(ours: str, i: int, theirs: str) -> Iterator[Module]:
    yield Module(f'{ours}_res_{i}', theirs, 'res_block')
    yield Module(f'{ours}_attention_{i}', theirs, 'attention')


def infer(shapes: Mapping[str, Shape], source: str) -> Inferred:
    """Infers the architecture from a state dict's names and shapes.

    Raises:
      UserError: a required tensor is missing or has an impossible shape, or the network is not
        supported here.
    """
    tensors = Shapes(shapes, source, PROGRAM)
    width, waves = tensors.get('map_layer0.weight', 2)
    base, side = width // 4, _side(tensors)
    kind = DHARIWAL if 'out_conv.weight' in shapes else SONG
    first = tensors.get(f'enc.{side}x{side}_conv.weight', 4)
    last_layer = 'out_conv' if kind == DHARIWAL else f'dec.{side}x{side}_aux_conv'
    out = tensors.get(f'{last_layer}.weight', 4)[0]
    if out != first[1]:
        raise UserError(
            f'{source}: {last_layer}.weight: expected {first[1]} output channels, found {out}'
        )
    if not base or waves % base or (kind == SONG and first[0] != base):
        raise UserError(
            f'{source}: map_layer0.weight: expected shape (4 base, n base) with the base channels '
            f'of the network, found {(width, waves)}; channel_mult_emb other than 4 is not '
            'supported'
        )
    for name, shape in shapes.items():
        if '_aux_skip' in name or '_aux_down' in name:
            raise UserError(f'{source}: {name}: encoder_type=skip is not supported')
        if name == 'map_augment.weight' and shape[-1] != AUGMENTATION_INPUTS:
            raise UserError(
                f'{source}: {name}: expected {AUGMENTATION_INPUTS} augmentation labels, '
                f'found {shape[-1]}'
            )
    levels = _count(shapes, lambda level: f'{_encoder(side, level)}_block0.norm0.weight')
    blocks = _count(shapes, lambda i: f'{_encoder(side, 0)}_block{i}.norm0.weight')
    if not levels:
        tensors.get(f'{_encoder(side, 0)}_block0.norm0.weight', 1)
    channels = [
        tensors.get(f'{_encoder(side, level)}_block0.conv0.weight', 4)[0] for level in range(levels)
    ]
    fields = (
        FIXED
        | FIXED_OF[kind]
        | {
            'image_channels': first[1],
            'base_channels': base,
            'channel_mult': tuple(multiplier(c, base) for c in channels),
            'num_res_blocks': blocks,
            'num_classes': tensors.get('map_label.weight', 2)[0]
            if 'map_label.weight' in shapes
            else 0,
            'resample_filter': _filter(tensors),
            'channel_mult_noise': waves // base,
        }
    )
    if kind == SONG:
        residual = any('_aux_residual' in name for name in shapes)
        fields |= {
            'conv_in_channels': base,
            'time_embedding': 'fourier' if 'map_noise.freqs' in shapes else 'ddpm',
            'encoder_type': 'residual' if residual else 'standard',
        }
    attention = tuple(
        level for level in range(levels) if f'{_encoder(side, level)}_block0.qkv.weight' in shapes
    )
    return Inferred(PROGRAM, fields, attention, False, {'image_size': (side,)})


def _side(tensors: Shapes) -> int:
    for name in tensors.by_name:
        if match := re.fullmatch(r'enc\.([0-9]{1,5})x\1_conv\.weight', name):
            return int(match[1])
    raise tensors.missing('enc.SIDExSIDE_conv.weight')


def _encoder(side: int, level: int) -> str:
    res = side >> level
    return f'enc.{res}x{res}'


def _count(shapes: Mapping[str, Shape], name: Any) -> int:
    return next(n for n in range(len(shapes) + 1) if name(n) not in shapes)


def _filter(tensors: Shapes) -> tuple[int, ...]:
    """Returns the filter of a network, of which the shapes show the length."""
    lengths = {shape[-1] for name, shape in tensors.by_name.items() if name.endswith(FILTER)}
    known = {len(each): each for each in FILTERS}
    if not lengths:
        return FILTERS[0]
    if len(lengths) > 1 or not lengths & known.keys():
        raise UserError(
            f'{tensors.source}: {FILTER}: expected [1, 1] or [1, 3, 3, 1], '
            f'found lengths {sorted(lengths)}'
        )
    return known[lengths.pop()]


def config_of(
    inferred: Inferred, shapes: Mapping[str, Shape], sigma_data: float, source: str
) -> Config:
    """Returns the config of a network of EDM's preconditioning.

    Raises:
      UserError: the network cannot be run here.
    """
    (side,) = inferred.constants['image_size']
    model = inferred.fields | {
        'attention_resolutions': tuple(side >> level for level in inferred.attention_levels),
        'label_dropout': 0.0,
    }
    augments = 'map_augment.weight' in shapes
    config = Config().replace(
        model=model,
        diffusion={'objective': 'edm', 'edm_time_scale': 1.0, 'edm_sigma_data': sigma_data},
        data={
            'path': '',  # a file does not name its training images
            'image_size': (side,),
            'augment': 'edm' if augments else 'none',
        },
        train={'sample_every': 0},  # sample grids need 1 or 3 channels
    )
    try:
        return resolve(to_dict(config))
    except UserError as error:
        raise UserError(f'{source}: not a network that can be run here: {error}') from None
