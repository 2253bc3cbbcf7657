"""The linear layer on the FFI handlers, the convolution's kernels without their taps (`xla_ffi/conv3x3`); its input gradient is XLA's."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.conv3x3.operands import outline

# Floats of the weight gradient's workspace: blocks that share the pixels write their sums there, each of at most six chunks of 64 input
# channels by 64 features. On a GPU of 132 multiprocessors more would not be used; a kernel that finds less shares the pixels less.
PARTIAL_SUMS = 132 * 6 * 64 * 64
PARTIAL_BIASES = 512


def linear(
    x: Float[Array, 'batch height width channels'],
    kernel: Float[Array, 'channels features'],
    bias: Float[Array, '1 features'],
    *,
    residual: Float[Array, 'batch height width features'] | None = None,
) -> Float[Array, 'batch height width features']:
    """x · kernel + bias [+ residual]: `jaxunet.ops.linear.reference.linear` on kernels.

    Products accumulate in float32, to which bias and residual are added before the sum is rounded.

    Raises:
      ValueError: shapes or types that do not fit each other.
    """
    if x.ndim != 4 or not x.shape[3]:
        raise ValueError(
            f'linear: x: shape {list(x.shape)}; expected [batch, height, width, channels]'
        )
    if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise ValueError(f'linear: x: {x.dtype}; expected bfloat16, float16 or float32')
    if kernel.ndim != 2 or kernel.shape[0] != x.shape[3]:
        raise ValueError(
            f'linear: kernel: shape {list(kernel.shape)}; expected [{x.shape[3]}, features]'
        )
    features = kernel.shape[1]
    if bias.shape != (1, features):
        raise ValueError(f'linear: bias: shape {list(bias.shape)}; expected [1, {features}]')
    if residual is not None and (
        residual.shape != (*x.shape[:3], features) or residual.dtype != x.dtype
    ):
        expected = f'{x.dtype}{[*x.shape[:3], features]}'
        raise ValueError(
            f'linear: residual is {residual.dtype}{list(residual.shape)}; expected {expected}'
        )
    return _linear(x, kernel, bias, residual)


@jax.custom_vjp
def _linear(x: Array, kernel: Array, bias: Array, residual: Array | None) -> Array:
    shape = jax.ShapeDtypeStruct((*x.shape[:3], kernel.shape[1]), x.dtype)
    added = () if residual is None else (residual,)
    call = jax.ffi.ffi_call('jaxunet_linear', shape, vmap_method='sequential')
    return call(
        x, kernel.astype(x.dtype), bias.astype(jnp.float32), *added, residual=residual is not None
    )


def _forward(x: Array, kernel: Array, bias: Array, residual: Array | None) -> tuple[Array, Any]:
    return _linear(x, kernel, bias, residual), (x, kernel, outline(bias), residual is not None)


def _backward(saved: Any, dy: Array) -> tuple[Any, ...]:
    x, kernel, bias, adds = saved
    # XLA's product of two plain matrices was ahead of this design without its taps in all eight cases on an H200, 1.3 to 1.9 times.
    dx = jax.lax.dot_general(dy, kernel.astype(dy.dtype), (((3,), (1,)), ((), ())))
    pixels, weights, features = math.prod(x.shape[:3]), math.prod(kernel.shape), kernel.shape[1]
    # At least the gradients themselves, which are float32 until all sums are there.
    workspace = (
        max(min(weights * -(-pixels // 64), PARTIAL_SUMS), weights)
        + (x.shape[0] + PARTIAL_BIASES) * features
    )
    # The kernels write the types that they can write: that of the parameters if it is float32 or that of x.
    wanted = [(kernel.shape, kernel.dtype), ((1, features), bias.dtype)]
    shapes = [
        jax.ShapeDtypeStruct(shape, t if t in (jnp.float32, x.dtype) else jnp.float32)
        for shape, t in wanted
    ]
    shapes += [jax.ShapeDtypeStruct((workspace,), jnp.float32)]
    dkernel, dbias, _ = jax.ffi.ffi_call(
        'jaxunet_linear_weight_gradient', shapes, vmap_method='sequential'
    )(x, dy)
    return dx, dkernel.astype(kernel.dtype), dbias.astype(bias.dtype), dy if adds else None


_linear.defvjp(_forward, _backward)
