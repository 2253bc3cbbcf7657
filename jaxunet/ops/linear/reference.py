"""A linear layer at every pixel, a 1×1 convolution (NHWC), plus the residual of an attention block.

In plain JAX: the reference that kernels are tested against, and the xla backend.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.linear.operands import check_operands


def linear(
    x: Float[Array, 'batch height width channels'],
    kernel: Float[Array, 'channels features'],
    bias: Float[Array, '1 features'],
    *,
    residual: Float[Array, 'batch height width features'] | None = None,
) -> Float[Array, 'batch height width features']:
    """x · kernel + bias [+ residual], all in x's dtype.

    Raises:
      ValueError: shapes or types do not fit.
    """
    check_operands(x, kernel, bias, residual)
    y = jax.lax.dot_general(x, kernel.astype(x.dtype), (((3,), (0,)), ((), ()))) + jnp.reshape(
        bias, (1, 1, 1, -1)
    ).astype(x.dtype)
    return y if residual is None else residual + y
