"""Arithmetic on sets of time intervals: arrays (n, 2) of starts and ends."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

Intervals = Float[np.ndarray, '_ 2']


def union(spans: Intervals) -> Intervals:
    """Returns disjoint intervals, in order, that cover the same time; empty ones are dropped."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    if len(spans) == 0:
        return spans
    spans = spans[np.argsort(spans[:, 0], kind='stable')]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([spans[first, 0], reach[last]], axis=1)


def length(spans: Intervals) -> float:
    """Returns the time that the intervals cover together, in their unit."""
    joined = union(spans)
    return float(np.sum(joined[:, 1] - joined[:, 0]))


def overlap(a: Intervals, b: Intervals) -> float:
    """Returns the time covered by both an interval of `a` and one of `b`."""
    # |A ∩ B| = |A| + |B| - |A ∪ B|
    return length(a) + length(b) - length(np.concatenate([a, b]))
