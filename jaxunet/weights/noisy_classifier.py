"""guided-diffusion's classifiers of noisy images: names, inferred architecture, reading.

A classifier takes images of the size of the diffusion model that it guides. The names and shapes of
its tensors show the rest of the network, except the channels of a head and the order of qkv's rows,
which are constants of guided-diffusion's `create_classifier`.

Source: openai/guided-diffusion, `guided_diffusion/unet.py` (`EncoderUNetModel`) and
`script_util.py` (`create_classifier`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

import jax.numpy as jnp

from jaxunet.config import Config, resolve, to_dict
from jaxunet.config.schema import Fields
from jaxunet.model.noisy_classifier import build_classifier
from jaxunet.runtime.errors import UserError
from jaxunet.weights import guided_diffusion
from jaxunet.weights.guided_diffusion import PROGRAM, count_inputs, multiplier
from jaxunet.weights.inference import Shapes
from jaxunet.weights.names import (
    Entry,
    Module,
    Shape,
    Tree,
    adm_encoder,
    check_shapes,
    entries_of,
    shapes_of,
    to_tree,
)
from jaxunet.weights.safetensors_file import SafetensorsFile
from jaxunet.weights.state_dicts import unwrapped
from jaxunet.weights.torch_file import TorchFile

HEAD_CHANNELS = 64  # constant of `create_classifier`
NAMES = guided_diffusion.NAMES._replace(pool={'': '', 'qkv': 'qkv_proj', 'proj': 'c_proj'})
POSITION = 'out.2.positional_embedding'


class Classifier(NamedTuple):
    """A classifier of noisy images.

    Fields:
      config: the classifier's network under `model`; images, process and precision are those of the
        diffusion model.
      classes: number of classes.
      params: float32 numpy arrays.
      note: kind of file and number of parameters, for reports.
    """

    config: Config
    classes: int
    params: Tree
    note: str


def read(state: TorchFile | SafetensorsFile, like: Config) -> Classifier:
    """Reads a classifier.

    Args:
      like: the config of the diffusion model whose images it classifies.

    Raises:
      UserError: the file is not a classifier of such images, or its pool is not attention.
    """
    path = state.path
    names = unwrapped(state.shapes, path)
    shapes = {name: state.shapes[full] for name, full in names.items()}
    config, classes = infer(shapes, path, like)
    side = config.data.image_size[0]
    rows = table(config, classes)
    advice = f"expected {PROGRAM}'s names and shapes of a classifier of {side}x{side} images"
    check_shapes(shapes, {row.name: row.shape for row in rows}, path, advice)
    params = to_tree(lambda name: state.read(names[name]), rows, interleaved=True)
    total = sum(math.prod(shape) for shape in shapes.values())
    note = f'classifier of {classes} classes, {total:,} parameters'
    return Classifier(config, classes, params, note)


def table(config: Config, classes: int) -> list[Entry]:
    """Returns the tensors of a classifier's state dict, in its order."""
    network = build_classifier(config, classes)
    network = network.clone(time_scale=1.0, dtype=jnp.dtype(jnp.float32))  # shapes lack both
    return entries_of(shapes_of(network, network.side), config, NAMES, _modules)


def _modules(config: Config) -> Iterator[Module]:
    yield from adm_encoder(config)
    yield Module('norm_out', 'out.0', 'layer')
    yield Module('pool', 'out.2', 'pool')


def infer(shapes: Mapping[str, Shape], source: str, like: Config) -> tuple[Config, int]:
    """Infers a classifier's config and number of classes from its names and shapes.

    Args:
      like: the config of the diffusion model whose images it classifies.

    Raises:
      UserError: the file is not a classifier of such images, or its pool is not attention.
    """
    tensors = Shapes(shapes, source, PROGRAM)
    base = tensors.base_channels('time_embed.0.weight')
    _check_pool(tensors)
    image_channels = tensors.get('input_blocks.0.0.weight', 4)[1]
    if image_channels != like.model.image_channels:
        raise UserError(
            f'{source}: input_blocks.0.0.weight: expected {like.model.image_channels} channels, '
            f'those of the images that the model draws, found {image_channels}'
        )
    levels = _levels(tensors, like)
    inputs = count_inputs(tensors)
    blocks, rest = inputs // levels - 1, inputs % levels
    firsts = [1 + level * (blocks + 1) for level in range(levels)]
    first_convolutions = [f'input_blocks.{i}.0.in_layers.2.weight' for i in firsts]
    if blocks < 1 or rest or not all(name in shapes for name in first_convolutions):
        _other_size(tensors, like, f'{inputs} input_blocks that do not make {levels} levels')
    channels = [tensors.get(name, 4)[0] for name in first_convolutions]
    attends = [f'input_blocks.{i}.1.qkv.weight' in shapes for i in firsts]
    _check_heads(source, channels, attends)
    inner = tensors.get('input_blocks.1.0.emb_layers.1.weight', 2)[0]
    down = f'input_blocks.{blocks + 1}.0'
    fields: Fields = guided_diffusion.FIXED_MODEL | {
        'image_channels': image_channels,
        'base_channels': base,
        'channel_mult': tuple(multiplier(c, base) for c in channels),
        'num_res_blocks': blocks,
        'num_heads': 0,
        'num_head_channels': HEAD_CHANNELS,
        'conv_resample': f'{down}.op.weight' in shapes,
        'resblock_updown': levels > 1 and f'{down}.in_layers.0.weight' in shapes,
        'scale_shift_norm': inner == 2 * channels[0],
        'num_classes': 0,
        'label_dropout': 0.0,
        'attention_resolutions': tuple(
            like.image_shape[0] >> level for level, attention in enumerate(attends) if attention
        ),
    }
    config = Config().replace(
        model=fields,
        diffusion=like.diffusion,
        precision=like.precision,
        data={'image_size': like.data.image_size},
        train={'sample_every': 0},
    )
    try:
        return resolve(to_dict(config)), tensors.get('out.2.c_proj.weight', 3)[0]
    except UserError as error:
        raise UserError(f'{source}: the shapes do not make a network: {error}') from None


def _check_pool(tensors: Shapes) -> None:
    """Raises UserError for a network that is not a classifier, or has another pool."""
    shapes, source = tensors.by_name, tensors.source
    if any(name.startswith('output_blocks.') for name in shapes):
        raise UserError(
            f'{source}: output_blocks: this is a diffusion model; '
            'expected a classifier of noisy images (EncoderUNetModel)'
        )
    if POSITION in shapes:
        return
    first, last = shapes.get('out.0.weight', ()), 'out.3.weight' in shapes
    pools = {(1, True): 'adaptive', (2, True): 'spatial_v2', (2, False): 'spatial'}
    if (pool := pools.get((len(first), last))) is None:
        raise UserError(
            f'{source}: {POSITION} is missing: expected a classifier of noisy images '
            '(EncoderUNetModel with classifier_pool=attention)'
        )
    raise UserError(
        f'{source}: classifier_pool={pool}: only attention is supported, which all published '
        'classifiers have'
    )


def _check_heads(source: str, channels: list[int], attends: list[bool]) -> None:
    """Raises UserError if a level with attention (or the last) has no whole number of heads."""
    for level, width in enumerate(channels):
        last = level == len(channels) - 1
        if (attends[level] or last) and width % HEAD_CHANNELS:
            raise UserError(
                f'{source}: level {level}: expected a multiple of {HEAD_CHANNELS} channels, those '
                f"of a head in {PROGRAM}'s create_classifier, found {width}"
            )


def _levels(tensors: Shapes, like: Config) -> int:
    """Returns the number of levels, from the sides in pixels of the images and the lowest level."""
    height, width = like.image_shape[:2]
    if height != width:
        raise UserError(
            f'{tensors.source}: a classifier takes square images, but the model draws '
            f'{height}x{width}'
        )
    places = tensors.get(POSITION, 2)[1]
    lowest = math.isqrt(max(places - 1, 0))
    if lowest < 1 or lowest * lowest + 1 != places:
        raise UserError(
            f'{tensors.source}: {POSITION}: expected one place for each pixel of a square and one '
            f'for their mean, found {places}'
        )
    ratio = height // lowest
    if ratio * lowest != height or ratio & (ratio - 1):
        _other_size(tensors, like, f'a lowest level of {lowest}x{lowest} pixels')
    return ratio.bit_length()


def _other_size(tensors: Shapes, like: Config, what: str) -> NoReturn:
    side = like.image_shape[0]
    raise UserError(
        f'{tensors.source}: expected a classifier of {side}x{side} images, which the model draws, '
        f'found {what}; give the classifier of this size'
    )
