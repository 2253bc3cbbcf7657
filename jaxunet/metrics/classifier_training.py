"""Trains the classifier of `jaxunet.metrics.classifier`: the data whole on one device, an epoch a call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxunet.data.order import batch_indices
from jaxunet.errors import UserError
from jaxunet.metrics.classifier import Architecture, Parameters, Statistics, apply, init, normalise

STATISTICS_DECAY = 0.9  # of the running mean and variance of the batch normalization
EVALUATION_BATCH = 1000
Say = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """How to train. The defaults reach about 94% on CIFAR-10.

    Fields:
      epochs: passes over the training images.
      seconds: instead of `epochs`: as many as fit, by the time that one takes; 0 = `epochs` decides.
      learning_rate: its peak, for batches of 512; it rises to that in the first fifth, and falls to 0 in straight lines. It is scaled by
        batch_size/512.
      weight_decay: L2, added to the gradient before the momentum.
      flip: images are mirrored at random.
      crop, cutout: share of the side by which crops move at random, and of the side of the square that is blanked.
      dtype: of products and activations; '' = bfloat16 on GPUs, else float32.
    """

    epochs: int = 50
    seconds: float = 0.0
    batch_size: int = 512
    learning_rate: float = 0.4
    weight_decay: float = 5e-4
    momentum: float = 0.9
    label_smoothing: float = 0.1
    flip: bool = True
    crop: float = 0.125
    cutout: float = 0.25
    seed: int = 0
    dtype: str = ''


class Images(NamedTuple):
    """One set, on the host."""

    images: UInt8[np.ndarray, 'images height width 3']
    labels: Int[np.ndarray, ' images']


class Trained(NamedTuple):
    architecture: Architecture
    params: Parameters
    statistics: Statistics
    feature_scale: Float[np.ndarray, ' d']
    accuracy: float  # on the test images, 0 to 1
    epochs: int
    seconds: float  # of training, without compiling


class _State(NamedTuple):
    params: Parameters
    statistics: Statistics
    optimizer: Any


def train(train_set: Images, test_set: Images, channels: int, recipe: Recipe, say: Say = print) -> Trained:
    """Trains on the default device.

    Args:
      channels: width of the network (`Architecture.channels`).

    Raises:
      UserError: fewer images than a batch, or a loss that is not finite.
    """
    count = len(train_set.images)
    size = min(recipe.batch_size, count)
    architecture = _architecture(train_set, channels)
    steps = count // size
    dtype = recipe.dtype or ('bfloat16' if jax.default_backend() == 'gpu' else 'float32')
    images, labels = jnp.asarray(train_set.images), jnp.asarray(train_set.labels, jnp.int32)
    # The peak's learning rate is a part of the update, so that the schedule needs no state of its own.
    optimizer = optax.sgd(1.0, momentum=recipe.momentum, nesterov=True)

    def start() -> _State:
        params, statistics = init(architecture, jax.random.key(recipe.seed))
        return _State(params, statistics, optimizer.init(params))

    def loss_fn(params: Parameters, x: Array, label: Array) -> tuple[Array, tuple[Array, Statistics]]:
        scores, _, used = apply(architecture, params, x, None, dtype=jnp.dtype(dtype))
        target = optax.smooth_labels(jax.nn.one_hot(label, architecture.classes, dtype=jnp.float32), recipe.label_smoothing)
        correct = jnp.mean((jnp.argmax(scores, axis=1) == label).astype(jnp.float32))
        return jnp.mean(optax.softmax_cross_entropy(scores, target)), (correct, used)

    def step(carry: tuple[_State, Array, Array], _: None) -> tuple[tuple[_State, Array, Array], tuple[Array, Array]]:
        state, number, total = carry
        rows = batch_indices(number, size, count, recipe.seed)
        x = augment(normalise(architecture, images[rows]), jax.random.fold_in(jax.random.key(recipe.seed + 1), number), recipe)
        grads, (correct, used) = jax.grad(loss_fn, has_aux=True)(state.params, x, labels[rows])
        loss = loss_fn_value(correct)
        rate = recipe.learning_rate * size / 512 * one_cycle((number + 1).astype(jnp.float32) / total.astype(jnp.float32))
        grads = jax.tree.map(lambda g, p: g + recipe.weight_decay * p, grads, state.params)
        updates, new_optimizer = optimizer.update(grads, state.optimizer)
        params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
        decay = STATISTICS_DECAY
        statistics = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state.statistics, used)
        return (_State(params, statistics, new_optimizer), number + 1, total), (loss, correct)

    raise NotImplementedError
