"""Improved precision and recall (Kynkäänniemi et al. 2019, arXiv 1904.06991): is a sample near the data, and the data near a sample?

The manifold of a set of features is the union of balls around them, each of the radius to its k-th nearest neighbour (equation 1).
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

Activation = Float[np.ndarray, 'n d']


def precision_recall(
    samples: Activation, reference: Activation, *, k: int = NEIGHBOURS, block: int = BLOCK
) -> tuple[float, float]:
    """(share of the samples inside the reference's manifold, share of the reference inside the samples' manifold).

    Squared distances in float32, of features centred on the reference's mean, as |x|² + |y|² − 2 x·y.

    Raises:
      UserError: a set with no more than k images.
    """
    if min(len(samples), len(reference)) <= k:
        raise UserError(
            f'precision, recall (k={k}): need more than {k} images on each side, found {len(samples)} and {len(reference)}'
        )
    centre = reference.mean(axis=0, dtype=np.float64)[None]
    samples, reference = ((x - centre).astype(np.float32) for x in (samples, reference))
    precision = covered(samples, reference, squared_radii(reference, k, block=block), block=block)
    recall = covered(reference, samples, squared_radii(samples, k, block=block), block=block)
    return float(precision.mean()), float(recall.mean())


def squared_radii(features: Activation, k: int, *, block: int = BLOCK) -> Float[np.ndarray, ' n']:
    """Squared distance of every feature to its k-th nearest among the others."""
    return fold_pairs(_nearest, _far(k), features, features, block=block)[:, -1]


def covered(
    points: Activation, centres: Activation, radii: Float[np.ndarray, ' m'], *, block: int = BLOCK
) -> np.ndarray:
    """Whether each point lies in one of the balls, bool (n,)."""
    return fold_pairs(_inside, _nowhere, points, centres, extra=radii, block=block)


def _squared(products: Array, row_norms: Array, column_norms: Array) -> Array:
    return jnp.maximum(row_norms[:, None] + column_norms[None] - 2 * products, 0)


@functools.cache
def _far(k: int) -> Callable[[int], Array]:
    """State of `_nearest`: k distances. One function for each k, so that it is compiled once."""
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
    """The k smallest distances to others, ascending."""
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
