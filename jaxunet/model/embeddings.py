"""The sinusoidal embedding of timesteps."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Real


def timestep_embedding(
    t: Real[Array, ' batch'], width: int, *, max_period: int = 10000, order: str = 'adm'
) -> Float[Array, 'batch width']:
    """Returns sinusoids of t · max_period^(-i/n), i < width // 2; an odd width ends with a zero.

    Args:
      order: `adm` is cosines then sines, n = width // 2 (guided-diffusion, unet.cu). `ddpm` is
        sines then cosines, n = width // 2 - 1, so that the last frequency is 1 / max_period (Ho et
        al. 2020, arXiv 2006.11239).
    """
    half = width // 2
    last = half if order == 'adm' else max(half - 1, 1)
    frequencies = jnp.exp(-math.log(max_period) / last * jnp.arange(half, dtype=jnp.float32))
    angles = t.astype(jnp.float32)[:, None] * frequencies[None, :]
    waves = [jnp.cos(angles), jnp.sin(angles)]
    embedding = jnp.concatenate(waves if order == 'adm' else waves[::-1], axis=-1)
    return jnp.pad(embedding, ((0, 0), (0, width % 2)))
