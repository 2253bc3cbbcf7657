"""Chooses a convolution's kernels for this device and shape; gives them a rule for `jax.vmap`.

It takes the Hopper kernel for the shapes that it supports, else the Triton kernel, which supports
all. If JAX lacks Triton, channels are padded with zeros for the Hopper kernel (`padding`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.conv3x3.operands import Added, Affine, Parts
from jaxunet.ops.transformations import joins_batch
from jaxunet.runtime import device
from pallas_kernels import jax_modules
from pallas_kernels.conv3x3 import padding
from pallas_kernels.conv3x3.padding import Images, Weights
from pallas_kernels.group_norm import dispatch as norm_dispatch
from pallas_kernels.types import Shaped

if jax_modules.missing(jax_modules.TRITON) is None:
    from pallas_kernels.conv3x3 import triton, triton_weight_gradient
if jax_modules.missing(jax_modules.MOSAIC) is None:
    from pallas_kernels.conv3x3 import hopper, hopper_weight_gradient

# Limits of `fuses_activation`. To refit, time `norm_silu_conv3x3` on both sides of them with
# `python -m jaxunet.benchmark.kernels`.
FUSED_PIXELS = 1024  # the fewest pixels of an image on Hopper
FUSED_FEATURES = 16  # the most output channels on Triton
EXACT_PIXELS = 2048  # per batch; with fewer, float32 weight gradients need the Triton kernel


def flip(kernel: Float[Array, '3 3 channels features']) -> Float[Array, '3 3 features channels']:
    """Returns the kernel to convolve dy with for the input gradient."""
    return jnp.swapaxes(kernel[::-1, ::-1], 2, 3)


def project(added: Added) -> Float[Array, 'batch height width features']:
    """Returns the 1×1 convolution of a residual, in the type of its parts.

    Each part is a separate product, because a concatenation would have to be written and read.
    """
    assert added.shortcut is not None, 'only a shortcut projects a residual'
    products, start = [], 0
    for part in added.parts:
        matrix = added.shortcut[start : start + part.shape[-1]].astype(part.dtype)
        products.append(
            jnp.einsum('bhwc,cf->bhwf', part, matrix, preferred_element_type=jnp.float32)
        )
        start += part.shape[-1]
    return functools.reduce(jnp.add, products).astype(added.parts[0].dtype)


def forward(
    parts: Parts,
    kernel: Float[Array, '3 3 channels features'],
    shift: Float[Array, '#batch features'],
    added: Added | None = None,
    affine: Affine | None = None,
) -> Float[Array, 'batch height width features']:
    """Returns conv3x3(act(x)) + shift + added.

    Args:
      parts: x, joined along channels.
      affine: (a, b): act(x) = SiLU(a · x + b); None: act is the identity.
    """
    residual, shortcut = ((), None) if added is None else (added.parts, added.shortcut)
    images = (parts, shift.astype(jnp.float32), residual, affine)
    dtype = parts[0].dtype
    return _forward(
        images, (kernel.astype(dtype), None if shortcut is None else shortcut.astype(dtype))
    )


def shift_gradient(
    dy: Float[Array, 'batch height width features'],
) -> Float[Array, 'batch features']:
    """Returns the gradient of each sample's shift: the sum over its pixels, in float32 or more."""
    padded = padding.append(dy, padding.SUMS) if padding.wanted() else dy
    sums = norm_dispatch.channel_sums(padded, interpret=device.interpreted())
    return padding.remove(sums, padding.SUMS, (dy.shape[-1],))


def input_gradient(
    dy: Float[Array, 'batch height width features'],
    kernel: Float[Array, '3 3 channels features'],
    widths: tuple[int, ...],
) -> Parts:
    """Returns the gradient of each part of x, given the gradient of the output.

    These are convolutions with the flipped kernel.

    Args:
      widths: channels of the parts.
    """
    parts, start = [], 0
    for width in widths:
        part = kernel[:, :, start : start + width].astype(dy.dtype)
        images = ((dy,), jnp.zeros((1, width), jnp.float32), (), None)
        parts.append(_input_gradient(images, (part, None)))
        start += width
    return tuple(parts)


def fuses_activation(parts: Sequence[Shaped], kernel: Shaped) -> bool:
    """Returns True if GroupNorm and SiLU are faster inside the convolution than before it.

    The Hopper kernel activates a tile once for its nine taps, which is faster for large images. The
    Triton kernel fuses both for few output channels, when reading x takes most of its time.
    """
    if jax_modules.runs_hopper() and (padding.wanted() or hopper.supports(parts, kernel) is None):
        return parts[0].shape[1] * parts[0].shape[2] >= FUSED_PIXELS
    return kernel.shape[3] <= FUSED_FEATURES


def _convolve(flipped: bool, images: Images, weights: Weights) -> Array:
    """Runs one convolution on this device.

    Args:
      flipped: convolve with kernel[::-1, ::-1], its input and output channels exchanged.

    Raises:
      UserError: this version of JAX lacks what the kernel needs.
    """
    features = weights[0].shape[2 if flipped else 3]
    if padding.wanted():
        images, weights = padding.convolution(images, weights, flipped=flipped)
    (parts, shift, residual, affine), (kernel, shortcut) = images, weights
    options: dict[str, Any] = {
        'residual': residual or None,
        'shortcut': shortcut,
        'affine': affine,
        'flipped': flipped,
    }
    if jax_modules.on_hopper('conv3x3', lambda: hopper.supports(parts, kernel, **options)):
        y = hopper.forward(parts, kernel, shift, **options)
        return padding.remove(y, padding.CONVOLUTION, (features,))
    addend = None  # the residual, projected by its shortcut
    if residual:
        addend = residual[0] if shortcut is None else project(Added(residual, shortcut))
    return triton.forward(
        parts,
        flip(kernel) if flipped else kernel,
        shift,
        residual=addend,
        affine=affine,
        interpret=device.interpreted(),
    )


_forward = joins_batch(functools.partial(_convolve, False))
_input_gradient = joins_batch(functools.partial(_convolve, True))


@jax.custom_batching.sequential_vmap
def weight_gradient(
    parts: Parts, dy: Float[Array, 'batch height width features']
) -> Float[Array, '3 3 channels features']:
    """Returns the gradient of the kernel in float32, given the gradient of the output.

    Args:
      parts: x, joined along channels.

    Raises:
      UserError: this version of JAX lacks what the kernel needs.
    """
    widths, features = [part.shape[-1] for part in parts], dy.shape[-1]
    multiple = padding.WEIGHT_GRADIENT
    if padding.wanted():
        parts = tuple(padding.append(part, multiple) for part in parts)
        dy = padding.append(dy, multiple)

    def problem() -> str | None:
        # For few pixels, XLA computes in full float32 instead of tf32. Triton's three tf32 products
        # match that accuracy; Hopper's three bfloat16 products do not.
        if dy.dtype == jnp.float32 and math.prod(dy.shape[:3]) < EXACT_PIXELS:
            return f'dy: expected {EXACT_PIXELS} pixels or more in float32, found {dy.shape[:3]}'
        return hopper_weight_gradient.supports(parts, dy)

    if jax_modules.on_hopper("conv3x3's weight gradient", problem):
        gradient = hopper_weight_gradient.weight_gradient(parts, dy)
        return padding.remove(padding.remove(gradient, multiple, widths, 2), multiple, (features,))
    return triton_weight_gradient.weight_gradient(parts, dy, interpret=device.interpreted())
