"""Multi-head self-attention on the packed qkv projection: the FFI handlers, differentiable."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def attention(
    qkv: Float[Array, 'batch tokens packed'], *, num_heads: int
) -> Float[Array, 'batch tokens channels']:
    """softmax(q·kᵀ/√d)·v for each head of width d = packed / (3 · num_heads), as `jaxunet.ops.attention.reference.attention`.

    The backward pass recomputes the weights from the saved log-sum-exp, in qkv's memory layout. Dao et al. 2022, arXiv 2205.14135.

    Args:
      qkv: bfloat16, float16 or float32; heads of width 1 to 256.

    Raises:
      ValueError: channels that the heads do not divide, heads wider than 256, or another type.
    """
    packed = qkv.shape[-1]
    if num_heads < 1 or not packed or packed % (3 * num_heads):
        raise ValueError(f'attention: {packed} packed channels are not 3 x {num_heads} heads')
    if packed > 3 * 256 * num_heads:
        raise ValueError(
            f'attention: heads of width {packed // (3 * num_heads)}; expected at most 256'
        )
    if qkv.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise ValueError(f'attention: qkv: {qkv.dtype}; expected bfloat16, float16 or float32')
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
    out, norm = jax.ffi.ffi_call('jaxunet_attention_forward', shapes, vmap_method='broadcast_all')(
        qkv, heads=np.int64(heads)
    )
    return out, (qkv, out, norm)


def _backward(heads: int, kept: tuple[Array, Array, Array], grad: Array) -> tuple[Array]:
    qkv, out, norm = kept
    shape = jax.ShapeDtypeStruct(qkv.shape, qkv.dtype)
    call = jax.ffi.ffi_call('jaxunet_attention_backward', shape, vmap_method='broadcast_all')
    return (call(qkv, out, norm, grad, heads=np.int64(heads)),)


_attention.defvjp(_forward, _backward)
