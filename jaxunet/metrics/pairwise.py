"""Reduces over all pairs of two sets of features, one block of pairs at a time.

Device memory holds one block, however many pairs there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

BLOCK = 2048  # rows and columns per block
# No autotuning: on a GPU, XLA would time candidates for seconds at each size of the sets, and the
# product that it takes without timing runs for milliseconds.
UNTIMED = {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False}

# The results of a block of rows so far: an array with an axis of rows in front, or a tuple of them.
State = Any


class Pairs(NamedTuple):
    """All pairs of a block of rows with a block of columns.

    Fields:
      products: inner products.
      row_norms, column_norms: squared norms.
      row_numbers, column_numbers: indices in their sets; −1 for padding.
      extra: one number per column, from the caller.
    """

    products: Float[Array, 'rows columns']
    row_norms: Float[Array, ' rows']
    column_norms: Float[Array, ' columns']
    row_numbers: Int[Array, ' rows']
    column_numbers: Int[Array, ' columns']
    extra: Float[Array, ' columns']

    @property
    def exist(self) -> Bool[Array, '1 columns']:
        """True for columns that are not padding."""
        return (self.column_numbers >= 0)[None]

    @property
    def others(self) -> Bool[Array, 'rows columns']:
        """True for columns that are not padding and whose index differs from the row's."""
        return self.exist & (self.row_numbers[:, None] != self.column_numbers[None])

    @property
    def squared_distances(self) -> Float[Array, 'rows columns']:
        """Squared Euclidean distances; rounding may make them negative."""
        return self.row_norms[:, None] + self.column_norms[None] - 2 * self.products


Fold = Callable[[State, Pairs], State]


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

    The last blocks are padded; `fold` must ignore the columns that do not `exist`.

    Args:
      fold: updates the state of a block of rows with a block of columns. It must be a pure function
        at module level, because it is a static argument of a compiled function.
      initial: number of rows -> their initial state; hashable, for the same reason.
      extra: one number per column, for `fold`.
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
    row_blocks = _padded(rows.astype(np.float32), high, 0)
    row_numbers = _padded(np.arange(n, dtype=np.int32), high, -1)
    results = [
        _scan(fold, initial, block_rows, block_numbers, *on_device)
        for block_rows, block_numbers in zip(row_blocks, row_numbers, strict=True)
    ]
    return jax.tree.map(lambda *parts: np.concatenate(jax.device_get(parts))[:n], *results)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=UNTIMED)
def _scan(
    fold: Fold,
    initial: Callable[[int], State],
    rows: Array,
    row_numbers: Array,
    tiles: Array,
    numbers: Array,
    extras: Array,
) -> State:
    row_norms = (rows * rows).sum(1)

    def step(state: State, tile: tuple[Array, Array, Array]) -> tuple[State, None]:
        columns, column_numbers, extra = tile
        products = jnp.matmul(rows, columns.T, precision=lax.Precision.HIGHEST)
        column_norms = (columns * columns).sum(1)
        pairs = Pairs(products, row_norms, column_norms, row_numbers, column_numbers, extra)
        return fold(state, pairs), None

    return lax.scan(step, initial(rows.shape[0]), (tiles, numbers, extras))[0]


def _padded(values: np.ndarray, block: int, fill: int) -> np.ndarray:
    """Splits `values` into blocks (blocks, block, ...), the last one padded with `fill`."""
    count = -(-len(values) // block)
    out = np.full((count * block, *values.shape[1:]), fill, values.dtype)
    out[: len(values)] = values
    return out.reshape(count, block, *values.shape[1:])
