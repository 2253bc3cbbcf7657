"""Nearest-neighbour upsampling, and the 3×3 convolution that follows it in a UNet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution, check_operands


def nearest(
    x: Float[Array, 'batch height width channels'],
) -> Float[Array, 'batch 2*height 2*width channels']:
    """Repeats every pixel twice in both directions."""
    batch, height, width, channels = x.shape
    doubled = jnp.broadcast_to(x[:, :, None, :, None, :], (batch, height, 2, width, 2, channels))
    return doubled.reshape(batch, 2 * height, 2 * width, channels)


@functools.cache
def upsampled(conv3x3: Callable[..., Any]) -> Callable[[Convolution], Activation]:
    """Composes `upsample_conv3x3` from `conv3x3`, which reads the upsampled image."""

    def call(conv: Convolution) -> Activation:
        check_upsampled(conv)  # before the parts of x become one array
        y: Activation = conv3x3(conv.of(nearest(conv.image.value)))
        return y

    return call


def check_upsampled(conv: Convolution) -> None:
    """Checks the operands of `upsample_conv3x3`, which has neither residual nor shortcut.

    Raises:
      ValueError: as `check_operands`, or there is a residual.
    """
    check_operands(conv)
    if conv.residual is not None:
        raise ValueError('upsample_conv3x3: residual: expected None')
