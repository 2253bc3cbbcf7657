"""Recipe that trains the classifier of `jaxunet.metrics.classifier`."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

PEAK = 0.2  # the learning rate peaks after this share of the steps


@dataclass(frozen=True)
class Recipe:
    """Training options.

    Fields:
      epochs: passes over the training images.
      seconds: train for as many epochs as fit in this time instead; 0 = `epochs` decides.
      batch_size: images per step.
      learning_rate: peak of `one_cycle` for batches of 512; scaled by batch_size / 512.
      weight_decay: L2 penalty, added to the gradient before the momentum.
      momentum: momentum of SGD with Nesterov's update.
      label_smoothing: share of each target spread over all classes.
      flip: mirror images at random.
      crop: largest random shift, as a share of the image's side.
      cutout: side of the blank square, as a share of the image's side.
      cutmix: probability that a batch goes through `mix`.
      seed: for the initial weights, the order of the images and the augmentation.
      dtype: type of products and activations; '' = bfloat16 on GPUs, float32 elsewhere.
    """

    epochs: int = 300
    seconds: float = 0.0
    batch_size: int = 512
    learning_rate: float = 0.4
    weight_decay: float = 5e-4
    momentum: float = 0.9
    label_smoothing: float = 0.1
    flip: bool = True
    crop: float = 0.125
    cutout: float = 0.25
    cutmix: float = 0.5
    seed: int = 0
    dtype: str = ''


def one_cycle(share: Float[Array, '']) -> Float[Array, '']:
    """Returns the learning rate as a share of its peak, after this share of the steps.

    It rises linearly to 1 in the first fifth and falls linearly to 0.
    """
    return jnp.minimum(share / PEAK, (1 - share) / (1 - PEAK))
