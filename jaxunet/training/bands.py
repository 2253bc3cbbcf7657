"""Measures a network in training on held-out and on training images, by noise level.

The T timesteps (or, for objectives without timesteps, T slices of equal probability) are divided
into `BANDS` bands of equal width, from the least noise to the most. Each image is measured once in
every band, with the same noise every time, so only the weights change between measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int, Key, UInt

from jaxunet.config import Config
from jaxunet.data.pipeline import load_all
from jaxunet.data.source import Source, Subset

BANDS = 4
MAX_IMAGES = 1024  # of each kind; larger sets are thinned out at equal intervals
SEED = 0x10E5  # of the noise; the same in every run, whatever its seed


class BandBatch(NamedTuple):
    """The inputs of one call of a measuring program, on its devices.

    Fields:
      noise_number: identifies the noise of each image; see `fixed_noise`.
    """

    images: UInt[Array, 'batch height width channels']
    labels: Int[Array, ' batch']
    t: Int[Array, ' batch']
    noise_number: Int[Array, ' batch']


class BandImages:
    """Held-out images and as many training images, each at one timestep in every band.

    Args:
      source: the training images, with `held_out` images.
      steps: number of timesteps, T.
      devices: number of devices that share a batch. Each gets as many images as in a training step.
      placement: puts the batches on these devices.

    Raises:
      ValueError: the source holds no images out.
    """

    def __init__(
        self,
        config: Config,
        source: Source,
        steps: int,
        *,
        devices: int,
        placement: jax.Device | jax.sharding.Sharding,
    ) -> None:
        if source.held_out is None:
            raise ValueError(f'{source.name} holds no images out')
        self._sources, self._placement = (source.held_out, source), placement
        count = min(MAX_IMAGES, *map(len, self._sources))
        self._image, self._band = (x.reshape(-1) for x in np.indices((count, BANDS)))
        # The images spread evenly over the timesteps of a band.
        place = self._band + (self._image + 0.5) / count
        self._t = (place * steps / BANDS).astype(np.int32)
        micro_batch = config.data.batch_size // config.optimizer.accumulate_steps
        per_device = micro_batch // (config.parallel.devices or jax.device_count())
        self._batch_size = max(per_device, 1) * devices
        self._loaded: list[tuple[np.ndarray, np.ndarray]] = []

    def load(self) -> None:
        """Loads the images.

        Raises:
          UserError: an image is corrupt.
        """
        count = len(self._t) // BANDS
        self._loaded = [
            load_all(Subset(source, np.arange(count) * len(source) // count), progress=False)
            for source in self._sources
        ]

    def first_batch(self) -> BandBatch:
        """Returns the first batch of held-out images, whose shapes all batches have."""
        images, labels = self._loaded[0]
        return self._batch(images, labels, first=0)

    def measure(
        self, program: Callable[[BandBatch], Float[Array, '*values batch']]
    ) -> list[Float64[np.ndarray, '*values bands']]:
        """Returns the means of a program's values over the images in each band.

        There are two results: of the held-out images and of the training images.

        Args:
          program: returns one value, or several, for each image of a batch.
        """
        means = []
        for images, labels in self._loaded:
            starts = range(0, len(self._t), self._batch_size)
            # All calls are queued before the first result is read.
            results = [program(self._batch(images, labels, first)) for first in starts]
            values = np.concatenate([np.asarray(result) for result in results], axis=-1)
            values = values[..., : len(self._t)].astype(np.float64)
            means.append(values.reshape(*values.shape[:-1], -1, BANDS).mean(axis=-2))
        return means

    def _batch(self, images: np.ndarray, labels: np.ndarray, first: int) -> BandBatch:
        """Returns a batch; the last one is filled up with its last image, to keep its shape."""
        rows = np.minimum(np.arange(first, first + self._batch_size), len(self._t) - 1)
        chosen = self._image[rows]
        arrays = (
            images[chosen],
            labels[chosen].astype(np.int32),
            self._t[rows],
            rows.astype(np.int32),
        )
        return BandBatch(*jax.device_put(arrays, self._placement))


def fixed_noise(
    numbers: Int[Array, ' batch'], shape: tuple[int, ...]
) -> Float[Array, 'batch height width channels']:
    """Returns noise of one image's shape for every number, the same for equal numbers."""

    def noise_of(number: Array) -> Array:
        key: Key[Array, ''] = jax.random.fold_in(jax.random.key(SEED), number)
        return jax.random.normal(key, shape, jnp.float32)

    return jax.vmap(noise_of)(numbers)
