"""Accuracy of a classifier of noisy images on held-out and training images, by noise level.

`jaxunet.training.bands` chooses the images and their noise; its four bands are quarters of the
timesteps.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxunet.config import Config
from jaxunet.data.source import Source
from jaxunet.diffusion.process import make_diffusion, q_sample
from jaxunet.model.noisy_classifier import NoisyClassifier, log_probability
from jaxunet.model.unet import Params
from jaxunet.training.bands import BANDS, BandBatch, BandImages, fixed_noise
from jaxunet.training.batch import normalise

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
        self._network, self._device = network, device
        self._diffusion = make_diffusion(config.diffusion)
        self._program = jax.jit(self._scores)
        self._images = BandImages(
            config, source, self._diffusion.steps, devices=1, placement=device
        )
        self._images.load()

    def measure(self, params: Params) -> dict[str, Scores]:
        """Returns the scores by `KINDS` of these weights."""
        placed = jax.device_put(params, self._device)
        results = self._images.measure(lambda batch: self._program(placed, batch))
        return {kind: Scores(*means) for kind, means in zip(KINDS, results, strict=True)}

    def _scores(self, params: Params, batch: BandBatch) -> Float[Array, 'fields batch']:
        noise = fixed_noise(batch.noise_number, batch.images.shape[1:])
        xt = q_sample(self._diffusion, normalise(batch.images), batch.t, noise)
        logits = self._network.predict(params, xt, batch.t)
        own = jnp.take_along_axis(logits, batch.labels[:, None], axis=1)
        above = jnp.sum(logits > own, axis=1)
        right, among_5 = (above < 1).astype(jnp.float32), (above < 5).astype(jnp.float32)
        return jnp.stack([-log_probability(logits, batch.labels), right, among_5])


def columns(scores: dict[str, Scores]) -> dict[str, float]:
    """Returns the scores by the names `COLUMNS`."""
    return {
        f'{kind}_{field}_{band + 1}': float(value)
        for kind, by_level in scores.items()
        for field, values in by_level._asdict().items()
        for band, value in enumerate(values)
    }


def sentence(scores: Scores) -> str:
    """Returns the accuracies for a log line."""
    first, five = (
        ', '.join(f'{share:.1%}' for share in shares)
        for shares in (scores.accuracy, scores.accuracy_of_5)
    )
    return f'held-out accuracy by quarter of t {first}; class among the first five {five}'
