"""Conditions of the samples that a run draws: classes, and small images to enlarge."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt

from jaxunet.config import Config
from jaxunet.data.images import plain_colours, to_pixels
from jaxunet.data.source import Source
from jaxunet.model.low_res import enlarged, low_res_of
from jaxunet.training.batch import normalise

Pixels = UInt[np.ndarray, 'n height width channels']
SmallPixels = UInt[np.ndarray, 'n low_height low_width channels']


class Conditions(NamedTuple):
    """The conditions of n samples.

    Fields:
      labels: their classes; None for an unconditional model.
      low_res: small images that a super-resolution network enlarges; None for other networks.
      originals: the images that `low_res` was made from; None without it.
    """

    labels: Int[np.ndarray, ' n'] | None
    low_res: SmallPixels | None = None
    originals: Pixels | None = None


class SampleConditions:
    """Chooses the conditions of the samples that a run draws while it trains.

    The classes take turns. A super-resolution network instead enlarges images at equal intervals of
    the held-out images (of the training images if none are held out), and each sample has the class
    of its image. With fewer images than samples, several samples share an image.

    Args:
      source: the training images; only a super-resolution network needs them.
      samples: number of samples.
    """

    def __init__(self, config: Config, source: Source | None, samples: int) -> None:
        self._config, self._samples = config, samples
        self._source = None if source is None else source.held_out or source

    def load(self, indices: Int[np.ndarray, ' n']) -> Conditions:
        """Returns the conditions of the samples with these numbers.

        Raises:
          UserError: an image is corrupt.
        """
        if not self._config.model.low_res_size:
            classes = self._config.model.num_classes
            return Conditions(indices % classes if classes else None)
        source = self._source
        assert source is not None
        rows = indices.astype(np.int64) * len(source) // self._samples
        originals = source.load(rows)
        low_res = low_res_of(self._config, normalise(jnp.asarray(originals)))
        assert low_res is not None  # the model has low_res_size
        return Conditions(
            source.labels[rows].astype(np.int32), to_pixels(low_res, originals.dtype), originals
        )


def side_by_side(
    low_res: SmallPixels, samples: Pixels, originals: Pixels, *, keeps: bool = False
) -> UInt[np.ndarray, 'tiles height width channels']:
    """Returns three tiles per sample: the enlarged picture, the sample and the original image.

    Args:
      keeps: images have opacity; the samples have plain colours, the others do not.
    """
    seen = to_pixels(enlarged(normalise(jnp.asarray(low_res)), samples.shape), samples.dtype)
    if keeps:
        seen, originals = plain_colours(seen), plain_colours(originals)
    return np.stack([seen, samples, originals], axis=1).reshape(-1, *samples.shape[1:])
