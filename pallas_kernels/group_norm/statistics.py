"""GroupNorm's reductions over pixels in Triton, and the kernel from moments to a · x + b.

Programs that share the pixels of a sample write partial results, which XLA joins.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxunet.ops.activation import at_least_float32
from jaxunet.ops.group_norm.operands import group_size
from pallas_kernels.group_norm.blocks import Program, group_statistics, loop, moments_of
from pallas_kernels.group_norm.tiles import Grid, Tile, choose_tile, fit
from pallas_kernels.jax_modules import triton as plgpu
from pallas_kernels.types import Ref


def _moments_kernel(x: Ref, out: Ref, *, grid: Grid) -> None:
    """Reduces one program's pixels of x (batch, pixels, C) to out (batch, splits, C, 2)."""
    program = Program(grid, exact=x.dtype.itemsize >= 4)
    mean, deviation, count = moments_of(program, lambda step: program.load([x], step), out.dtype)
    at = (program.sample, program.split, program.own.columns)
    plgpu.store(out.at[(*at, 0)], mean, mask=program.own.valid)
    plgpu.store(out.at[(*at, 1)], deviation / count, mask=program.own.valid)


def moments(
    x: Float[Array, 'batch height width channels'],
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float[Array, 'batch channels 2']:
    """Returns mean and mean squared deviation over the pixels of each sample and channel.

    It computes in at least float32, from one read of x. The result equals that of
    `jaxunet.ops.group_norm.reference.channel_moments`, without cancellation in any type (Chan,
    Golub & LeVeque 1979).
    """
    batch, height, width, channels = x.shape
    return _moments(
        x, tile or choose_tile('moments', x.dtype, batch, height * width, channels), interpret
    )


# Jitted, so that equal calls share one trace and one lowering; below too.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _moments(x: Array, tile: Tile, interpret: bool) -> Array:
    batch, height, width, channels = x.shape
    grid = fit(tile, (channels,), height * width, 1, streamed=True, interpret=interpret)
    wide = at_least_float32(x.dtype)
    partial = pl.pallas_call(
        functools.partial(_moments_kernel, grid=grid),
        grid=(grid.blocks, batch, grid.splits),
        out_shape=jax.ShapeDtypeStruct((batch, grid.splits, channels, 2), wide),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps),
        interpret=interpret,
        name='jaxunet_group_norm_moments',
    )(x.reshape(batch, height * width, channels))
    if grid.splits == 1:
        return partial[:, 0]
    weight = jnp.asarray(np.array(grid.split_pixels()) / grid.pixels, wide)[None, :, None]
    mean = partial[:, 0, :, 0] + jnp.sum((partial[..., 0] - partial[:, :1, :, 0]) * weight, axis=1)
    deviation = jnp.sum(
        (partial[..., 1] + jax.lax.square(partial[..., 0] - mean[:, None])) * weight, axis=1
    )
    return jnp.stack([mean, deviation], axis=-1)


def _sums_kernel(x: Ref, out: Ref, *, grid: Grid) -> None:
    """Sums one program's pixels of x (batch, pixels, C) to out (batch, splits, C)."""
    program = Program(grid)

    def add(step: Array | int, total: Array) -> Array:
        for value in program.load([x], step):
            total = total + value.astype(out.dtype)
        return total

    total = loop(grid.steps, add, jnp.zeros((grid.rows, grid.lanes), out.dtype))
    program.store_channels(out, jnp.sum(total, axis=0), program.sample, program.split)


def channel_sums(
    x: Float[Array, 'batch height width channels'],
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float[Array, 'batch channels']:
    """Returns the sum over the pixels of each sample and channel, in at least float32.

    This is the gradient of a bias or of a shift per sample.
    """
    batch, height, width, channels = x.shape
    return _channel_sums(
        x, tile or choose_tile('channel_sums', x.dtype, batch, height * width, channels), interpret
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _channel_sums(x: Array, tile: Tile, interpret: bool) -> Array:
    batch, height, width, channels = x.shape
    grid = fit(tile, (channels,), height * width, 1, streamed=True, interpret=interpret)
    partial = pl.pallas_call(
        functools.partial(_sums_kernel, grid=grid),
        grid=(grid.blocks, batch, grid.splits),
        out_shape=jax.ShapeDtypeStruct((batch, grid.splits, channels), at_least_float32(x.dtype)),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps),
        interpret=interpret,
        name='jaxunet_group_norm_channel_sums',
    )(x.reshape(batch, height * width, channels))
    return partial[:, 0] if grid.splits == 1 else jnp.sum(partial, axis=1)


def _affine_kernel(*refs: Ref, grid: Grid, eps: float) -> None:
    """Computes a, b, mean and inverse of one program's channels.

    Args:
      refs: the parts' moments (batch, Ci, 2)…, scale and offset (1|batch, C); results: a, b, mean
        and inverse (batch, C).
    """
    count = len(grid.parts)
    known, (scale, offset, a, b, mean_ref, inverse_ref) = refs[:count], refs[count:]
    program = Program(grid, exact=True)
    mean, inv = group_statistics(program, *program.load_moments(known), eps)
    sample = program.sample
    factor = (
        program.load_channels(scale, sample if scale.shape[0] > 1 else 0, dtype=mean.dtype) * inv
    )
    shift = (
        program.load_channels(offset, sample if offset.shape[0] > 1 else 0, dtype=mean.dtype)
        - mean * factor
    )
    for ref, value in ((a, factor), (b, shift), (mean_ref, mean), (inverse_ref, inv)):
        program.store_channels(ref, value, sample)


@functools.partial(jax.jit, static_argnames=('groups', 'eps', 'interpret'))
def affine(
    known: Sequence[Float[Array, 'batch _ 2']],
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    *,
    groups: int,
    eps: float,
    interpret: bool = False,
) -> tuple[
    Float[Array, 'batch channels'],
    Float[Array, 'batch channels'],
    Float[Array, 'batch channels'],
    Float[Array, 'batch channels'],
]:
    """Returns a, b, mean and inverse deviation of each sample and channel, in one launch.

    norm(x) · scale + offset = a · x + b; mean and inverse deviation are the group's. Same a and b
    as `jaxunet.ops.group_norm.reference.group_affine`.

    Args:
      known: the moments of each part.

    Raises:
      ValueError: the channels are not a multiple of `groups`.
    """
    parts = tuple(m.shape[1] for m in known)
    batch, channels = known[0].shape[0], sum(parts)
    group = group_size(channels, groups)
    wide = functools.reduce(jnp.promote_types, [m.dtype for m in known])
    grid = fit(
        Tile(channels=128, rows=1, unroll=1), parts, 1, group, streamed=False, interpret=interpret
    )
    a, b, mean, inverse = pl.pallas_call(
        functools.partial(_affine_kernel, grid=grid, eps=eps),
        grid=(grid.blocks, batch, 1),
        out_shape=[jax.ShapeDtypeStruct((batch, channels), wide)] * 4,
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name='jaxunet_group_norm_affine',
    )(*(m.astype(wide) for m in known), scale, offset)
    return a, b, mean, inverse
