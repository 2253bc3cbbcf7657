"""A file with an untrained feature network, for tests of code that uses such a file."""

import pathlib

import jax
import numpy as np

from jaxunet.metrics.classifier import Architecture, init, to_arrays


def write_untrained(folder: pathlib.Path, scale: float = 1.0, side: int = 8) -> pathlib.Path:
    """Writes the file of a classifier with random weights; returns its path.

    Args:
      scale: factor of its features.
      side: of its images, in pixels.
    """
    architecture = Architecture(side, side, 2, 10, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    params, statistics = init(architecture, jax.random.key(0))
    path = folder / 'random.npz'
    training = {'reference': 'nothing', 'test_accuracy': 0.1}
    scales = np.full(sum(architecture.stages), scale)
    arrays = to_arrays(architecture, params, statistics, scales, training)
    np.savez(path, jaxunet_features=np.array('classifier'), **arrays)
    return path
