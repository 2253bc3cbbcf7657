"""How well a classifier of noisy images does on held-out and on training images, by noise level.

The timesteps are divided into four quarters, from the least noise to the most. Each image is
measured once in each, with the same noise every time, so only the weights change between
measurements.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from jaxunet.config import Config
from jaxunet.data.pipeline import load_all
from jaxunet.data.source import Source, Subset
from jaxunet.diffusion.process import make_diffusion, q_sample
from jaxunet.model.noisy_classifier import NoisyClassifier, log_probability
from jaxunet.model.unet import Params
from jaxunet.training.batch import normalise
from jaxunet.training.held_out import BANDS, MAX_IMAGES, fixed_noise

FIELDS = ('loss', 'accuracy', 'accuracy_of_5')
KINDS = ('held_out', 'seen')  # images that are not trained on, and as many training images
COLUMNS = tuple(
    f'{kind}_{field}_{band + 1}' for kind in KINDS for field in FIELDS for band in range(BANDS)
)


class Scores(NamedTuple):
    """Means over images by quarter of the timesteps.

    Fields:
      loss: −log p(label).
      accuracy: share of images whose class has the largest logit.
      accuracy_of_5: share of images whose class has one of the five largest.
    """

    loss: Float[np.ndarray, ' bands']
    accuracy: Float[np.ndarray, ' bands']
    accuracy_of_5: Float[np.ndarray, ' bands']


class Accuracy:
    """Measures a classifier on one device.

    Args:
      source: the training images, with `held_out` images.
      device: of this process.

    Raises:
      ValueError: the source holds no images out.
      UserError: an image is corrupt.
    """

    def __init__(
        self, config: Config, network: NoisyClassifier, source: Source, device: jax.Device
    ) -> None:
        if source.held_out is None:
            raise ValueError(f'{source.name} holds no images out')
        self._network, self._device = network, device
        self._diffusion = make_diffusion(config.diffusion)
        self._program = jax.jit(self._scores)
        devices = config.parallel.devices or jax.device_count()
        self._rows = config.data.batch_size // config.optimizer.accumulate_steps // devices
        sources = (source.held_out, source)
        count = min(MAX_IMAGES, *map(len, sources))
        self._images = [
            load_all(Subset(s, np.arange(count) * len(s) // count), progress=False) for s in sources
        ]

    def measure(self, params: Params) -> dict[str, Scores]:
        """Returns the scores by `KINDS` of these weights."""
        placed = jax.device_put(params, self._device)
        count = len(self._images[0][0])
        number, band = (x.reshape(-1) for x in np.indices((count, BANDS)))
        # Images spread evenly over the timesteps of a band.
        t = ((band + (number + 0.5) / count) * self._diffusion.steps / BANDS).astype(np.int32)
        found = {}
        for kind, (images, labels) in zip(KINDS, self._images, strict=True):
            parts = []
            for first in range(0, len(t), self._rows):
                # The last batch is filled up with its last image, so that it compiles no new shape.
                rows = np.minimum(np.arange(first, first + self._rows), len(t) - 1)
                batch = (images[number[rows]], labels[number[rows]], t[rows], rows.astype(np.int32))
                parts.append(self._program(placed, *jax.device_put(batch, self._device)))
            scores = np.concatenate([np.asarray(part) for part in parts], axis=1)[:, : len(t)]
            means = scores.astype(np.float64).reshape(len(FIELDS), count, BANDS).mean(axis=1)
            found[kind] = Scores(*means)
        return found

    def _scores(
        self,
        params: Params,
        images: UInt8[Array, 'batch height width channels'],
        labels: Int[Array, ' batch'],
        t: Int[Array, ' batch'],
        number: Int[Array, ' batch'],
    ) -> Float[Array, 'fields batch']:
        noise = fixed_noise(number, images.shape[1:])
        xt = q_sample(self._diffusion, normalise(images), t, noise)
        logits = self._network.predict(params, xt, t)
        own = jnp.take_along_axis(logits, labels[:, None], axis=1)
        above = jnp.sum(logits > own, axis=1)
        right, among_5 = (above < 1).astype(jnp.float32), (above < 5).astype(jnp.float32)
        return jnp.stack([-log_probability(logits, labels), right, among_5])


def columns(scores: dict[str, Scores]) -> dict[str, float]:
    """Returns the scores by the names `COLUMNS`."""
    return {
        f'{kind}_{field}_{band + 1}': float(value)
        for kind, found in scores.items()
        for field, values in found._asdict().items()
        for band, value in enumerate(values)
    }


def sentence(scores: Scores) -> str:
    """Returns the accuracies for a log line."""
    first, five = (
        ', '.join(f'{share:.1%}' for share in shares)
        for shares in (scores.accuracy, scores.accuracy_of_5)
    )
    return f'held-out accuracy by quarter of t {first}; class among the first five {five}'
