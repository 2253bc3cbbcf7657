"""Supplies a super-resolution network in training with pictures to enlarge, for its samples."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt8

from jaxunet.config import Config
from jaxunet.data.images import to_uint8
from jaxunet.data.source import Source
from jaxunet.model.low_res import enlarged, low_res_of
from jaxunet.training.batch import normalise

Pixels = UInt8[np.ndarray, 'n height width channels']


class Originals:
    """The held-out images, or the training images if none are held out, and their small versions.

    The images of n samples are spread evenly over the set; if it has fewer, samples share them.

    Args:
      config: of a model with `model.low_res_size`.
      source: the training images.
      samples: number of samples, n.
    """

    def __init__(self, config: Config, source: Source, samples: int) -> None:
        self._config, self._source = config, source.held_out or source
        self._samples = samples

    def load(
        self, indices: Int[np.ndarray, ' n']
    ) -> tuple[Pixels, UInt8[np.ndarray, 'n low_height low_width channels'], Int[np.ndarray, ' n']]:
        """Returns the images of some samples, their small versions, and their labels.

        Raises:
          UserError: an image is corrupt.
        """
        rows = indices.astype(np.int64) * len(self._source) // self._samples
        images = self._source.load(rows)
        small = low_res_of(self._config, normalise(jnp.asarray(images)))
        assert small is not None  # as the model has low_res_size
        return images, to_uint8(small), self._source.labels[rows].astype(np.int32)


def beside(
    small: UInt8[np.ndarray, 'n low_height low_width channels'], samples: Pixels, images: Pixels
) -> UInt8[np.ndarray, 'tiles height width channels']:
    """Returns three tiles per sample: the enlarged picture, the sample and the original image."""
    seen = to_uint8(enlarged(normalise(jnp.asarray(small)), samples.shape))
    return np.stack([seen, samples, images], axis=1).reshape(-1, *samples.shape[1:])
