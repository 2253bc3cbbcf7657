"""Calls of the convolution handlers that return images: forward, and input gradients.

On Hopper, a float32 convolution is the sum of three bfloat16 products. x = h + l and kernel = H + L
are split into a high and a low bfloat16 term each, and x · kernel ≈ h · H + l · H + h · L is one
convolution with three times the channels, accurate to about 16 bits. Elsewhere, for channel counts
that the Hopper kernels do not accept, and in `shortcut_gradient`, it is the sum of three tf32
products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxunet.ops.conv3x3.operands import Convolution, Parts
from jaxunet.ops.group_norm.operands import Affine
from jaxunet.ops.terms import bfloat16_terms
from jaxunet.ops.transformations import joins_batch
from jaxunet.runtime import device
from xla_ffi.call import ffi_call

Images = tuple[Parts, tuple[Array, ...], Parts, Affine | tuple[()]]


def uses_terms(images: Parts, features: int) -> bool:
    """Returns True if the convolution of float32 `images` is computed from bfloat16 terms.

    Only the Hopper kernels do that, for the shapes that they accept (`forward_kernel` in
    dispatch.h).
    """
    if images[0].dtype != jnp.float32 or device.family() is not device.Target.HOPPER:
        return False
    _, height, width, _ = images[0].shape
    channels = (*(image.shape[3] for image in images), features)
    return min(height, width) >= 4 and all(count % 8 == 0 for count in channels)


def high_and_low(parts: Parts) -> Parts:
    """Returns the two bfloat16 terms of float32 parts, joined along their channels."""
    joined = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=3)
    high, low = bfloat16_terms(joined, 2)
    return high, low


def _image_terms(parts: Parts) -> Parts:
    high, low = high_and_low(parts)
    return high, low, high


def _weight_terms(weights: Array, axis: int) -> Array:
    """Returns the weights' terms for those of `_image_terms`, concatenated along an axis."""
    high, low = bfloat16_terms(weights, 2)
    return jnp.concatenate([high, high, low], axis)


def convolve(conv: Convolution, affine: Affine | None = None) -> Array:
    """conv(act(x), kernel) + shift [+ residual, or residual · shortcut].

    Args:
      affine: act(x) = SiLU(a · x + b), instead of the operand's norm; None: act is the identity.
    """
    residual = () if conv.residual is None else conv.residual.parts
    weights = (conv.kernel,) if conv.shortcut is None else (conv.kernel, conv.shortcut)
    shift = conv.shift.astype(jnp.float32)
    return call_handler((conv.image.parts, (shift,), residual, affine or ()), weights)


def call_handler(images: Images, weights: tuple[Array, ...], *, flipped: bool = False) -> Array:
    """Runs the handler.

    Args:
      images: x, the shift, the residual and `affine`; all but x may be ().
      weights: the kernel, and the shortcut if there is one.
      flipped: convolve with kernel[::-1, ::-1], its input and output channels exchanged, which is
        the input gradient.
    """
    parts, shifts, residual, affine = images
    dtype, features = parts[0].dtype, weights[0].shape[2 if flipped else 3]
    weights = tuple(w.astype(dtype) for w in weights)
    # Not with an activation: the terms would have to be split after it.
    if not affine and uses_terms((*parts, *residual), features):
        parts = _image_terms(parts)
        residual = residual if len(weights) == 1 else _image_terms(residual)
        # They multiply the high, low and high terms of x.
        weights = tuple(_weight_terms(w, axis=w.ndim - (1 if flipped else 2)) for w in weights)

    def run(images: Images, weights: tuple[Array, ...]) -> Array:
        parts, shifts, residual, affine = images
        shape = jax.ShapeDtypeStruct((*parts[0].shape[:3], features), dtype)
        kernel, *matrix = weights
        return ffi_call('jaxunet_conv3x3', shape)(
            *(*parts, kernel, *shifts, *residual, *matrix, *affine),
            parts=np.int64(len(parts)),
            residuals=np.int64(len(residual)),
            flipped=flipped,
            shift=bool(shifts),
            shortcut=bool(matrix),
            activation=bool(affine),
        )

    return joins_batch(run)((parts, shifts, residual, affine), weights)


def input_gradient(dy: Array, kernel: Array, widths: tuple[int, ...]) -> Parts:
    """Returns the gradient of each part of the convolution's input."""
    ends = np.cumsum(widths)
    slices = (kernel[:, :, end - width : end] for end, width in zip(ends, widths, strict=True))
    return tuple(call_handler(((dy,), (), (), ()), (part,), flipped=True) for part in slices)


def shortcut_gradient(dy: Array, shortcut: Array, projected: Parts) -> Parts:
    """Returns the gradient of each part of a shortcut's input: dy · shortcutᵀ."""
    shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in projected]
    call = ffi_call('jaxunet_conv3x3_shortcut_gradient', shapes)
    return tuple(call(dy, shortcut.astype(dy.dtype), residuals=np.int64(len(projected))))
