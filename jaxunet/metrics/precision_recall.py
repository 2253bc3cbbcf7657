"""Improved precision and recall (Kynkäänniemi et al. 2019, arXiv 1904.06991).

Precision asks if samples lie near the data; recall asks if the data lie near samples. The manifold
of a set of features is the union of balls around them; each radius is the distance to the k-th
nearest neighbour (equation 1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxunet.metrics.pairwise import BLOCK, Pairs, fold_pairs
from jaxunet.runtime.errors import UserError

NEIGHBOURS = 3

Features = Float[np.ndarray, 'n d']


class PrecisionRecall(NamedTuple):
    """Precision and recall, each 0 to 1."""

    precision: float
    recall: float


def precision_recall(
    samples: Features,
    reference: Float[np.ndarray, 'm d'],
    *,
    k: int = NEIGHBOURS,
    block: int = BLOCK,
) -> PrecisionRecall:
    """Returns precision and recall of samples against a reference.

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
    return PrecisionRecall(float(precision.mean()), float(recall.mean()))


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


def _squared(pairs: Pairs) -> Array:
    return jnp.maximum(pairs.squared_distances, 0)


@functools.cache
def _far(k: int) -> Callable[[int], Array]:
    """Returns a function rows -> initial state of `_nearest`; cached: each k compiles once."""
    return lambda rows: jnp.full((rows, k), jnp.inf, jnp.float32)


def _nearest(state: Array, pairs: Pairs) -> Array:
    """Keeps the k smallest squared distances to other features, ascending."""
    distances = jnp.where(pairs.others, _squared(pairs), jnp.inf)
    return -lax.top_k(-jnp.concatenate([state, distances], axis=1), state.shape[1])[0]


def _nowhere(rows: int) -> Array:
    return jnp.zeros(rows, jnp.bool_)


def _inside(state: Array, pairs: Pairs) -> Array:
    """Marks the rows inside the ball around a column, whose squared radius is `Pairs.extra`."""
    return state | ((_squared(pairs) <= pairs.extra[None]) & pairs.exist).any(1)
