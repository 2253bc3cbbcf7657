"""GroupNorm, optionally followed by SiLU: the plain composition, which is the oracle and the xla backend.

Wu & He 2018, arXiv 1803.08494. Statistics are kept per channel and combined into groups, so that a producer's moments serve any
grouping, across a channel concatenation too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation, channel_moments


def group_affine(
    x: Activation,
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    *,
    groups: int,
    eps: float,
) -> tuple[Float[Array, 'batch channels'], Float[Array, 'batch channels']]:
    """The normalisation as one multiply and one add per (sample, channel): norm(x) · scale + offset = x · a + b; returns a, b."""
    known = [
        channel_moments(p) if m is None else m for p, m in zip(x.parts, x.moments, strict=True)
    ]
    moments = known[0] if len(known) == 1 else jnp.concatenate(known, axis=1)
    return combine(moments, scale, offset, groups=groups, eps=eps)[:2]


def combine(
    moments: Float[Array, 'batch channels 2'],
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    *,
    groups: int,
    eps: float,
) -> tuple[
    Float[Array, 'batch channels'],
    Float[Array, 'batch channels'],
    Float[Array, 'batch channels'],
    Float[Array, 'batch channels'],
]:
    """Of every (sample, channel): a and b of `group_affine`, and its group's mean and inverse deviation.

    A group's variance is the mean of its channels' variances plus the variance of their means.

    Raises:
      ValueError: channels that are not a multiple of `groups`.
    """
    batch, channels, _ = moments.shape
    if channels % groups:
        raise ValueError(f'group_norm: {channels} channels are not a multiple of {groups} groups')
    mean, variance = jnp.moveaxis(moments.reshape(batch, groups, channels // groups, 2), -1, 0)
    group_mean = jnp.mean(mean, axis=-1, keepdims=True)
    group_variance = jnp.mean(variance + jax.lax.square(mean - group_mean), axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(group_variance + eps)
    spread = jnp.broadcast_to(inverse, mean.shape).reshape(batch, channels)
    centre = jnp.broadcast_to(group_mean, mean.shape).reshape(batch, channels)
    a = scale.astype(spread.dtype) * spread
    return a, offset.astype(spread.dtype) - centre * a, centre, spread


def group_norm(
    x: Activation,
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    *,
    groups: int = 32,
    eps: float = 1e-5,
    silu: bool = False,
) -> Float[Array, 'batch height width channels']:
    """act(norm(x) · scale + offset), act = SiLU or identity; per-sample scale and offset carry a scale-shift norm.

    Statistics and arithmetic in at least float32, result in x's dtype.
    """
    a, b = group_affine(x, scale, offset, groups=groups, eps=eps)
    value = x.value
    y = value.astype(a.dtype) * a[:, None, None, :] + b[:, None, None, :]
    return (jax.nn.silu(y) if silu else y).astype(value.dtype)
