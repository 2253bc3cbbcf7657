"""Pads channels with zeros up to the multiples that the Hopper convolution kernels need.

The padded channels of the input and their weights are zero, so they add nothing; those of the
result are cut off.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxunet.ops.conv3x3.operands import Parts
from jaxunet.ops.group_norm.operands import Affine
from pallas_kernels.conv3x3.hopper_weight_gradient_plan import BLOCK

# Multiples of channels that the Hopper kernels need.
CONVOLUTION = 8
WEIGHT_GRADIENT = BLOCK
SUMS = 32  # GroupNorm's channel sums, which are the gradient of shift

# The batched operands of a convolution (parts, shift, residual, affine), and its weights (kernel,
# shortcut), in the form that `joins_batch` takes.
Images = tuple[Parts, Array, Parts, Affine | None]
Weights = tuple[Array, Array | None]


def append(
    x: Float[Array, '*shape'], multiple: int, axis: int = -1, widths: Sequence[int] | None = None
) -> Float[Array, '*padded']:
    """Appends zeros to each part of an axis, up to a multiple of channels.

    Args:
      widths: channels of the parts that are joined along the axis; None: the axis is one part.
    """
    widths = widths or (x.shape[axis],)
    if not any(width % multiple for width in widths):
        return x
    padded = []
    for part in jnp.split(x, list(itertools.accumulate(widths))[:-1], axis):
        sizes = [(0, 0)] * x.ndim
        sizes[axis] = (0, -part.shape[axis] % multiple)
        padded.append(jnp.pad(part, sizes))
    return jnp.concatenate(padded, axis)


def remove(
    x: Float[Array, '*padded'], multiple: int, widths: Sequence[int], axis: int = -1
) -> Float[Array, '*shape']:
    """Undoes `append`; also accepts x to which nothing was appended."""
    if x.shape[axis] == sum(widths):
        return x
    starts = itertools.accumulate((width + -width % multiple for width in widths), initial=0)
    parts = [
        lax.slice_in_dim(x, start, start + width, axis=axis)
        for start, width in zip(starts, widths, strict=False)  # the last start is the end
    ]
    return jnp.concatenate(parts, axis)


def convolution(images: Images, weights: Weights, *, flipped: bool) -> tuple[Images, Weights]:
    """Appends zeros to the channels of a convolution's operands.

    Args:
      flipped: the kernel's input and output channels are exchanged.
    """
    (parts, shift, residual, affine), (kernel, shortcut) = images, weights
    inputs, outputs = (3, 2) if flipped else (2, 3)
    widths, of_residual = ([x.shape[-1] for x in group] for group in (parts, residual))
    kernel = append(append(kernel, CONVOLUTION, inputs, widths), CONVOLUTION, outputs)
    if shortcut is not None:
        shortcut = append(append(shortcut, CONVOLUTION, 0, of_residual), CONVOLUTION)
    if affine is not None:
        a, b = affine
        affine = append(a, CONVOLUTION, -1, widths), append(b, CONVOLUTION, -1, widths)
    parts, residual = (tuple(append(x, CONVOLUTION) for x in group) for group in (parts, residual))
    return (parts, append(shift, CONVOLUTION), residual, affine), (kernel, shortcut)
