"""GroupNorm on Hopper (sm_90) as functions of arrays, using two files of Mosaic GPU kernels.

`hopper_reductions` and `hopper_writers` have the kernels; `hopper_plan.supports` says which shapes
they accept.

With x̂ = (x − mean) · inverse, z = scale · x̂ + offset, y = act(z) and dz = dy · act'(z), the
gradients of offset and scale of every sample and channel are sums over the pixels,

    s₁ = Σ dz    and    s₂ = Σ dz · x̂,

and with N elements in a group

    dx = inverse · (scale · dz − (Σ_group scale · s₁ + x̂ · Σ_group scale · s₂) / N).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxunet.ops.group_norm.operands import Affine, Norm, Statistics, group_size
from pallas_kernels.group_norm import hopper_reductions as reductions
from pallas_kernels.group_norm import hopper_writers as writers
from pallas_kernels.group_norm.hopper_plan import Tile, grid

Image = Float[Array, 'batch height width _']


# Jitted, so that equal calls share one trace and one lowering; below too.
@functools.partial(jax.jit, static_argnames='tile')
def moments(parts: tuple[Image, ...], *, tile: Tile | None = None) -> Float[Array, 'batch 2 _']:
    """Returns mean and mean squared deviation over the pixels of each sample and channel, float32.

    Args:
      parts: x, joined along channels.
      tile: None takes `hopper_plan.choose_tile`; below too.
    """
    p = grid(parts, 1, tile)
    partial = reductions.moments(p, _flat(parts))
    if p.tile.splits == 1:
        return partial[:, 0]
    weight = jnp.asarray(np.array(p.split_pixels()) / p.pixels, jnp.float32)[None, :, None]
    means, deviations = partial[:, :, 0], partial[:, :, 1]
    first = means[:, 0]
    mean = first + jnp.sum((means - first[:, None]) * weight, axis=1)
    deviation = jnp.sum((deviations + jax.lax.square(means - mean[:, None])) * weight, axis=1)
    return jnp.stack([mean, deviation], axis=1)


@functools.partial(jax.jit, static_argnames='tile')
def channel_sums(x: Image, *, tile: Tile | None = None) -> Float[Array, 'batch channels']:
    """Returns the sum over the pixels of each sample and channel, float32."""
    p = grid([x], 1, tile)
    return _joined(reductions.channel_sums(p, _flat_one(x)))[:, 0]


@functools.partial(jax.jit, static_argnames='tile')
def affine(
    parts: tuple[Image, ...], norm: Norm, *, tile: Tile | None = None
) -> tuple[Affine, Statistics]:
    """Returns a and b such that norm(x) · scale + offset = a · x + b, and the statistics.

    Raises:
      ValueError: the channels are not a multiple of the groups.
    """
    known = _by_group(moments(parts, tile=tile), norm.groups)
    p = grid(parts, 1, Tile(1, 1))
    a, b, mean, inverse = writers.affine(
        p, known, _float32(norm.scale), _float32(norm.offset), eps=norm.eps
    )
    return (a, b), Statistics(mean, inverse)


@functools.partial(jax.jit, static_argnames=('silu', 'tile'))
def normalise(
    parts: tuple[Image, ...], norm: Norm, *, silu: bool, tile: Tile | None = None
) -> tuple[Image, Statistics]:
    """Returns act(norm(x) · scale + offset), and the statistics.

    Raises:
      ValueError: the channels are not a multiple of the groups.
    """
    known = _by_group(moments(parts, tile=tile), norm.groups)
    y, mean, inverse = writers.normalise(
        grid(parts, 1, tile),
        _flat(parts),
        known,
        _float32(norm.scale),
        _float32(norm.offset),
        eps=norm.eps,
        silu=silu,
    )
    return y.reshape(*parts[0].shape[:3], -1), Statistics(mean, inverse)


@functools.partial(jax.jit, static_argnames=('silu', 'activation', 'tile'))
def gradient_sums(
    parts: tuple[Image, ...],
    dy: Image,
    norm: Norm,
    stats: Statistics,
    *,
    silu: bool,
    activation: bool = False,
    tile: Tile | None = None,
) -> tuple[Float[Array, 'batch 2 channels'], Image | None]:
    """Returns s₁ and s₂ of this file's formulas, float32, from one read of x and dy.

    Args:
      activation: also write act(z) again, in x's dtype, from the same read.
    """
    partial, active = reductions.gradient_sums(
        grid(parts, 2, tile),
        _flat(parts),
        _flat_one(dy),
        [_float32(v) for v in (norm.scale, norm.offset, *stats)],
        silu=silu,
        activation=activation,
    )
    return _joined(partial), None if active is None else active.reshape(dy.shape)


@functools.partial(jax.jit, static_argnames=('silu', 'tile'))
def gradient(
    parts: tuple[Image, ...],
    dy: Image,
    norm: Norm,
    stats: Statistics,
    sums: Float[Array, 'batch 2 channels'],
    *,
    silu: bool,
    tile: Tile | None = None,
) -> tuple[Image, ...]:
    """Returns the gradient of every part, in x's dtype.

    Args:
      sums: as `gradient_sums` returns them.

    Raises:
      ValueError: the channels are not a multiple of the groups.
    """
    dx = writers.gradient(
        grid(parts, 2, tile),
        _flat(parts),
        _flat_one(dy),
        [_float32(v) for v in (norm.scale, norm.offset, *stats)],
        _by_group(sums, norm.groups),
        silu=silu,
    )
    return tuple(d.reshape(part.shape) for d, part in zip(dx, parts, strict=True))


def _by_group(
    vectors: Float[Array, 'batch 2 channels'], groups: int
) -> Float[Array, 'batch 2 groups _']:
    batch, count, channels = vectors.shape
    return vectors.reshape(batch, count, groups, group_size(channels, groups))


def _joined(
    partial: Float[Array, 'batch splits numbers channels'],
) -> Float[Array, 'batch numbers channels']:
    """Returns the sum over the splits."""
    return partial[:, 0] if partial.shape[1] == 1 else jnp.sum(partial, axis=1)


def _flat(images: Sequence[Image]) -> tuple[Float[Array, 'batch pixels _'], ...]:
    return tuple(map(_flat_one, images))


def _flat_one(x: Image) -> Float[Array, 'batch pixels _']:
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _float32(vector: Array) -> Array:
    return vector.astype(jnp.float32)
