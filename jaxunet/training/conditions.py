"""Conditions of the samples that a run draws: classes, and pictures that the network sees."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt

from jaxunet.config import Config
from jaxunet.data.images import plain_colours, to_pixels
from jaxunet.data.pairs import with_pictures
from jaxunet.data.source import Source
from jaxunet.model.low_res import enlarged, low_res_of
from jaxunet.runtime.errors import UserError
from jaxunet.training.batch import normalise

Pixels = UInt[np.ndarray, 'n height width channels']
SmallPixels = UInt[np.ndarray, 'n low_height low_width low_channels']


class Conditions(NamedTuple):
    """The conditions of n samples.

    Fields:
      labels: their classes; None for an unconditional model.
      low_res: pictures, such as small images to enlarge; None for a network that sees none.
      originals: the images that `low_res` belong to; None without it.
    """

    labels: Int[np.ndarray, ' n'] | None
    low_res: SmallPixels | None = None
    originals: Pixels | None = None


class SampleConditions:
    """Chooses the conditions of the samples that a run draws while it trains.

    The classes take turns. A network that sees pictures instead gets those of images at equal
    intervals of the held-out images (of the training images if none are held out), and each sample
    has the class of its image. With fewer images than samples, several samples share an image.

    Args:
      source: the training images; only a network that sees pictures needs them.
      samples: number of samples.

    Raises:
      UserError: the images lack the pictures of their own that the network sees.
    """

    def __init__(self, config: Config, source: Source | None, samples: int) -> None:
        self._config, self._samples = config, samples
        self._source = None if source is None else with_pictures(source.held_out or source)
        if config.picture_path and source is not None and source.pictures is None:
            raise UserError(
                f'data.condition: the network draws from the pictures of images, and {source.name} '
                'has none; give images with pictures beside them'
            )

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
        loaded = source.load(rows)
        low_res = low_res_of(self._config, normalise(jnp.asarray(loaded)))
        originals = loaded[..., : self._config.model.image_channels]
        assert low_res is not None  # the model has low_res_size
        return Conditions(
            source.labels[rows].astype(np.int32), to_pixels(low_res, originals.dtype), originals
        )


def side_by_side(
    low_res: SmallPixels, samples: Pixels, originals: Pixels, *, keeps: bool = False
) -> UInt[np.ndarray, 'tiles height width channels']:
    """Returns three tiles per sample: the enlarged picture, the sample and the original image.

    Grey ones become RGB beside others; of pictures with unusual channels, the first is shown.

    Args:
      keeps: images have opacity; the samples have plain colours, the others do not.
    """
    seen = to_pixels(enlarged(normalise(jnp.asarray(low_res)), samples.shape), samples.dtype)
    if keeps:
        seen = plain_colours(seen) if seen.shape[-1] == 4 else seen
        originals = plain_colours(originals)
    seen = seen if seen.shape[-1] in ((1, 3, 4) if keeps else (1, 3)) else seen[..., :1]
    tiles = [seen, samples, originals]
    channels = max(each.shape[-1] for each in tiles)
    tiles = [_with_channels(each, channels) for each in tiles]
    return np.stack(tiles, axis=1).reshape(-1, *tiles[0].shape[1:])


def _with_channels(
    pixels: Pixels, channels: int
) -> UInt[np.ndarray, 'n height width more_channels']:
    """Returns grey, RGB or RGBA pixels with as many channels, or more of these."""
    if pixels.shape[-1] == channels:
        return pixels
    colours = np.repeat(pixels, 3, axis=-1) if pixels.shape[-1] == 1 else pixels
    opaque = np.full_like(colours[..., :1], np.iinfo(pixels.dtype).max)
    return colours if channels == 3 else np.concatenate([colours, opaque], axis=-1)
