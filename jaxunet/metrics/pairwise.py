"""Reduces over all pairs of two sets of features, one block of pairs at a time.

Device memory holds one block, however many pairs there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

BLOCK = 2048  # rows and columns per block
# Timing the candidates of a product takes XLA seconds for each size of the sets, on a GPU; the
# product that it takes without runs for milliseconds.
UNTIMED = {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False}

# The results of a block of rows so far: an array with an axis of rows in front, or a tuple of them.
State = Any
# (state, products (rows, columns), row norms² (rows,), column norms² (columns,), row numbers,
#  column numbers, column extras) -> state
Fold = Callable[[State, Array, Array, Array, Array, Array, Array], State]


def fold_pairs(
    fold: Fold,
    initial: Callable[[int], State],
    rows: Float[np.ndarray, 'n d'],
    columns: Float[np.ndarray, 'm d'],
    *,
    extra: Float[np.ndarray, ' m'] | None = None,
    block: int = BLOCK,
) -> State:
    """Reduces each row's inner products with all columns (float32) to one result per row.

    The last blocks are padded; padded columns have number −1, which `fold` must ignore.

    Args:
      fold: updates the state of a block of rows with a block of columns; a module-level pure
        function, because it is a static argument of a compiled one.
      initial: number of rows -> their initial state; hashable, for the same reason.
      extra: one number per column, passed to `fold`.
      block: rows and columns per block; affects rounding only.
    """
    n, m = len(rows), len(columns)
    high, wide = min(block, n), min(block, m)
    numbers = _padded(np.arange(m, dtype=np.int32), wide, -1)
    extras = _padded(
        np.zeros(m, np.float32) if extra is None else extra.astype(np.float32), wide, 0
    )
    tiles = _padded(columns.astype(np.float32), wide, 0)
    on_device = [jnp.asarray(a) for a in (tiles, numbers, extras)]
    tall, places = (
        _padded(rows.astype(np.float32), high, 0),
        _padded(np.arange(n, dtype=np.int32), high, -1),
    )
    results = [_scan(fold, initial, tall[i], places[i], *on_device) for i in range(len(tall))]
    return jax.tree.map(lambda *parts: np.concatenate(jax.device_get(parts))[:n], *results)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=UNTIMED)
def _scan(
    fold: Fold,
    initial: Callable[[int], State],
    rows: Array,
    places: Array,
    tiles: Array,
    numbers: Array,
    extras: Array,
) -> State:
    row_norms = (rows * rows).sum(1)

    def step(state: State, tile: tuple[Array, Array, Array]) -> tuple[State, None]:
        columns, number, extra = tile
        products = jnp.matmul(rows, columns.T, precision=lax.Precision.HIGHEST)
        return fold(
            state, products, row_norms, (columns * columns).sum(1), places, number, extra
        ), None

    return lax.scan(step, initial(rows.shape[0]), (tiles, numbers, extras))[0]


def _padded(values: np.ndarray, block: int, fill: int) -> np.ndarray:
    """Splits `values` into blocks (blocks, block, ...), the last one padded with `fill`."""
    count = -(-len(values) // block)
    out = np.full((count * block, *values.shape[1:]), fill, values.dtype)
    out[: len(values)] = values
    return out.reshape(count, block, *values.shape[1:])
