"""Nearest-neighbour upsampling, and the 3×3 convolution that follows it in a UNet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import check_operands


def nearest(
    x: Float[Array, 'batch height width channels'],
) -> Float[Array, 'batch 2*height 2*width channels']:
    """Repeats every pixel twice in both directions."""
    in_pairs = x.dtype.itemsize == 2 and x.shape[3] % 2 == 0
    return _in_pairs(x) if in_pairs else repeated(x)


def repeated(
    x: Shaped[Array, 'batch height width channels'],
) -> Shaped[Array, 'batch 2*height 2*width channels']:
    """Does the same as `nearest`, as one linear operation."""
    batch, height, width, channels = x.shape
    doubled = jnp.broadcast_to(x[:, :, None, :, None, :], (batch, height, 2, width, 2, channels))
    return doubled.reshape(batch, 2 * height, 2 * width, channels)


@jax.custom_jvp
def _in_pairs(
    x: Shaped[Array, 'batch height width channels'],
) -> Shaped[Array, 'batch 2*height 2*width channels']:
    """Repeats pairs of 16-bit channels as numbers of 32 bits, which XLA copies in less time."""
    pairs = jax.lax.bitcast_convert_type(x.reshape(*x.shape[:3], -1, 2), jnp.uint32)
    doubled = jax.lax.bitcast_convert_type(repeated(pairs), x.dtype)
    return doubled.reshape(*doubled.shape[:3], x.shape[3])


@_in_pairs.defjvp
def _in_pairs_jvp(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:  # `bitcast_convert_type` has no derivative
    return _in_pairs(*primals), repeated(*tangents)


@functools.cache
def upsampled(conv3x3: Callable[..., Any]) -> Callable[[Activation, Array, Array], Activation]:
    """Composes `upsample_conv3x3` from `conv3x3`, which reads the upsampled image."""

    def call(x: Activation, kernel: Array, shift: Array) -> Activation:
        check_operands(x, kernel, shift, None, None)  # before the parts of x become one array
        y: Activation = conv3x3(Activation.of(nearest(x.value)), kernel, shift)
        return y

    return call
