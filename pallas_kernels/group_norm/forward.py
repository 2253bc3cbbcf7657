"""The forward kernels of GroupNorm in Triton, which write act(norm(x) · scale + offset).

With the parts' moments, a program reads its pixels once, and several programs share the pixels of a
sample. Without them, a program owns whole groups of a sample and reads their pixels twice, first
for the statistics, then in reverse order to write.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxunet.ops.activation import at_least_float32
from jaxunet.ops.group_norm.operands import group_size
from pallas_kernels.group_norm.blocks import (
    Program,
    group_statistics,
    loop,
    moments_of,
    scaled,
    sigmoid,
)
from pallas_kernels.group_norm.tiles import Grid, Tile, choose_tile, fit
from pallas_kernels.jax_modules import triton as plgpu
from pallas_kernels.types import Ref


def _normalise_kernel(*refs: Ref, grid: Grid, eps: float, silu: bool, known: bool) -> None:
    """Normalises the pixels of one program.

    Args:
      refs: parts (batch, pixels, Ci)…, if `known` their moments (batch, Ci, 2)…, scale and offset
        (1|batch, C); results: y (batch, pixels, C), mean and inverse (batch, C).
      known: the moments are given; else the program owns whole groups and reduces its pixels.
    """
    count = len(grid.parts)
    parts, moments, (scale, offset, y, mean_ref, inverse_ref) = (
        refs[:count],
        refs[count:-5],
        refs[-5:],
    )
    program = Program(grid, exact=parts[0].dtype.itemsize >= 4)
    wide = mean_ref.dtype
    resident: list[Array] = []  # the tiles read last; with one step, all tiles

    def read(step: Array | int) -> list[Array]:
        tiles = program.load(parts, step)
        resident[:] = tiles
        return tiles

    if known:
        if grid.steps == 1:
            read(0)  # before the small loads below, to overlap both latencies
        mean, deviation = program.load_moments(moments)
    else:
        mean, total, pixels = moments_of(program, read, wide)
        deviation = total / pixels
    mean, inv = group_statistics(program, mean, deviation, eps)
    sample = program.sample
    factor = program.load_channels(scale, sample if scale.shape[0] > 1 else 0, dtype=wide) * inv
    shift = program.load_channels(offset, sample if offset.shape[0] > 1 else 0, dtype=wide)
    # Every split writes the same values.
    program.store_channels(mean_ref, mean, sample)
    program.store_channels(inverse_ref, inv, sample)

    def write(step: Array | int, _: None) -> None:
        tiles = resident if grid.steps == 1 else program.load(parts, step)
        z = [scaled(v, mean, factor, shift) for v in tiles]
        program.store([y], step, [v * sigmoid(v, grid) for v in z] if silu else z)

    # The data read last is in the nearest cache, so the second pass runs in reverse order.
    loop(grid.steps, write, None, backwards=True)


def normalise(
    parts: Sequence[Float[Array, 'batch height width _']],
    moments: Sequence[Float[Array, 'batch _ 2']] | None,
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    *,
    groups: int,
    eps: float,
    silu: bool,
    tile: Tile | None = None,
    interpret: bool = False,
) -> tuple[
    Float[Array, 'batch height width channels'],
    Float[Array, 'batch channels'],
    Float[Array, 'batch channels'],
]:
    """Returns act(norm(x) · scale + offset) and the statistics, in one launch.

    Args:
      parts: x, joined along channels; no concatenation is built.
      moments: of the parts, as `statistics.moments` returns them. With them the kernel reads x
        once. Without them, it reads x twice, the second time from registers if x fits, else from
        the caches.

    Returns: the activation in x's dtype; the group's mean and 1 / sqrt(variance + eps) of each
      sample and channel, at least float32.

    Raises:
      ValueError: the channels are not a multiple of `groups`.
    """
    batch, height, width, _ = parts[0].shape
    channels = sum(p.shape[-1] for p in parts)
    group = group_size(channels, groups)
    name = 'forward' if moments is None else 'normalise'
    tile = tile or choose_tile(name, parts[0].dtype, batch, height * width, channels, group)
    return _normalise(
        parts,
        moments,
        scale,
        offset,
        group=group,
        eps=eps,
        silu=silu,
        tile=tile,
        interpret=interpret,
    )


# Jitted, so that equal calls share one trace and one lowering.
@functools.partial(jax.jit, static_argnames=('group', 'eps', 'silu', 'tile', 'interpret'))
def _normalise(
    parts: Sequence[Array],
    moments: Sequence[Array] | None,
    scale: Array,
    offset: Array,
    *,
    group: int,
    eps: float,
    silu: bool,
    tile: Tile,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    batch, height, width, _ = parts[0].shape
    sizes = tuple(p.shape[-1] for p in parts)
    pixels, channels = height * width, sum(sizes)
    known = moments is not None
    grid = fit(tile, sizes, pixels, group, streamed=known, interpret=interpret)
    wide = at_least_float32(parts[0].dtype)
    y, mean, inverse = pl.pallas_call(
        functools.partial(_normalise_kernel, grid=grid, eps=eps, silu=silu, known=known),
        grid=(grid.blocks, batch, grid.splits),
        out_shape=[
            jax.ShapeDtypeStruct((batch, pixels, channels), parts[0].dtype),
            jax.ShapeDtypeStruct((batch, channels), wide),
            jax.ShapeDtypeStruct((batch, channels), wide),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps),
        interpret=interpret,
        name='jaxunet_group_norm_normalise' if known else 'jaxunet_group_norm_forward',
    )(*(p.reshape(batch, pixels, -1) for p in parts), *(moments or ()), scale, offset)
    return y.reshape(batch, height, width, channels), mean, inverse
