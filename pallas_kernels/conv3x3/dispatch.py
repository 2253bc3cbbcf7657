"""The convolution's kernels for this device; gives them a rule for `jax.vmap`.

Channels are padded with zeros up to the multiples that the kernels need (`padding`).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3 import reference
from jaxunet.ops.conv3x3.operands import Convolution, Parts
from jaxunet.ops.group_norm.operands import Affine
from jaxunet.ops.transformations import joins_batch
from pallas_kernels import jax_modules
from pallas_kernels.conv3x3 import padding
from pallas_kernels.conv3x3.padding import Images, Weights
from pallas_kernels.group_norm import dispatch as norm_dispatch
from pallas_kernels.types import Shaped

if jax_modules.missing() is None:
    from pallas_kernels.conv3x3 import hopper, hopper_weight_gradient

# The fewest pixels of an image whose activation is computed inside the convolution. To refit, time
# `norm_silu_conv3x3` on both sides with `python -m jaxunet.benchmark.kernels`.
FUSED_PIXELS = 1024
EXACT_PIXELS = 2048  # the fewest of a batch for weight gradients in float32


def flip(kernel: Float[Array, '3 3 channels features']) -> Float[Array, '3 3 features channels']:
    """Returns the kernel to convolve dy with for the input gradient."""
    return jnp.swapaxes(kernel[::-1, ::-1], 2, 3)


def project(
    residual: Activation, shortcut: Float[Array, 'residual_channels features']
) -> Float[Array, 'batch height width features']:
    """Returns the 1×1 convolution of a residual, in the type of its parts.

    Each part is a separate product, because a concatenation would have to be written and read.
    """
    products, start = [], 0
    for part in residual.parts:
        matrix = shortcut[start : start + part.shape[-1]].astype(part.dtype)
        products.append(
            jnp.einsum('bhwc,cf->bhwf', part, matrix, preferred_element_type=jnp.float32)
        )
        start += part.shape[-1]
    return functools.reduce(jnp.add, products).astype(residual.dtype)


def forward(
    conv: Convolution, affine: Affine | None = None
) -> Float[Array, 'batch height width features']:
    """Returns conv3x3(act(x)) + shift [+ residual, or residual · shortcut].

    Args:
      affine: act(x) = SiLU(a · x + b), instead of the operand's norm; None: act is the identity.
    """
    dtype = conv.image.dtype
    residual = () if conv.residual is None else conv.residual.parts
    shortcut = None if conv.shortcut is None else conv.shortcut.astype(dtype)
    images = (conv.image.parts, conv.shift.astype(jnp.float32), residual, affine)
    return _forward(images, (conv.kernel.astype(dtype), shortcut))


def shift_gradient(
    dy: Float[Array, 'batch height width features'],
) -> Float[Array, 'batch features']:
    """Returns the gradient of each sample's shift: the sum over its pixels, in float32."""
    padded = padding.append(dy, padding.SUMS)
    if not norm_dispatch.supports("conv3x3's gradient of shift", [padded]):
        return jnp.sum(dy, axis=(1, 2), dtype=jnp.float32)
    return padding.remove(norm_dispatch.channel_sums(padded), padding.SUMS, (dy.shape[-1],))


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


def fuses_activation(x: Shaped) -> bool:
    """Returns True if GroupNorm and SiLU of x are faster inside the convolution than before it.

    The kernel activates a tile once for its nine taps, which is faster for large images.
    """
    return x.shape[1] * x.shape[2] >= FUSED_PIXELS


def _convolve(flipped: bool, images: Images, weights: Weights) -> Array:
    """Runs one convolution on this device.

    Args:
      flipped: convolve with kernel[::-1, ::-1], its input and output channels exchanged.
    """
    features = weights[0].shape[2 if flipped else 3]
    images, weights = padding.convolution(images, weights, flipped=flipped)
    (parts, shift, residual, affine), (kernel, shortcut) = images, weights
    conv = Convolution(
        image=Activation(parts),
        kernel=kernel,
        shift=shift,
        residual=Activation(residual) if residual else None,
        shortcut=shortcut,
    )
    y = hopper.forward(hopper.Call(conv, affine, flipped))
    return padding.remove(y, padding.CONVOLUTION, (features,))


_forward = joins_batch(functools.partial(_convolve, False))
_input_gradient = joins_batch(functools.partial(_convolve, True))


@jax.custom_batching.sequential_vmap
def weight_gradient(
    parts: Parts, dy: Float[Array, 'batch height width features']
) -> Float[Array, '3 3 channels features']:
    """Returns the gradient of the kernel in float32, given the gradient of the output.

    Args:
      parts: x, joined along channels.
    """
    widths, features = [part.shape[-1] for part in parts], dy.shape[-1]
    multiple = padding.WEIGHT_GRADIENT
    padded = tuple(padding.append(part, multiple) for part in parts)
    padded_dy = padding.append(dy, multiple)

    def problem() -> str | None:
        # The three bfloat16 products of the kernels are not accurate enough for few pixels.
        if dy.dtype == jnp.float32 and math.prod(dy.shape[:3]) < EXACT_PIXELS:
            return f'dy: expected {EXACT_PIXELS} pixels or more in float32, found {dy.shape[:3]}'
        return hopper_weight_gradient.supports(padded, padded_dy)

    if not jax_modules.supports("conv3x3's weight gradient", problem()):
        zeros = jnp.zeros((3, 3, sum(widths), features), dy.dtype)
        shift = jnp.zeros((1, features), jnp.float32)
        # In tf32, for which XLA may cut numbers off instead of rounding them, these sums of few
        # products would err by up to 1.2 times what parity allows (H200).
        with jax.default_matmul_precision('highest'):
            conv = Convolution(image=Activation(parts), kernel=zeros, shift=shift)
            _, pull = jax.vjp(
                lambda k: reference.conv3x3(dataclasses.replace(conv, kernel=k)).value, zeros
            )
            return pull(dy)[0].astype(jnp.float32)
    gradient = hopper_weight_gradient.weight_gradient(padded, padded_dy)
    return padding.remove(padding.remove(gradient, multiple, widths, 2), multiple, (features,))
