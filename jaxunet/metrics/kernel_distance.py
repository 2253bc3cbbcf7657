"""Kernel distance (KID with Inception features): unbiased MMD² of the kernel (x·y/d + 1)³.

Source: Bińkowski et al. 2018 (arXiv 1801.01401), section 4 and appendix. The mean over random
subsets follows their published code.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxunet.metrics.pairwise import BLOCK, Fold, Pairs, fold_pairs
from jaxunet.runtime.errors import UserError

SUBSETS = 100
SUBSET_SIZE = 1000

Features = Float[np.ndarray, 'n d']


@dataclass(frozen=True)
class KernelDistance:
    """A kernel distance averaged over random subsets.

    Fields:
      value: mean over the subsets.
      std: standard deviation over the subsets; 0 for one.
      subsets: number of subsets.
      subset_size: images of each side in a subset.
    """

    value: float
    std: float
    subsets: int
    subset_size: int


def kernel_distance(
    a: Features,
    b: Float[np.ndarray, 'm d'],
    *,
    subsets: int = SUBSETS,
    subset_size: int = SUBSET_SIZE,
    seed: int = 0,
    block: int = BLOCK,
) -> KernelDistance:
    """Returns the mean of `squared_mmd` over random subsets.

    Args:
      subsets: number of subsets; 0 compares the whole sets once.
      subset_size: images per subset, drawn without replacement; at most the smaller set.
      block: see `fold_pairs`.

    Raises:
      UserError: a side has fewer than two images, or `subsets` or `subset_size` is out of range.
    """
    if min(len(a), len(b)) < 2:
        raise UserError(
            f'a kernel distance needs 2 images or more on each side, found {len(a)} and {len(b)}'
        )
    if subsets < 0 or subset_size < 2:
        raise UserError(
            'kid: expected 0 subsets or more, of 2 images or more, '
            f'found {subsets} of {subset_size}'
        )
    if subsets == 0:
        return KernelDistance(squared_mmd(a, b, block=block), 0.0, 1, max(len(a), len(b)))
    size = min(subset_size, len(a), len(b))
    random = np.random.default_rng(seed)
    values = []
    for _ in range(subsets):
        rows_a, rows_b = (random.choice(len(x), size, replace=False) for x in (a, b))
        values.append(squared_mmd(a[rows_a], b[rows_b], block=block))
    return KernelDistance(float(np.mean(values)), float(np.std(values)), subsets, size)


def squared_mmd(a: Features, b: Float[np.ndarray, 'm d'], *, block: int = BLOCK) -> float:
    """Returns the unbiased MMD², which may be below 0.

    This is the mean of k over pairs of different images of `a`, plus the same for `b`, minus twice
    the mean of k over pairs of one image of each. Kernel values and row sums are float32; the sum
    over rows is float64.
    """
    n, m = len(a), len(b)
    # Scale by 1/√d each, so that the inner product is x·y/d.
    a, b = (x.astype(np.float32) / np.float32(np.sqrt(x.shape[1])) for x in (a, b))

    def mean(add: Fold, x: Features, y: Float[np.ndarray, 'm d'], pairs: int) -> float:
        return fold_pairs(add, _zeros, x, y, block=block).sum(dtype=np.float64) / pairs

    within_a = mean(_add_others, a, a, n * (n - 1))
    within_b = mean(_add_others, b, b, m * (m - 1))
    return float(within_a + within_b - 2 * mean(_add, a, b, n * m))


def _zeros(rows: int) -> Array:
    return jnp.zeros(rows, jnp.float32)


def _kernel(products: Array) -> Array:
    """Returns (p + 1)³ − 1; without the constant, which cancels in MMD², rounding is smaller."""
    return products * (products * (products + 3) + 3)


def _add(state: Array, pairs: Pairs) -> Array:
    return state + jnp.where(pairs.exist, _kernel(pairs.products), 0).sum(1)


def _add_others(state: Array, pairs: Pairs) -> Array:
    return state + jnp.where(pairs.others, _kernel(pairs.products), 0).sum(1)
