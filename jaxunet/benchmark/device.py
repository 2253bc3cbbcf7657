"""Measures a device's rates, the reference for a step's arithmetic and memory traffic."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

ROUNDS = 5


class Rates(NamedTuple):
    """Rates of one device in one precision.

    Fields:
      matmul_flops: floating-point operations per second of a large matrix product.
      copy_bytes: bytes per second, reads plus writes, of a pass over a large array.
    """

    matmul_flops: float
    copy_bytes: float

    def columns(self) -> dict[str, float]:
        """Returns the rates by the names that they have in rows."""
        return {'matmul_flops': self.matmul_flops, 'copy_bytes_per_s': self.copy_bytes}


def measure_rates(precision: str, *, side: int | None = None, copied: int | None = None) -> Rates:
    """Measures the matrix-product and copy rates of the first device.

    Operands are random: a product of zeros draws less power, and the GPU clocks higher.

    Args:
      precision: type of the product: bfloat16, float16 or float32 (TF32 on NVIDIA GPUs, as in JAX's
        convolutions).
      side: rows and columns of the square matrices; default 8192, or 512 on a CPU.
      copied: bytes of the copied array; default 1 GiB, or 64 MiB on a CPU.
    """
    on_cpu = jax.default_backend() == 'cpu'
    side = side or (512 if on_cpu else 8192)
    copied = copied or (2**26 if on_cpu else 2**30)
    dtype = jnp.dtype(precision)

    @jax.jit
    def draw(key: Array) -> tuple[Array, Array]:
        a, b = jax.random.normal(key, (2, side, side), jnp.float32)
        return a.astype(dtype), (b / side**0.5).astype(dtype)  # a @ b keeps the scale of a

    a, b = draw(jax.random.key(0))
    product = jax.jit(jnp.matmul)
    negate = jax.jit(jnp.negative)
    x = jax.jit(lambda key: jax.random.normal(key, (copied // 4,), jnp.float32))(jax.random.key(1))
    calls = 5 if on_cpu else 40  # enough to hide the cost of launching and waiting
    seconds = _seconds(lambda value: product(value, b), a, calls), _seconds(negate, x, calls)
    return Rates(2 * side**3 / seconds[0], 2 * x.nbytes / seconds[1])


def _seconds(function: Callable[[Array], Array], start: Array, calls: int) -> float:
    """Returns the median time of one call; each call takes the result of the one before."""
    times = []
    value = jax.block_until_ready(function(start))
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        for _ in range(calls):
            value = function(value)
        jax.block_until_ready(value)
        times.append((time.perf_counter() - began) / calls)
    return float(np.median(times[1:]))  # the first round warms up
