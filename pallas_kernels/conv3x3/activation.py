"""SiLU(a · x + b), for kernels, and for calls whose kernel does not apply it to x itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.group_norm.operands import Affine


def affine_silu(
    x: Float[Array, '*#shape'], a: Float[Array, '*#shape'], b: Float[Array, '*#shape']
) -> Float[Array, '*shape']:
    """Returns SiLU(a · x + b) in float32."""
    y = a * x.astype(jnp.float32) + b
    return y / (1.0 + jnp.exp(-y))


def activated(
    parts: Sequence[Float[Array, 'batch height width _']], affine: Affine
) -> tuple[Float[Array, 'batch height width _'], ...]:
    """Returns SiLU(a · x + b) of each part, in its type; a and b have the channels of all parts."""
    ends = itertools.accumulate(part.shape[-1] for part in parts)
    results = []
    for part, end in zip(parts, ends, strict=True):
        a, b = (
            value[:, None, None, end - part.shape[-1] : end].astype(jnp.float32) for value in affine
        )
        results.append(affine_silu(part, a, b).astype(part.dtype))
    return tuple(results)
