"""The gradients of GroupNorm's scale and offset."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.group_norm.operands import Norm


def parameter_gradients(sums: Float[Array, 'batch 2 channels'], norm: Norm) -> Norm:
    """Returns the gradients of scale and offset, in their shapes and types.

    These are s₂ and s₁ of each sample, summed over the samples that share a parameter.

    Args:
      sums: s₁ and s₂ of `hopper`'s formulas.
    """
    # One reduction for both; XLA drops it if neither is shared.
    total = jnp.sum(sums, axis=0, keepdims=True)

    def of(parameter: Array, number: int) -> Array:
        return (sums if parameter.shape[0] == sums.shape[0] else total)[:, number]

    return norm.with_gradients(of(norm.scale, 1), of(norm.offset, 0))
