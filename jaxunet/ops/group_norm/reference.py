"""GroupNorm, optionally followed by SiLU and dropout, in plain JAX: the reference, and backend xla.

Wu & He 2018, arXiv 1803.08494. Statistics are computed per channel and then combined into groups,
because a group may span several parts of an activation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation, at_least_float32
from jaxunet.ops.dropout import Dropout, drop
from jaxunet.ops.group_norm.operands import Norm, check_operands, group_size


def channel_moments(
    x: Float[Array, 'batch height width channels'],
) -> Float[Array, 'batch channels 2']:
    """Returns mean and mean squared deviation over the pixels of each sample and channel.

    In at least float32, in two passes, so that a large mean does not cancel the variance away.
    bfloat16 needs only one pass, E[x²] − E[x]²: its squares are exact in float32, and a mean large
    enough to cancel would have rounded the deviations away when x was stored.
    """
    wide = x.astype(at_least_float32(x.dtype))
    mean = jnp.mean(wide, axis=(1, 2))
    if x.dtype == jnp.bfloat16:
        deviation = jnp.maximum(
            jnp.mean(jax.lax.square(wide), axis=(1, 2)) - jax.lax.square(mean), 0
        )
    else:
        deviation = jnp.mean(jax.lax.square(wide - mean[:, None, None, :]), axis=(1, 2))
    return jnp.stack([mean, deviation], axis=-1)


def group_affine(
    moments: Float[Array, 'batch channels 2'], norm: Norm
) -> tuple[Float[Array, 'batch channels'], Float[Array, 'batch channels']]:
    """Returns a and b such that norm(x) · scale + offset = a · x + b, per sample and channel.

    A group's variance is the mean of its channels' variances plus the variance of their means.

    Args:
      moments: those of x, as `channel_moments` returns them.

    Raises:
      ValueError: `groups` does not divide the channels.
    """
    batch, channels, _ = moments.shape
    size = group_size(channels, norm.groups)
    mean, variance = jnp.moveaxis(moments.reshape(batch, norm.groups, size, 2), -1, 0)
    group_mean = jnp.mean(mean, axis=-1, keepdims=True)
    group_variance = jnp.mean(variance + jax.lax.square(mean - group_mean), axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(group_variance + norm.eps)
    spread = jnp.broadcast_to(inverse, mean.shape).reshape(batch, channels)
    centre = jnp.broadcast_to(group_mean, mean.shape).reshape(batch, channels)
    a = norm.scale.astype(spread.dtype) * spread
    return a, norm.offset.astype(spread.dtype) - centre * a


def group_norm(
    x: Activation, norm: Norm, *, silu: bool = False, dropout: Dropout | None = None
) -> Float[Array, 'batch height width channels']:
    """act(norm(x) · scale + offset), act = SiLU or identity, then dropout.

    Statistics and arithmetic are in at least float32; the result has x's dtype.

    Args:
      dropout: of the result, once it has x's dtype; None = no dropout.

    Raises:
      ValueError: shapes or types do not fit, or `groups` does not divide the channels.
    """
    check_operands(x, norm)
    parts = [channel_moments(part) for part in x.parts]
    moments = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    a, b = group_affine(moments, norm)
    value = x.value
    y = value.astype(a.dtype) * a[:, None, None, :] + b[:, None, None, :]
    y = (jax.nn.silu(y) if silu else y).astype(value.dtype)
    return y if dropout is None else drop(y, dropout)
