"""Maps our parameter tree to a torch state dict: names and axes of each tensor.

guided-diffusion and unet.cu build the same sequence of modules (`input_blocks.i.j`,
`middle_block.j`, `output_blocks.i.j`); only the names inside a block differ. This module walks the
sequence for both, and each format has its own `BlockNames`. ddpm-torch builds the same network from
other modules (`jaxunet.weights.ddpm_torch`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict as flatten
from flax.traverse_util import unflatten_dict as unflatten
from jaxtyping import PyTree

from jaxunet.config import Config
from jaxunet.model.encoder import AUGMENTATION, FREQUENCIES, Encoder
from jaxunet.model.unet import build_unet
from jaxunet.runtime.errors import UserError, itemized

Path = tuple[str, ...]
Shape = tuple[int, ...]
Tree = dict[str, PyTree]  # nested dicts of arrays
SHOWN = 5  # problems that an error message lists
# Numbers of axes of length 1 that torch appends to our matrices: for a 1×1 convolution, and for a
# 1-D convolution over the pixels.
UNIT_AXES = {'shortcut': 2, 'qkv': 1, 'proj': 1}
LEAVES = {
    'kernel': 'weight',
    'scale': 'weight',
    'embedding': 'weight',
    'bias': 'bias',
    'position': 'positional_embedding',
    'frequencies': 'freqs',
}


class Module(NamedTuple):
    """A module of the network.

    Fields:
      name: our name of the module.
      prefix: prefix of its tensors' names in the file.
      kind: layer, res_block, attention or pool.
    """

    name: str
    prefix: str
    kind: str


class BlockNames(NamedTuple):
    """A format's names for the layers of a residual and an attention block, in its order.

    Fields:
      pool: names for the layers of a classifier's attention pool.
      unit_axes: axes of length 1 that the format appends to our matrices, by our name of the layer.
    """

    res_block: Mapping[str, str]
    attention: Mapping[str, str]
    unit_axes: Mapping[str, int] = UNIT_AXES
    pool: Mapping[str, str] = {}


class Entry(NamedTuple):
    """One tensor.

    Fields:
      path: its path in our tree.
      name, shape: its name and shape in the file.
      heads: number of heads of a qkv projection; 0 for other tensors.
    """

    path: Path
    name: str
    shape: Shape
    heads: int


def parameter_shapes(config: Config) -> Mapping[Path, Shape]:
    """Returns path and shape of every parameter of a config's UNet, without allocating it.

    Raises:
      UserError: the config describes no valid network (a head width that does not divide the
        channels).
    """
    unet = build_unet(config).clone(time_scale=1.0, dtype=jnp.float32)
    factor = 2 ** (len(config.model.channel_mult) - 1)
    labels = [jax.ShapeDtypeStruct((1,), jnp.int32)] if config.model.num_classes else []
    return shapes_of(unet, factor, *labels)


@functools.lru_cache(maxsize=16)
def shapes_of(network: Encoder, side: int, *labels: jax.ShapeDtypeStruct) -> Mapping[Path, Shape]:
    """Returns path and shape of a network's parameters; cached, because tracing takes a second.

    Args:
      side: side of an image that the network takes, in pixels.
      labels: inputs that it takes after image and time.
    """
    image = jax.ShapeDtypeStruct((1, side, side, network.model.image_channels), jnp.float32)
    time = jax.ShapeDtypeStruct((1,), jnp.int32)
    with jax.enable_x64(False):  # float32 even where a caller enabled float64
        # The key too is only traced: making one would start the devices.
        made = jax.eval_shape(
            lambda *inputs: network.init(jax.random.key(0), *inputs), image, time, *labels
        )
    return {path: tuple(leaf.shape) for path, leaf in flatten(made['params']).items()}


def adm_encoder(config: Config) -> Iterator[Module]:
    """Yields the modules of guided-diffusion and unet.cu up to the middle, in their order.

    Modules without parameters are included; `entries` skips them.
    """
    model, last = config.model, len(config.model.channel_mult) - 1
    resample = 'res_block' if model.resblock_updown else 'layer'
    yield Module('time_embed_0', 'time_embed.0', 'layer')
    yield Module('time_embed_1', 'time_embed.2', 'layer')
    # Our own names; they have no such layers.
    yield Module(AUGMENTATION, 'augment_embed', 'layer')
    yield Module(FREQUENCIES, 'fourier_embed', 'layer')
    yield Module('label_embed', 'label_emb', 'layer')
    yield Module('conv_in', 'input_blocks.0.0', 'layer')
    index = 1
    for level in range(last + 1):
        for i in range(model.num_res_blocks):
            yield Module(f'down_{level}_res_{i}', f'input_blocks.{index}.0', 'res_block')
            yield Module(f'down_{level}_attention_{i}', f'input_blocks.{index}.1', 'attention')
            index += 1
        if level != last:
            yield Module(
                f'down_{level}_resample',
                f'input_blocks.{index}.0' + ('' if model.resblock_updown else '.op'),
                resample,
            )
            yield Module(f'down_{level}_residual', f'residual_blocks.{level}', 'layer')
            index += 1
    yield Module('middle_res_0', 'middle_block.0', 'res_block')
    yield Module('middle_attention', 'middle_block.1', 'attention')
    yield Module('middle_res_1', 'middle_block.2', 'res_block')


def adm_modules(config: Config) -> Iterator[Module]:
    """Yields the modules of guided-diffusion and unet.cu, in their order; see `adm_encoder`."""
    yield from adm_encoder(config)
    model, levels, last = config.model, config.attention_levels, len(config.model.channel_mult) - 1
    resample = 'res_block' if model.resblock_updown else 'layer'
    index = 0
    for level in range(last, -1, -1):
        for i in range(model.num_res_blocks + 1):
            yield Module(f'up_{level}_res_{i}', f'output_blocks.{index}.0', 'res_block')
            yield Module(f'up_{level}_attention_{i}', f'output_blocks.{index}.1', 'attention')
            if level > 0 and i == model.num_res_blocks:
                place = 2 if level in levels else 1
                yield Module(
                    f'up_{level}_resample',
                    f'output_blocks.{index}.{place}' + ('' if model.resblock_updown else '.conv'),
                    resample,
                )
            index += 1
    yield Module('norm_out', 'out.0', 'layer')
    yield Module('conv_out', 'out.2', 'layer')


def entries(
    config: Config, names: BlockNames, modules: Callable[[Config], Iterator[Module]] = adm_modules
) -> list[Entry]:
    """Returns every parameter of a config's UNet, in the order of the file.

    Args:
      modules: yields the modules of the program that wrote the file, like `adm_modules`.
    """
    return entries_of(parameter_shapes(config), config, names, modules)


def entries_of(
    shapes: Mapping[Path, Shape],
    config: Config,
    names: BlockNames,
    modules: Callable[[Config], Iterator[Module]],
) -> list[Entry]:
    """Returns the parameters of these shapes, in the order of the file; see `entries`."""
    table = []
    for module, prefix, kind in modules(config):
        layers = {'': ''} if kind == 'layer' else getattr(names, kind)
        for ours, theirs in layers.items():
            for leaf, suffix in LEAVES.items():
                path = tuple(part for part in (module, ours, leaf) if part)
                if path in shapes:
                    name = '.'.join(part for part in (prefix, theirs, suffix) if part)
                    several = kind == 'attention' and ours == 'qkv'
                    heads = _heads(config, module, shapes[path][-1] // 3) if several else 0
                    shape = _file_shape(path, shapes[path], names.unit_axes)
                    table.append(Entry(path, name, shape, heads))
    assert {entry.path for entry in table} == set(shapes), (
        'the table of names does not cover the parameter tree'
    )
    return table


def _heads(config: Config, module: str, channels: int) -> int:
    model = config.model
    heads = (
        (model.num_heads_upsample or model.num_heads)
        if module.startswith('up_')
        else model.num_heads
    )
    return heads or channels // model.num_head_channels


def _file_shape(path: Path, shape: Shape, unit_axes: Mapping[str, int]) -> Shape:
    if path[-1] != 'kernel':
        return shape
    return (*shape[::-1][:2], *shape[:-2], *(1,) * unit_axes.get(path[-2], 0))


def to_file(entry: Entry, value: np.ndarray) -> np.ndarray:
    """Converts a leaf to the file's axes: convolutions to OIHW, linear layers to (out, in)."""
    if entry.path[-1] == 'kernel':
        value = np.moveaxis(value, (-1, -2), (0, 1)).reshape(entry.shape)
    return np.ascontiguousarray(value, np.float32)


def from_file(entry: Entry, value: np.ndarray) -> np.ndarray:
    """Converts a tensor of the file to a leaf of our tree; the inverse of `to_file`."""
    if entry.path[-1] == 'kernel':
        if entry.path[-2] in UNIT_AXES:
            value = value.reshape(value.shape[:2])
        value = np.moveaxis(value, (0, 1), (-1, -2))
    return np.ascontiguousarray(value, np.float32)


def to_tree(
    read: Callable[[str], np.ndarray], table: list[Entry], *, interleaved: bool = False
) -> Tree:
    """Builds our parameter tree from a state dict.

    Args:
      read: name -> tensor of the state dict.
      table: the tensors of the state dict.
      interleaved: True if qkv's rows are q, k, v of the first head, then of the second, ...; False
        if they are all q, all k, all v.
    """
    leaves = {}
    for entry in table:
        value = read(entry.name)
        if entry.heads and interleaved:
            value = _swap(value, entry.heads, 3)
        leaves[entry.path] = from_file(entry, value)
    return unflatten(leaves)


def from_tree(
    params: Mapping[str, object], table: list[Entry], *, interleaved: bool = False
) -> dict[str, np.ndarray]:
    """Returns the state dict of our parameter tree; the inverse of `to_tree`."""
    leaves = flatten(params)
    state = {}
    for entry in table:
        value = to_file(entry, np.asarray(leaves[entry.path]))
        if entry.heads and interleaved:
            value = np.ascontiguousarray(_swap(value, 3, entry.heads))
        state[entry.name] = value
    return state


def _swap(value: np.ndarray, first: int, second: int) -> np.ndarray:
    """Reorders rows (first, second, width) as (second, first, width)."""
    return value.reshape(first, second, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)


def check_finite(value: np.ndarray, source: str, where: Callable[[int], str]) -> None:
    """Checks that all values are finite.

    Args:
      source: name of the file; the error message begins with it.
      where: flat index -> its place in the file, for the message.

    Raises:
      UserError: there is a NaN or an infinity.
    """
    finite = np.isfinite(value).ravel()
    if not finite.all():
        index = int(np.argmin(finite))
        first = value.ravel()[index]
        raise UserError(
            f'{source}: {where(index)} is {first}, expected finite numbers; '
            f'{np.count_nonzero(~finite)} of {finite.size} values of this tensor are not finite, '
            'so the weights are damaged or training had diverged'
        )


def check_shapes(
    found: Mapping[str, Shape], expected: Mapping[str, Shape], source: str, advice: str
) -> None:
    """Checks the names and shapes of tensors.

    Args:
      source: name of the file; the error message begins with it.
      advice: what was expected, for the message.

    Raises:
      UserError: tensors are missing, unexpected or of another shape; the message names them.
    """
    problems = [
        f'{name}: missing, expected shape {expected[name]}'
        for name in expected
        if name not in found
    ]
    problems += [
        f'{name}: expected shape {expected[name]}, found {found[name]}'
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    problems += [
        f'{name}: unexpected, shape {found[name]}' for name in found if name not in expected
    ]
    if problems:
        more = f'\n  ... and {len(problems) - SHOWN} more' if len(problems) > SHOWN else ''
        raise UserError(
            f'{source}: the parameters do not fit; {advice}:{itemized(problems[:SHOWN])}{more}'
        )


def without_augmentation(config: Config, *trees: Tree) -> tuple[Config, list[Tree]]:
    """Returns a config and trees without the layer that tells the network of `data.augment=edm`.

    For images that are not augmented, the network computes the same, because the layer has no bias.
    """
    rest = [{k: v for k, v in tree.items() if k != AUGMENTATION} for tree in trees]
    return config.replace(data={'augment': 'none'}) if config.augmentation_inputs else config, rest


def check_tree(params: Mapping[str, object], config: Config, source: str = 'parameters') -> None:
    """Checks a parameter tree against a config's network: leaves, shapes, float32, all finite.

    Args:
      source: name of the tree; error messages begin with it.

    Raises:
      UserError: the tree differs; the message names the first wrong leaves.
    """
    leaves = {'/'.join(path): leaf for path, leaf in flatten(params).items()}
    expected = {'/'.join(path): shape for path, shape in parameter_shapes(config).items()}
    check_shapes(
        {name: tuple(np.shape(leaf)) for name, leaf in leaves.items()},
        expected,
        source,
        'expected the tree of the config',
    )
    for name, leaf in leaves.items():
        value = np.asarray(leaf)
        if value.dtype != np.float32:
            raise UserError(f'{source}: {name}: expected float32, found {value.dtype}')
        check_finite(value, source, lambda index, name=name: f'{name}, flat index {index},')  # type: ignore[misc]


def count(table: list[Entry]) -> int:
    """Returns the number of elements of all tensors of a table."""
    return sum(math.prod(entry.shape) for entry in table)
