"""Float32 arrays as sums of bfloat16 terms, whose products tensor cores add up in float32."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def bfloat16_terms(x: Float[Array, '*shape'], count: int) -> list[Float[Array, '*shape']]:
    """Returns bfloat16 arrays whose sum approximates a float32 x to 8 bits per term.

    The rounding is explicit, because XLA may drop a pair of casts.
    """
    out = []
    for _ in range(count):
        head = lax.reduce_precision(x, 8, 7)
        out.append(head.astype(jnp.bfloat16))
        x = x - head
    return out
