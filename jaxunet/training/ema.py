"""Moving averages of the weights: exponential ones and power functions of the time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxunet.checkpoint.power_average import exponent
from jaxunet.model.unet import Params


def ema_decay(rate: float, updates: Int[Array, ''], warmup: bool) -> Float[Array, '']:
    """Returns the decay of an average after `updates` updates.

    It is `rate`, or with warm-up min(rate, (1 + n) / (10 + n)) after n updates, as in ddpm-torch.
    """
    n = updates.astype(jnp.float32)
    return jnp.minimum(rate, (1 + n) / (10 + n)) if warmup else jnp.asarray(rate, jnp.float32)


def power_share(width: float, updates: Int[Array, '']) -> Float[Array, '']:
    """Returns the share 1 − β of the new weights in a power-function average.

    β = (1 − 1/t)^(γ+1) at update t; see `jaxunet.checkpoint.power_average`. In float32, 1 − β
    itself would lose its digits at large t.

    Args:
      updates: number of updates before this one, t − 1.
    """
    t = updates.astype(jnp.float32) + 1
    return -jnp.expm1((exponent(width) + 1) * jnp.log1p(-1 / t))


def update_average(average: Params, params: Params, share: Float[Array, '']) -> Params:
    """Returns average + share · (params - average)."""
    return jax.tree.map(lambda a, p: a + share * (p - a), average, params)
