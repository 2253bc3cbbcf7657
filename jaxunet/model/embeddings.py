"""Embeddings of timesteps and of class labels."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real


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


def fourier_embedding(
    t: Real[Array, ' batch'], frequencies: Float[Array, ' frequencies']
) -> Float[Array, 'batch 2*frequencies']:
    """Returns sin(2π f t) of all frequencies f, then cos(2π f t); no gradients reach them.

    Source: Song et al. 2021, arXiv 2011.13456 (NCSN++).
    """
    angles = (
        t.astype(jnp.float32)[:, None] * (2 * math.pi * jax.lax.stop_gradient(frequencies))[None, :]
    )
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


@jax.custom_vjp
def label_embedding(
    table: Float[Array, 'classes width'], labels: Int[Array, ' batch']
) -> Float[Array, 'batch width']:
    """Returns the row of each label; zeros for labels below zero.

    The gradient of the table is a product with a matrix of zeros and ones, because a scatter adds
    in varying order on GPUs: runs would differ in their last bits.
    """
    rows = jnp.take(table, jnp.maximum(labels, 0), axis=0)
    return jnp.where(labels[:, None] >= 0, rows, jnp.zeros((), rows.dtype))


def _with_labels(table: Array, labels: Array) -> tuple[Array, tuple[Array, Array]]:
    return label_embedding(table, labels), (table, labels)


def _label_gradient(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    table, labels = saved
    chosen = jax.nn.one_hot(labels, table.shape[0], axis=0, dtype=gradient.dtype)
    return jnp.matmul(chosen, gradient, precision=jax.lax.Precision.HIGHEST), None


label_embedding.defvjp(_with_labels, _label_gradient)
