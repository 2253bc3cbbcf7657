"""Finds samples that repeat a training image.

A sample x is a copy of its nearest training image y if

    ratio(x) = d(x, y) / s(y) < 1/3,

where s(y) is the distance from y to its third nearest other training image: x lies far nearer to y
than training images lie to each other. This follows the ratio test of Yoon et al. 2023, "Diffusion
Probabilistic Models Generalize when They Fail to Memorize", with their threshold; Gu et al. 2023
(arXiv 2310.02664) count in the same way. Both divide by the distance from x to its second nearest
training image instead. If the set holds y twice, that distance is small, and copies of y are
missed. With s(y), copies of y are missed only if the set holds y four times.

The test needs no choice of scale, because s(y) has the units of d. `Copies.baseline` calibrates it:
it is the share of training images that the same test finds to be copies of other training images.
It is 0 unless the set repeats images.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Real

from jaxunet.metrics.pairwise import BLOCK, Pairs, fold_pairs
from jaxunet.runtime.errors import UserError

THRESHOLD = 1 / 3
NEIGHBOUR = 3  # s(y) is the distance to this neighbour
CHUNK_BYTES = 2**29  # bytes of training vectors, in float32, on the device at a time

# float32 features, or uint8 pixels, which are divided by 255.
Vectors = Real[np.ndarray, 'n d']
Training = Real[np.ndarray, 'm d']
Mirror = Callable[[np.ndarray], np.ndarray]


class Neighbours(NamedTuple):
    """The nearest training images of some vectors, ascending by distance.

    Fields:
      image: indices of the training images.
      distance: Euclidean distances.
      mirrored: True if the image is nearer when one of the two is mirrored.
    """

    image: Int[np.ndarray, 'n k']
    distance: Float[np.ndarray, 'n k']
    mirrored: Bool[np.ndarray, 'n k']


class Copies(NamedTuple):
    """The result of the test for each sample.

    Fields:
      nearest: the nearest training image of each sample; k = 1.
      ratio: d(x, y) / s(y); 0 where d is 0.
      baseline: the share of training images that are copies of other training images.
    """

    nearest: Neighbours
    ratio: Float[np.ndarray, ' n']
    baseline: float

    @property
    def found(self) -> Bool[np.ndarray, ' n']:
        """True for each sample that is a copy."""
        return self.ratio < THRESHOLD

    @property
    def share(self) -> float:
        """The share of samples that are copies."""
        return float(self.found.mean())


def find_copies(
    samples: Vectors,
    training: Training,
    *,
    mirror: Mirror | None = None,
    seed: int = 0,
    block: int = BLOCK,
) -> Copies:
    """Finds the samples that are copies of training images.

    Args:
      mirror: returns the vectors of the mirrored images. A copy may then be mirrored.
      seed: draws the training images of the baseline, as many as there are samples.
      block: see `fold_pairs`.

    Raises:
      UserError: too few training images.
    """
    if len(training) < NEIGHBOUR + 2:
        raise UserError(
            f'copies: need {NEIGHBOUR + 2} training images or more, found {len(training)}'
        )
    search = _Search(training, mirror, block)
    neighbours = search.nearest(samples, 1)
    ratio = search.ratio(neighbours, np.full(len(samples), -1))
    count = min(len(samples), len(training))
    some = np.random.default_rng(seed).choice(len(training), count, replace=False)
    baseline = search.ratio(_without(search.nearest(training[some], 2), some), some)
    return Copies(neighbours, ratio, float((baseline < THRESHOLD).mean()))


@dataclass(frozen=True)
class _Search:
    """Searches for neighbours among training images.

    Fields:
      mirror: also compares the mirrored queries; an image counts with the smaller distance.
      block: see `fold_pairs`.
    """

    training: Training
    mirror: Mirror | None
    block: int

    def nearest(self, queries: Vectors, k: int) -> Neighbours:
        """Returns the k nearest training images of each query, each image once.

        They are found by float32 products on the device; their distances are then computed in
        float64 as sums of squared differences, so that equal images have the distance 0.
        """
        variants = [queries] if self.mirror is None else [queries, self.mirror(queries)]
        indices = [self._candidates(variant, k) for variant in variants]
        index = np.concatenate(indices, axis=1)
        distance = np.concatenate(
            [_distances(v, self.training, i) for v, i in zip(variants, indices, strict=True)],
            axis=1,
        )
        mirrored = np.repeat([False, True][: len(variants)], [i.shape[1] for i in indices])
        mirrored = np.broadcast_to(mirrored, index.shape)
        order = np.argsort(distance, axis=1, kind='stable')
        index, distance, mirrored = (
            np.take_along_axis(x, order, 1) for x in (index, distance, mirrored)
        )
        # An image that was found both plain and mirrored stays where it is nearer.
        earlier = np.tril(np.ones((index.shape[1],) * 2, bool), -1)
        again = ((index[:, :, None] == index[:, None]) & earlier).any(2)
        order = np.argsort(again, axis=1, kind='stable')[:, : min(k, len(self.training))]
        return Neighbours(*(np.take_along_axis(x, order, 1) for x in (index, distance, mirrored)))

    def ratio(
        self, neighbours: Neighbours, query: Int[np.ndarray, ' n']
    ) -> Float[np.ndarray, ' n']:
        """Returns d(x, y) / s(y) for the nearest y of each x.

        Args:
          neighbours: those of x, y first.
          query: index of x if it is itself a training image, which s(y) then leaves out; otherwise
            −1.
        """
        image, distance = neighbours.image[:, 0], neighbours.distance[:, 0]
        rows, inverse = np.unique(image, return_inverse=True)
        around = self.nearest(self.training[rows], NEIGHBOUR + 2)
        around = Neighbours(*(x[inverse] for x in around))
        spacing = _without(_without(around, image), query).distance[:, NEIGHBOUR - 1]
        return np.where(distance == 0, 0.0, distance / np.maximum(spacing, np.finfo(float).tiny))

    def _candidates(self, queries: Vectors, k: int) -> Int[np.ndarray, 'n candidates']:
        """Returns the indices of the k nearest training images by float32 distances."""
        training = self.training
        rows = max(CHUNK_BYTES // (4 * training.shape[1]), k)
        # Products of centred vectors have smaller rounding errors.
        centre = np.float32(127.5) if training.dtype == np.uint8 else training.mean(axis=0)
        floats = queries - centre
        best, numbers = [], []
        for first in range(0, len(training), rows):
            chunk = training[first : first + rows] - centre
            initial = _far(min(k, len(chunk)))
            squared, index = fold_pairs(_keep, initial, floats, chunk, block=self.block)
            best.append(squared)
            numbers.append(index.astype(np.int64) + first)
        order = np.argsort(np.concatenate(best, axis=1), axis=1, kind='stable')[:, :k]
        return np.take_along_axis(np.concatenate(numbers, axis=1), order, 1)


def _without(neighbours: Neighbours, image: Int[np.ndarray, ' n']) -> Neighbours:
    """Drops one neighbour of each query: this image, or the farthest if it is not among them."""
    absent = ~(neighbours.image == image[:, None]).any(1)
    drop = neighbours.image == image[:, None]
    drop[absent, -1] = True
    n, k = drop.shape
    return Neighbours(*(x[~drop].reshape(n, k - 1) for x in neighbours))


def _distances(
    queries: Vectors, training: Training, index: Int[np.ndarray, 'n k']
) -> Float[np.ndarray, 'n k']:
    distance = np.empty(index.shape, np.float64)
    scale = 255 if queries.dtype == np.uint8 else 1
    for row, query in enumerate(queries):
        difference = training[index[row]].astype(np.float64) - query.astype(np.float64)
        distance[row] = np.sqrt(np.square(difference).sum(1)) / scale
    return distance


@functools.cache
def _far(k: int) -> Callable[[int], tuple[Array, Array]]:
    """Returns a function rows -> initial state of `_keep`; cached, so that each k compiles once."""

    def initial(rows: int) -> tuple[Array, Array]:
        return jnp.full((rows, k), jnp.inf, jnp.float32), jnp.zeros((rows, k), jnp.int32)

    return initial


def _keep(state: tuple[Array, Array], pairs: Pairs) -> tuple[Array, Array]:
    """Keeps the k smallest squared distances, ascending, and the indices of their columns."""
    squared = jnp.where(pairs.exist, pairs.squared_distances, jnp.inf)
    best, index = state
    best, place = lax.top_k(-jnp.concatenate([best, squared], axis=1), best.shape[1])
    numbers = jnp.broadcast_to(pairs.column_numbers[None], squared.shape)
    index = jnp.concatenate([index, numbers], axis=1)
    return -best, jnp.take_along_axis(index, place, axis=1)
