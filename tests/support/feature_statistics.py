"""Mean and covariance of features that a test has as an array."""

from __future__ import annotations

import numpy as np

from jaxunet.metrics.frechet import Moments, Statistics


def moments(features: np.ndarray, batch: int = 7) -> Statistics:
    """The statistics of features, added in batches."""
    accumulator = Moments(features.shape[1])
    for start in range(0, len(features), batch):
        accumulator.add(features[start : start + batch])
    return accumulator.statistics()
