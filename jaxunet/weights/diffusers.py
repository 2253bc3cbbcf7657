"""diffusers' `UNet2DModel`: names of its tensors, and its `config.json` in both directions.

The blocks compute what ours do. The differences: a linear layer each for q, k and v; resampling
always with a convolution or inside residual blocks; widths of attention heads in place of their
number; a fixed period of the time embedding, which only a table can replace; and options that one
side lacks, which are refused by name.

Source: huggingface/diffusers 0.42.1, `models/unets/unet_2d.py`, `unet_2d_blocks.py`,
`models/embeddings.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxunet.config import Config, ModelConfig
from jaxunet.model.embeddings import timestep_embedding
from jaxunet.runtime.errors import UserError
from jaxunet.weights.fields import TRAINING_ONLY
from jaxunet.weights.names import BlockNames, Entry, Module, Shape, entries, parameter_shapes

PROGRAM = 'diffusers'
CLASS = 'UNet2DModel'
VERSION = '0.29.0'  # the first with every class and option that is written here
QKV = 'to_qkv'  # stands for the three layers to_q, to_k and to_v in our table of tensors
LABELS = 'class_embedding.weight'
FIRST = 'down_blocks.0.resnets.0.norm1.weight'  # a name that no other program uses
NAMES = BlockNames(
    res_block={
        'norm_1': 'norm1',
        'conv_1': 'conv1',
        'embed': 'time_emb_proj',
        'norm_2': 'norm2',
        'conv_2': 'conv2',
        'shortcut': 'conv_shortcut',
    },
    attention={'norm': 'group_norm', 'qkv': QKV, 'proj': 'to_out.0'},
    unit_axes={'shortcut': 2},
)
POSITIONAL, LEARNED = 'positional', 'learned'
MAX_PERIOD = 10000  # of positional time embeddings
# (flip_sin_to_cos, freq_shift) of our time embeddings.
TIME_EMBEDDINGS = {'adm': (True, 0), 'ddpm': (False, 1)}
PADDINGS = {'symmetric': 1, 'same': 0}
PLAIN, RESNET = ('DownBlock2D', 'UpBlock2D'), ('ResnetDownsampleBlock2D', 'ResnetUpsampleBlock2D')
ATTENTION = ('AttnDownBlock2D', 'AttnUpBlock2D')
# Options of UNet2DModel with their defaults, which a config.json may leave out, and the only value
# that our network has.
FIXED: dict[str, tuple[object, object]] = {
    'center_input_sample': (False, False),
    'time_embedding_type': (POSITIONAL, POSITIONAL),
    'mid_block_type': ('UNetMidBlock2D', 'UNetMidBlock2D'),
    'mid_block_scale_factor': (1, 1),
    'act_fn': ('silu', 'silu'),
    'add_attention': (True, True),
    'class_embed_type': (None, None),
}
# Fields of `model` that `unet_config` writes. Any other must have its default.
WRITTEN = {
    'image_channels',
    'base_channels',
    'channel_mult',
    'num_res_blocks',
    'attention_resolutions',
    'num_heads',
    'num_heads_upsample',
    'num_head_channels',
    'conv_resample',
    'downsample_padding',
    'resblock_updown',
    'scale_shift_norm',
    'num_classes',
    'time_embedding',
    'max_period',
    'norm_groups',
    'norm_eps',
}


def table(config: Config) -> list[Entry]:
    """Returns the tensors of diffusers' state dict, with one `to_qkv` for its three layers."""
    return entries(config, NAMES, _modules)


def _modules(config: Config) -> Iterator[Module]:
    model, last = config.model, len(config.model.channel_mult) - 1
    kind, layer = ('res_block', '') if model.resblock_updown else ('layer', '.conv')
    yield Module('time_embed_0', 'time_embedding.linear_1', 'layer')
    yield Module('time_embed_1', 'time_embedding.linear_2', 'layer')
    yield Module('label_embed', 'class_embedding', 'layer')
    yield Module('conv_in', 'conv_in', 'layer')
    for direction, place, blocks in (
        ('down', range(last + 1), model.num_res_blocks),
        ('up', range(last, -1, -1), model.num_res_blocks + 1),
    ):
        for index, level in enumerate(place):
            prefix = f'{direction}_blocks.{index}'
            for i in range(blocks):
                yield Module(f'{direction}_{level}_res_{i}', f'{prefix}.resnets.{i}', 'res_block')
                name = f'{direction}_{level}_attention_{i}'
                yield Module(name, f'{prefix}.attentions.{i}', 'attention')
            if index < last:
                resampler = f'{prefix}.{direction}samplers.0{layer}'
                yield Module(f'{direction}_{level}_resample', resampler, kind)
        if direction == 'down':
            yield Module('middle_res_0', 'mid_block.resnets.0', 'res_block')
            yield Module('middle_attention', 'mid_block.attentions.0', 'attention')
            yield Module('middle_res_1', 'mid_block.resnets.1', 'res_block')
    yield Module('norm_out', 'conv_norm_out', 'layer')
    yield Module('conv_out', 'conv_out', 'layer')


class Constant(NamedTuple):
    """A tensor that no parameter of ours determines.

    Fields:
      make: returns it; called only once its shape is known to be that of a tensor in the file.
    """

    shape: Shape
    make: Callable[[], np.ndarray]


def constants(config: Config) -> dict[str, Constant]:
    """Returns the tensors that UNet2DModel needs for operations that have no parameters here.

    Its resampling has convolutions: they compute the average of 2×2 pixels, and the pixels
    themselves. A time embedding of another period or of rescaled timesteps is a table of its values
    at the timesteps.
    """
    model, arrays = config.model, {}
    if needs_table(config):
        shape = config.diffusion.steps, model.base_channels
        arrays['time_proj.weight'] = Constant(shape, lambda: _time_table(config))
    if model.conv_resample or model.resblock_updown:
        return arrays
    widths = _widths(model)
    for direction, channels in (('down', widths[:-1]), ('up', widths[:0:-1])):
        for index, width in enumerate(channels):
            name = f'{direction}_blocks.{index}.{direction}samplers.0.conv'
            kernel = functools.partial(_resampling_kernel, direction, width)
            zeros = functools.partial(np.zeros, width, np.float32)
            arrays[f'{name}.weight'] = Constant((width, width, 3, 3), kernel)
            arrays[f'{name}.bias'] = Constant((width,), zeros)
    return arrays


def _resampling_kernel(direction: str, width: int) -> np.ndarray:
    """Returns the kernel that averages 2×2 pixels (`down`) or keeps the pixel (`up`), OIHW."""
    kernel = np.zeros((3, 3), np.float32)
    if direction == 'down':  # with a padding of one pixel, the window begins one pixel before
        kernel[1:, 1:] = 0.25
    else:
        kernel[1, 1] = 1
    return np.eye(width, dtype=np.float32)[:, :, None, None] * kernel


def _time_table(config: Config) -> np.ndarray:
    """Returns the time embedding at every timestep, (steps, base_channels)."""
    model = config.model
    times = np.arange(config.diffusion.steps) * config.diffusion.time_scale
    embedding = timestep_embedding(
        jnp.asarray(times, jnp.float32),
        model.base_channels,
        max_period=model.max_period,
        order=model.time_embedding,
    )
    return np.asarray(embedding)


def needs_table(config: Config) -> bool:
    """Returns True if no positional time embedding of UNet2DModel is that of a config."""
    return config.model.max_period != MAX_PERIOD or config.diffusion.time_scale != 1


def _widths(model: ModelConfig) -> list[int]:
    return [int(mult * model.base_channels) for mult in model.channel_mult]


def label_rows(config: Config) -> int:
    """Returns the rows of the table of labels: one more if some were dropped in training.

    That last row is zeros, the embedding of no class; with it, diffusers can guide.
    """
    model = config.model
    return model.num_classes + (model.num_classes > 0 and model.label_dropout > 0)


def unet_config(config: Config) -> dict[str, Any]:
    """Returns the `config.json` of the UNet2DModel that computes a config's network.

    Args:
      config: passed `network_problems`.
    """
    model, levels = config.model, config.attention_levels
    height, width, channels = config.image_shape
    plain = RESNET if model.resblock_updown else PLAIN
    kinds = [
        [(ATTENTION if level in levels else plain)[side] for level in range(len(_widths(model)))]
        for side in (0, 1)
    ]
    flip, shift = TIME_EMBEDDINGS[model.time_embedding]
    pooled = not model.conv_resample or model.resblock_updown
    resampling = 'resnet' if model.resblock_updown else 'conv'
    time = {'time_embedding_type': LEARNED, 'num_train_timesteps': config.diffusion.steps}
    return {name: ours for name, (_, ours) in FIXED.items()} | {
        '_class_name': CLASS,
        '_diffusers_version': VERSION,
        'sample_size': height if height == width else [height, width],
        'in_channels': channels,
        'out_channels': channels * (2 if config.diffusion.learn_sigma else 1),
        'flip_sin_to_cos': flip,
        'freq_shift': shift,
        'down_block_types': kinds[0],
        'up_block_types': kinds[1][::-1],
        'block_out_channels': _widths(model),
        'layers_per_block': model.num_res_blocks,
        'downsample_padding': 1 if pooled else PADDINGS[model.downsample_padding],
        'downsample_type': resampling,
        'upsample_type': resampling,
        'dropout': model.dropout,
        'attention_head_dim': _head_width(config),
        'norm_num_groups': model.norm_groups,
        'attn_norm_num_groups': model.norm_groups,
        'norm_eps': model.norm_eps,
        'resnet_time_scale_shift': 'scale_shift' if model.scale_shift_norm else 'default',
        'num_class_embeds': label_rows(config) or None,
        **(time if needs_table(config) else {}),
    }


def _heads(config: Config) -> dict[tuple[str, int], int]:
    """Returns the number of heads by direction and channels of the blocks with attention."""
    model, widths = config.model, _widths(config.model)
    attending = {widths[level] for level in config.attention_levels} | {widths[-1]}
    return {
        (direction, width): heads or max(width // model.num_head_channels, 1)
        for direction, heads in (
            ('down', model.num_heads),
            ('up', model.num_heads_upsample or model.num_heads),
        )
        for width in sorted(attending)
        # The middle, which is of the encoder, has the channels of the last level.
        if direction == 'down' or width in {widths[level] for level in config.attention_levels}
    }


def _head_width(config: Config) -> int | None:
    """Returns the channels of a head; None = one head of all channels.

    Raises:
      UserError: blocks have heads of several widths.
    """
    heads = _heads(config)
    widths = {width // count for (_, width), count in heads.items()}
    if len(widths) == 1:
        return widths.pop()
    if set(heads.values()) == {1}:
        return None
    model = config.model
    other = model.num_heads_upsample not in (0, model.num_heads)
    name = 'num_heads_upsample' if other else 'num_heads'
    raise UserError(
        f'model.{name}: expected heads of one width in every block, found {getattr(model, name)} '
        f'heads and widths of {", ".join(map(str, sorted(widths)))} channels'
    )


def network_problems(config: Config) -> Iterator[str]:
    """Yields `field: expected a, found b` for every field that no UNet2DModel has."""
    model = config.model
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if field.name not in (*WRITTEN, *TRAINING_ONLY) and value != field.default:
            yield f'model.{field.name}: expected {field.default!r}, found {value!r}'
    if (first := _widths(model)[0]) != model.base_channels:
        yield (
            f'model.channel_mult: expected a first level of model.base_channels='
            f'{model.base_channels} channels, found {first}'
        )
    if model.time_embedding not in TIME_EMBEDDINGS:
        known = ' or '.join(TIME_EMBEDDINGS)
        yield f'model.time_embedding: expected {known}, found {model.time_embedding}'
    if config.diffusion.continuous and model.max_period != MAX_PERIOD:
        yield (
            f'model.max_period: expected {MAX_PERIOD} with diffusion.objective='
            f'{config.diffusion.objective}, found {model.max_period}'
        )
    try:
        parameter_shapes(config)
        _head_width(config)
    except UserError as error:
        yield str(error)
