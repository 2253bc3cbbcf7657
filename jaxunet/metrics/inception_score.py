"""Inception Score: exp of the mean Kullback-Leibler divergence of p(y|x) from p(y).

Source: Salimans et al. 2016 (arXiv 1606.03498).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from jaxunet.runtime.errors import UserError

SPLITS = 10


def inception_score(
    logits: Float[np.ndarray, 'n classes'], *, splits: int = SPLITS, seed: int = 0
) -> tuple[float, float]:
    """Returns mean and standard deviation over `splits` equal parts of the images, in float64.

    Args:
      splits: number of parts.
      seed: seed of the random assignment of images to parts.

    Raises:
      UserError: fewer images than parts.
    """
    if len(logits) < splits:
        raise UserError(
            f'an Inception Score over {splits} parts needs as many images, found {len(logits)}'
        )
    order = np.random.default_rng(seed).permutation(len(logits))
    scores = []
    for rows in np.array_split(order, splits):
        x = logits[rows].astype(np.float64)
        x = x - x.max(axis=1, keepdims=True)
        log_p = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
        p = np.exp(log_p)
        # The mean is 0 only where every p has underflowed to 0.
        log_mean = np.log(np.maximum(p.mean(axis=0, keepdims=True), np.finfo(np.float64).tiny))
        scores.append(np.exp((p * (log_p - log_mean)).sum(axis=1).mean()))
    return float(np.mean(scores)), float(np.std(scores))
