"""Multi-head self-attention on the packed qkv projection: the reference, and the xla backend.

Vaswani et al. 2017, arXiv 1706.03762, eq. 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import at_least_float32
from jaxunet.ops.attention.operands import head_width


def attention(
    qkv: Float[Array, 'batch tokens packed'], *, num_heads: int
) -> Float[Array, 'batch tokens channels']:
    """softmax(q·kᵀ/√d)·v for each head of width d = packed / (3 · num_heads).

    Softmax is in at least float32; the result has qkv's dtype.

    Args:
      qkv: all of q, then all of k, then all of v, each head-major.

    Raises:
      ValueError: another rank or type, or the heads do not divide the packed channels.
    """
    width = head_width(qkv, num_heads)
    batch, tokens, _ = qkv.shape
    wide = at_least_float32(qkv.dtype)
    q, k, v = jnp.moveaxis(qkv.reshape(batch, tokens, 3, num_heads, width), 2, 0)
    logits = jnp.einsum('bqhd,bkhd->bhqk', q, k, preferred_element_type=wide) * jnp.asarray(
        width**-0.5, wide
    )
    weights = jax.nn.softmax(logits, axis=-1).astype(qkv.dtype)
    return jnp.einsum('bhqk,bkhd->bqhd', weights, v).reshape(batch, tokens, num_heads * width)
