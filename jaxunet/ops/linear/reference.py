"""A linear layer at every pixel, a 1×1 convolution (NHWC), and its fusion with the addition that ends an attention block.

The plain composition: the oracle of the kernels, and what the xla and the pallas backend run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def linear(
    x: Float[Array, 'batch height width channels'],
    kernel: Float[Array, 'channels features'],
    bias: Float[Array, '1 features'],
    *,
    residual: Float[Array, 'batch height width features'] | None = None,
) -> Float[Array, 'batch height width features']:
    """x · kernel + bias [+ residual], all in x's dtype."""
    y = jax.lax.dot_general(x, kernel.astype(x.dtype), (((3,), (0,)), ((), ()))) + jnp.reshape(
        bias, (1, 1, 1, -1)
    ).astype(x.dtype)
    return y if residual is None else residual + y
