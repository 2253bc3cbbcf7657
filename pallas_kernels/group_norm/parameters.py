"""The gradients of GroupNorm's scale and offset."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def parameter_gradients(
    sums: Float[Array, 'batch 2 channels'],
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
) -> tuple[Float[Array, '#batch channels'], Float[Array, '#batch channels']]:
    """Returns the gradients of scale and offset, in their shapes and types.

    These are s₂ and s₁ of each sample, summed over the samples that share a parameter.

    Args:
      sums: s₁ and s₂ of `hopper`'s formulas.
    """
    # One reduction for both; XLA drops it if neither is shared.
    total = jnp.sum(sums, axis=0, keepdims=True)

    def of(parameter: Array, number: int) -> Array:
        found = sums if parameter.shape[0] == sums.shape[0] else total
        return found[:, number].astype(parameter.dtype)

    return of(scale, 1), of(offset, 0)
