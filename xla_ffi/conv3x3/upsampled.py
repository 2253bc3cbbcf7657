"""3×3 convolution of a 2× nearest-neighbour upsampled image, without storing that image.

Every 3×3 window of the upsampled image covers 2×2 pixels of the small one, so an output pixel needs
four products instead of nine. Which rows and columns of the kernel read the same small pixel
depends on the phase: the parity of the output's row and column. So there are four convolutions of
the small image with 2×2 taps, one for each phase (`UpsampledConv3x3` in plan.h).

Only the Hopper kernels do that. Other calls convolve the upsampled image.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.checks import check_count, check_kernel_type
from jaxunet.ops.conv3x3.operands import Convolution, outline
from jaxunet.ops.conv3x3.upsampling import check_upsampled, nearest
from jaxunet.ops.transformations import joins_batch
from jaxunet.runtime import device
from xla_ffi.call import ffi_call
from xla_ffi.conv3x3 import vjp
from xla_ffi.conv3x3.parameter_gradients import PARTIAL_SHIFTS
from xla_ffi.conv3x3.split_k import partial_sums, written

CHUNK = 64  # channels of a chunk and of the narrowest tile, kChunk in hopper/tile.h
LEAST_SIDE = 4  # of an image that the Hopper kernels accept
TAPS = 16  # over all phases
PARTIAL_SUMS = 8 * CHUNK**2  # per block: eight taps of 64 input channels by 64 features

PhaseKernels = Float[Array, '2 2 2 2 channels features']


def upsample_conv3x3(conv: Convolution) -> Activation:
    """conv(nearest(x), kernel) + shift. See `jaxunet.ops.conv3x3.reference.upsample_conv3x3`.

    Raises:
      ValueError: as `check_upsampled`, or the kernels do not take x's type or this many pixels.
    """
    check_upsampled(conv)
    image = conv.image.value
    if not supports(image, conv.kernel.shape[3]):
        return vjp.conv3x3(conv.of(nearest(image)))
    check_kernel_type('conv3x3', 'x', image)
    check_count('conv3x3', 'x', 'pixels', 4 * math.prod(image.shape[:3]))
    return Activation.of(_conv(image, conv.kernel, conv.shift))


def supports(x: Array, features: int) -> bool:
    """Returns True if the convolution runs by phases (`takes_upsampled` in dispatch.h)."""
    whole = x.shape[3] % CHUNK == features % CHUNK == 0 < features
    return (
        x.dtype.itemsize == 2
        and whole
        and min(x.shape[1:3]) >= LEAST_SIDE
        and not device.portable()
    )


def phase_kernels(kernel: Float[Array, '3 3 channels features']) -> PhaseKernels:
    """Returns the taps of each phase: [a, b, u, v] is tap (u, v) of rows of parity a, columns b.

    They are sums of the kernel's rows and columns in float32, rounded to its type.
    """

    def summed(rows: Array) -> Array:
        first, middle, last = rows
        taps = jnp.stack([first, middle + last, first + middle, last])
        return taps.reshape(2, 2, *rows.shape[1:])

    rows = summed(kernel.astype(jnp.float32))  # a, u, columns
    columns = summed(jnp.moveaxis(rows, 2, 0))  # b, v, a, u
    return columns.transpose(2, 0, 3, 1, 4, 5).astype(kernel.dtype)


def _call(image: Array, taps: PhaseKernels, shift: Array | None, *, flipped: bool) -> Array:
    """Runs the handler: forward with a shift, or `flipped`, the input gradient, without one."""
    features = taps.shape[4 if flipped else 5]

    def run(images: tuple[Array, ...], weights: tuple[Array]) -> Array:
        image, *shifts = images
        batch, height, width, _ = image.shape
        sides = (height // 2, width // 2) if flipped else (2 * height, 2 * width)
        shape = jax.ShapeDtypeStruct((batch, *sides, features), image.dtype)
        call = ffi_call('jaxunet_conv3x3_upsampled', shape)
        result: Array = call(image, *weights, *shifts, flipped=flipped)
        return result

    shifts = () if shift is None else (shift.astype(jnp.float32),)
    result: Array = joins_batch(run)((image, *shifts), (taps,))
    return result


def _weight_gradient(x: Array, dy: Array, kernel: Array, shift: Array) -> tuple[Array, Array]:
    """Returns the gradients of the kernel and the shift, given as outlines."""
    features = dy.shape[3]
    wanted = [
        ((3, 3, x.shape[3], features), kernel.dtype),
        ((shift.shape[0], features), shift.dtype),
    ]
    workspace = jax.ShapeDtypeStruct((_workspace(x, features),), jnp.float32)
    call = ffi_call(
        'jaxunet_conv3x3_upsampled_weight_gradient', [*written(wanted, dy.dtype), workspace]
    )
    of_kernel, of_shift, _ = call(x, dy)
    return of_kernel.astype(kernel.dtype), of_shift.astype(shift.dtype)


def _workspace(x: Array, features: int) -> int:
    """Float32 elements of the split-K workspace for all taps, and for two phases' sums of dy."""
    batch, *_, channels = x.shape
    weights = TAPS * channels * features
    of_weights = partial_sums(math.prod(x.shape[:3]), weights, PARTIAL_SUMS)
    return of_weights + 2 * (2 * batch + PARTIAL_SHIFTS) * features


# Saved for the backward pass: x, the taps of the phases, the outlines of kernel and shift.
Saved = tuple[Array, PhaseKernels, Array, Array]


@jax.custom_vjp
def _conv(x: Array, kernel: Array, shift: Array) -> Array:
    return _conv_forward(x, kernel, shift)[0]


def _conv_forward(x: Array, kernel: Array, shift: Array) -> tuple[Array, Saved]:
    taps = phase_kernels(kernel).astype(x.dtype)
    return _call(x, taps, shift, flipped=False), (x, taps, outline(kernel), outline(shift))


def _conv_backward(saved: Saved, dy: Array) -> tuple[Array, Array, Array]:
    x, taps, kernel, shift = saved
    dx = _call(dy, taps, None, flipped=True)
    return dx, *_weight_gradient(x, dy, kernel, shift)


_conv.defvjp(_conv_forward, _conv_backward)
