"""Improved precision and recall (Kynkäänniemi et al. 2019, arXiv 1904.06991).

Precision asks if samples lie near the data; recall asks if the data lie near samples. The manifold
of a set of features is the union of balls around them; each radius is the distance to the k-th
nearest neighbour (equation 1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxunet.metrics.pairwise import BLOCK, fold_pairs
from jaxunet.runtime.errors import UserError

NEIGHBOURS = 3

Features = Float[np.ndarray, 'n d']


def precision_recall(
    samples: Features,
    reference: Float[np.ndarray, 'm d'],
    *,
    k: int = NEIGHBOURS,
    block: int = BLOCK,
) -> tuple[float, float]:
    """Returns (precision, recall), each 0 to 1.

    Precision is the share of samples inside the reference's manifold; recall is the share of the
    reference inside the samples' manifold. Distances are |x|² + |y|² − 2 x·y in float32, of
    features centred on the reference's mean.

    Args:
      k: the neighbour that sets a ball's radius.
      block: see `fold_pairs`.

    Raises:
      UserError: a set with k images or fewer.
    """
    if min(len(samples), len(reference)) <= k:
        raise UserError(
            f'precision, recall (k={k}): need more than {k} images on each side, '
            f'found {len(samples)} and {len(reference)}'
        )
    centre = reference.mean(axis=0, dtype=np.float64)[None]
    samples, reference = ((x - centre).astype(np.float32) for x in (samples, reference))
    precision = covered(samples, reference, squared_radii(reference, k, block=block), block=block)
    recall = covered(reference, samples, squared_radii(samples, k, block=block), block=block)
    return float(precision.mean()), float(recall.mean())


def squared_radii(features: Features, k: int, *, block: int = BLOCK) -> Float[np.ndarray, ' n']:
    """Returns the squared distance of every feature to its k-th nearest neighbour, (n,)."""
    return fold_pairs(_nearest, _far(k), features, features, block=block)[:, -1]


def covered(
    points: Features,
    centres: Float[np.ndarray, 'm d'],
    radii: Float[np.ndarray, ' m'],
    *,
    block: int = BLOCK,
) -> np.ndarray:
    """Returns True for each point that lies in at least one ball, bool (n,).

    Args:
      centres: (m, d).
      radii: squared radii of the balls, (m,).
    """
    return fold_pairs(_inside, _nowhere, points, centres, extra=radii, block=block)


def _squared(products: Array, row_norms: Array, column_norms: Array) -> Array:
    return jnp.maximum(row_norms[:, None] + column_norms[None] - 2 * products, 0)


@functools.cache
def _far(k: int) -> Callable[[int], Array]:
    """Initial state of `_nearest`: k distances. Cached, so that each k compiles once."""
    return lambda rows: jnp.full((rows, k), jnp.inf, jnp.float32)


def _nearest(
    state: Array,
    products: Array,
    row_norms: Array,
    column_norms: Array,
    places: Array,
    numbers: Array,
    _extra: Array,
) -> Array:
    """Keeps the k smallest distances to other features, ascending."""
    other = (numbers >= 0)[None] & (places[:, None] != numbers[None])
    distances = jnp.where(other, _squared(products, row_norms, column_norms), jnp.inf)
    return -lax.top_k(-jnp.concatenate([state, distances], axis=1), state.shape[1])[0]


def _nowhere(rows: int) -> Array:
    return jnp.zeros(rows, jnp.bool_)


def _inside(
    state: Array,
    products: Array,
    row_norms: Array,
    column_norms: Array,
    places: Array,
    numbers: Array,
    radii: Array,
) -> Array:
    near = (_squared(products, row_norms, column_norms) <= radii[None]) & (numbers >= 0)[None]
    return state | near.any(1)
