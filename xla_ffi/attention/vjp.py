"""Differentiable calls of the attention handlers: self-attention on the packed qkv projection."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxunet.ops.attention.operands import check_kernel_operands
from xla_ffi.call import ffi_call


def attention(
    qkv: Float[Array, 'batch tokens packed'], *, num_heads: int
) -> Float[Array, 'batch tokens channels']:
    """softmax(q·kᵀ/√d)·v for each head; see `jaxunet.ops.attention.reference.attention`.

    The backward pass recomputes the weights from the saved log-sum-exp. Both passes keep qkv's
    memory layout. Dao et al. 2022, arXiv 2205.14135.

    Args:
      qkv: bfloat16, float16 or float32; heads of width 1 to 256.

    Raises:
      ValueError: channels that the heads do not divide, heads wider than 256, or another type.
    """
    check_kernel_operands(qkv, num_heads)
    return _attention(qkv, num_heads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(qkv: Array, heads: int) -> Array:
    return _forward(qkv, heads)[0]


def _forward(qkv: Array, heads: int) -> tuple[Array, tuple[Array, Array, Array]]:
    batch, tokens, packed = qkv.shape
    shapes = [
        jax.ShapeDtypeStruct((batch, tokens, packed // 3), qkv.dtype),
        jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32),
    ]
    out, lse = ffi_call('jaxunet_attention_forward', shapes, vmap_method='broadcast_all')(
        qkv, heads=np.int64(heads)
    )
    return out, (qkv, out, lse)


def _backward(heads: int, kept: tuple[Array, Array, Array], grad: Array) -> tuple[Array]:
    qkv, out, lse = kept
    shape = jax.ShapeDtypeStruct(qkv.shape, qkv.dtype)
    call = ffi_call('jaxunet_attention_backward', shape, vmap_method='broadcast_all')
    return (call(qkv, out, lse, grad, heads=np.int64(heads)),)


_attention.defvjp(_forward, _backward)
