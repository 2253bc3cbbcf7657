"""Exponential moving averages of the weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxunet.model.unet import Params


def ema_decay(rate: float, updates: Int[Array, ''], warmup: bool) -> Float[Array, '']:
    """Returns the decay of an average after `updates` updates.

    It is `rate`, or with warm-up min(rate, (1 + n) / (10 + n)) after n updates, as in ddpm-torch.
    """
    n = updates.astype(jnp.float32)
    return jnp.minimum(rate, (1 + n) / (10 + n)) if warmup else jnp.asarray(rate, jnp.float32)


def update_ema(ema: Params, params: Params, decay: Float[Array, '']) -> Params:
    """Returns decay · ema + (1 - decay) · params."""
    return jax.tree.map(lambda e, p: e + (1 - decay) * (p - e), ema, params)
