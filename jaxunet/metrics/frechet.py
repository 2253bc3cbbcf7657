"""Fréchet distance between Gaussians fitted to features, and files of their statistics.

Source: Heusel et al. 2017 (arXiv 1706.08500). The file format is that of mseitzer/pytorch-fid:
`.npz` with `mu` (d,) and `sigma` (d, d). ADM's reference batches (openai/guided-diffusion,
`evaluations/`) also have `mu_s` and `sigma_s`, of spatial features, and images as `arr_0`. All
arithmetic is float64.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxunet.metrics.arrays import array_names, read_arrays, text_of
from jaxunet.runtime.errors import UserError, listed
from jaxunet.runtime.untrusted import parse_json, shown
from jaxunet.runtime.whole_files import written

POOLED = ('mu', 'sigma')
SPATIAL = ('mu_s', 'sigma_s')
IMAGES = ('images', 'arr_0')  # names of arrays of images in a file of statistics
PROTOCOL = 'jaxunet_protocol'  # our extra entry: the origin of the numbers, as JSON
LARGEST = 1e100  # largest number accepted from a file; products must not overflow

Vector = Float[np.ndarray, ' d']
Matrix = Float[np.ndarray, 'd d']


@dataclass(frozen=True)
class Statistics:
    """Mean and covariance of features.

    Fields:
      mu: float64 (d,).
      sigma: float64 (d, d), divided by n − 1.
      protocol: origin of the numbers, where known: images, count, size, features.
      arrays: names of the arrays that they were read from; () = computed from images.
    """

    mu: Vector
    sigma: Matrix
    protocol: dict[str, object]
    arrays: tuple[str, ...] = ()


class Moments:
    """Accumulates mean and covariance over batches of features, in float64.

    Each batch is centred on its own mean before it is merged (Chan, Golub & LeVeque 1979), which
    avoids cancellation.
    """

    def __init__(self, dimension: int) -> None:
        self.count = 0
        self._mean = np.zeros(dimension)
        self._scatter = np.zeros((dimension, dimension))

    def add(self, features: Float[np.ndarray, 'n d']) -> None:
        """Adds a batch of features."""
        batch = features.astype(np.float64)
        if len(batch) == 0:
            return
        mean = batch.mean(axis=0)
        centred = batch - mean[None]
        delta = mean - self._mean
        total = self.count + len(batch)
        self._scatter += centred.T @ centred
        self._scatter += np.outer(delta, delta * (self.count * len(batch) / total))
        self._mean = self._mean + delta * (len(batch) / total)
        self.count = total

    def statistics(self, protocol: dict[str, object] | None = None) -> Statistics:
        """Returns the statistics of everything added so far.

        Raises:
          UserError: fewer than two images, or features that are not finite.
        """
        if self.count < 2:
            raise UserError(f'a covariance needs 2 images or more, found {self.count}')
        if not (np.isfinite(self._mean).all() and np.isfinite(self._scatter).all()):
            raise UserError('the features are not finite; the feature network is damaged')
        return Statistics(self._mean, self._scatter / (self.count - 1), protocol or {})


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """Returns |μa − μb|² + tr(Σa) + tr(Σb) − 2 tr((Σa Σb)^½), at least 0.

    With Σ = F Fᵀ from a symmetric eigendecomposition, tr((Σa Σb)^½) = tr((Σa^½ Σb Σa^½)^½) is the
    sum of the singular values of Faᵀ Fb. No complex numbers arise, and singular covariances need
    no offset. Rounding errors enter the result directly; with the eigenvalues of Σa Σb, the square
    roots of these errors would.

    Raises:
      UserError: statistics of different dimensions.
    """
    if a.mu.shape != b.mu.shape:
        raise UserError(
            f'expected statistics of one dimension, found {len(a.mu)} and {len(b.mu)}; '
            'they come from different features'
        )
    delta = a.mu - b.mu
    product = _factor(a.sigma).T @ _factor(b.sigma)
    overlap = np.linalg.svd(product, compute_uv=False).sum() if product.size else 0.0
    return max(0.0, float(delta @ delta + np.trace(a.sigma) + np.trace(b.sigma) - 2 * overlap))


def _factor(sigma: Matrix) -> Float[np.ndarray, 'd rank']:
    """Returns F with Σ = F Fᵀ: eigenvectors times the roots of the eigenvalues that are not 0."""
    values, vectors = np.linalg.eigh((sigma + sigma.T) / 2)
    # Eigenvalues below this are rounding errors of the largest one.
    keep = values > max(values[-1], 0.0) * len(values) * np.finfo(np.float64).eps
    return vectors[:, keep] * np.sqrt(values[keep])[None]


def save_statistics(
    path: str | os.PathLike[str], statistics: Statistics, spatial: Statistics | None = None
) -> None:
    """Writes an `.npz` that pytorch-fid can read, whole or not at all.

    Args:
      spatial: statistics of the spatial features, which ADM's files have, too.

    Raises:
      UserError: the file cannot be written.
    """
    more: dict[str, Any] = {}
    if spatial:
        more = dict(zip(SPATIAL, (spatial.mu, spatial.sigma), strict=True))
    with written(path) as partial, partial.open('wb') as file:
        np.savez(
            file,
            mu=statistics.mu,
            sigma=statistics.sigma,
            jaxunet_protocol=np.array(json.dumps(statistics.protocol)),
            **more,
        )


def is_statistics(path: Path) -> bool:
    """Returns True if an .npz holds statistics and no images.

    Raises:
      UserError: not a readable .npz.
    """
    return has_statistics(path) and not set(array_names(path)) & set(IMAGES)


def has_statistics(path: Path, names: tuple[str, str] = POOLED) -> bool:
    """Returns True if an .npz holds statistics by these names, with or without images.

    Raises:
      UserError: not a readable .npz.
    """
    return set(names) <= set(array_names(path))


def load_statistics(path: Path, names: tuple[str, str] = POOLED) -> Statistics:
    """Reads statistics that this module, pytorch-fid, the original TensorFlow code or ADM wrote.

    Args:
      names: of the mean and the covariance in the file.

    Raises:
      UserError: an array is missing, has a wrong shape or is not finite, or sigma is not a
        covariance.
    """
    arrays = read_arrays(path, (*names, PROTOCOL))
    if missing := [name for name in names if name not in arrays]:
        raise UserError(
            f'{path}: expected arrays {" and ".join(names)}, {missing[0]} is missing; '
            f'found {listed(array_names(path)) or "none"}'
        )
    for name in names:
        if arrays[name].dtype.kind not in 'iuf':
            raise UserError(
                f'{path}: {name}: expected numbers, found {arrays[name].dtype}; '
                'make the statistics again'
            )
    with np.errstate(over='ignore'):
        mu, sigma = (arrays[name].astype(np.float64) for name in names)
    if mu.ndim != 1 or not mu.size or sigma.shape != (len(mu), len(mu)):
        raise UserError(
            f'{path}: expected {names[0]} (d,) and {names[1]} (d, d) with d of 1 or more, '
            f'found {shown(mu.shape)} and {shown(sigma.shape)}'
        )
    if not (np.isfinite(mu).all() and np.isfinite(sigma).all()):
        raise UserError(
            f'{path}: expected finite numbers, found NaN or infinity; make the statistics again'
        )
    scale = float(np.abs(sigma).max())
    if (largest := max(scale, float(np.abs(mu).max()))) > LARGEST:
        raise UserError(
            f'{path}: expected numbers of at most {LARGEST:g}, found {largest:g}; '
            'make the statistics again'
        )
    if np.abs(sigma - sigma.T).max() > 1e-6 * scale or np.diagonal(sigma).min() < -1e-6 * scale:
        raise UserError(
            f'{path}: {names[1]}: expected a covariance, '
            'found a matrix that is not symmetric or has negative variances'
        )
    protocol: dict[str, object] = {}
    if PROTOCOL in arrays:
        text = text_of(path, PROTOCOL, arrays)
        protocol = parse_json(text, f'{path}: {PROTOCOL}', advice='make the statistics again')
    return Statistics(mu, sigma, protocol, names)
