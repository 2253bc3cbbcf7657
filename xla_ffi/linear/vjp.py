"""The linear layer as calls of the FFI handlers: a convolution without taps (plan.h).

It runs on the kernels of `xla_ffi/conv3x3`. The input gradient is a product of two plain matrices,
for which XLA's GEMM is faster than these kernels, so XLA computes it.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.conv3x3.operands import outline
from jaxunet.ops.linear.operands import check_kernel_operands
from jaxunet.ops.transformations import joins_batch
from xla_ffi.call import ffi_call
from xla_ffi.conv3x3.split_k import partial_sums, written

PARTIAL_SUMS = 6 * 64 * 64  # per block: at most six chunks of 64 input channels by 64 features
PARTIAL_BIASES = 512  # rows of partial sums of the bias, one per block


def linear(
    x: Float[Array, 'batch height width channels'],
    kernel: Float[Array, 'channels features'],
    bias: Float[Array, '1 features'],
    *,
    residual: Float[Array, 'batch height width features'] | None = None,
) -> Float[Array, 'batch height width features']:
    """x · kernel + bias [+ residual]; see `jaxunet.ops.linear.reference.linear`.

    Products accumulate in float32; the epilogue adds bias and residual before it rounds.

    Raises:
      ValueError: shapes or types that do not fit each other.
    """
    check_kernel_operands(x, kernel, bias, residual)
    return _linear(x, kernel, bias, residual)


@jax.custom_vjp
def _linear(x: Array, kernel: Array, bias: Array, residual: Array | None) -> Array:
    def run(images: tuple[Array, ...], weights: tuple[Array, Array]) -> Array:
        x, *added = images
        shape = jax.ShapeDtypeStruct((*x.shape[:3], kernel.shape[1]), x.dtype)
        return ffi_call('jaxunet_linear', shape)(x, *weights, *added, residual=bool(added))

    images = (x,) if residual is None else (x, residual)
    return joins_batch(run)(images, (kernel.astype(x.dtype), bias.astype(jnp.float32)))


# Saved for the backward pass: x, kernel, the outline of the bias, True if there is a residual.
Saved = tuple[Array, Array, Array, bool]


def _forward(x: Array, kernel: Array, bias: Array, residual: Array | None) -> tuple[Array, Saved]:
    return _linear(x, kernel, bias, residual), (x, kernel, outline(bias), residual is not None)


def _backward(saved: Saved, dy: Array) -> tuple[Array, Array, Array, Array | None]:
    x, kernel, bias, adds = saved
    pixels, weights, features = math.prod(x.shape[:3]), math.prod(kernel.shape), kernel.shape[1]
    # XLA turns a product with a single row or column into multiplications and a sum, and would
    # round each term to the type of dy.
    single = 1 in (pixels, x.shape[3])
    dx = jax.lax.dot_general(
        dy,
        kernel.astype(dy.dtype),
        (((3,), (1,)), ((), ())),
        preferred_element_type=jnp.float32 if single else None,
    ).astype(dy.dtype)
    workspace = partial_sums(pixels, weights, PARTIAL_SUMS) + sums_of_dy(x.shape[0], features)
    shapes = [
        *written([(kernel.shape, kernel.dtype), ((1, features), bias.dtype)], x.dtype),
        jax.ShapeDtypeStruct((workspace,), jnp.float32),
    ]
    dkernel, dbias, _ = ffi_call('jaxunet_linear_weight_gradient', shapes)(x, dy)
    return dx, dkernel.astype(kernel.dtype), dbias.astype(bias.dtype), dy if adds else None


_linear.defvjp(_forward, _backward)


def sums_of_dy(batch: int, features: int) -> int:
    """Returns the float32 elements of the workspace that the sums of dy take."""
    return (batch + PARTIAL_BIASES) * features
