"""Trains the classifier of `jaxunet.metrics.classifier` on one device.

All images stay on the device; on a GPU, an epoch is one call of a compiled program.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float

from jaxunet.data.order import batch_indices
from jaxunet.metrics.augmentation import augment, mix
from jaxunet.metrics.classifier import (
    Architecture,
    Parameters,
    Statistics,
    apply,
    init,
    normalise,
    rounded,
)
from jaxunet.metrics.classifier_recipe import Recipe, one_cycle
from jaxunet.metrics.labelled_images import Images
from jaxunet.runtime.errors import UserError

STATISTICS_DECAY = 0.9  # decay of the running mean and variance in a step
EVALUATION_BATCH = 1000  # images per call
Say = Callable[[str], None]


class Trained(NamedTuple):
    """A trained classifier.

    Fields:
      params: parameters with the precision of a file (`rounded`).
      statistics: running statistics of the batch normalization.
      feature_scale: factors that bring each stage's features to a mean variance of 1.
      accuracy: accuracy on the test images, 0 to 1.
      mirrored_accuracy: the same with the scores of each image and its mirror image added; NaN if
        training did not mirror images.
      epochs: passes over the training images.
      seconds: training time without compilation.
    """

    architecture: Architecture
    params: Parameters
    statistics: Statistics
    feature_scale: Float[np.ndarray, ' d']
    accuracy: float
    mirrored_accuracy: float
    epochs: int
    seconds: float


class _State(NamedTuple):
    params: Parameters
    statistics: Statistics
    optimizer: optax.OptState


Metrics = tuple[Array, Array]  # loss; share of the batch that is classified correctly
Step = Callable[[_State, Array, Array, Array, Array], tuple[_State, Metrics]]
Epoch = Callable[[_State, int, int], tuple[_State, Metrics]]


def train(
    train_set: Images, test_set: Images, channels: int, recipe: Recipe, say: Say = print
) -> Trained:
    """Trains on the default device; the images must fit in its memory.

    Args:
      channels: width of the network (`Architecture.channels`).
      say: receives lines of progress.

    Raises:
      UserError: the loss is not finite.
    """
    count = len(train_set.images)
    size = min(recipe.batch_size, count)
    steps = count // size
    architecture = _architecture(train_set, channels)
    images, labels = jnp.asarray(train_set.images), jnp.asarray(train_set.labels, jnp.int32)
    # The step applies the learning rate, after the momentum.
    optimizer = optax.sgd(1.0, momentum=recipe.momentum, nesterov=True)
    state = _start(architecture, optimizer, recipe)

    began = time.perf_counter()
    step = _make_step(architecture, optimizer, recipe, size, steps)
    epoch = _compile_epoch(step, steps, (state, images, labels))
    say(
        f'compiled in {time.perf_counter() - began:.1f} s; {count} images, '
        f'batches of {size}, {_dtype(recipe)}'
    )
    epochs = recipe.epochs
    if recipe.seconds:
        epochs = fitting(recipe.seconds, lambda: _means(epoch(state, 0, 1)[1]))
        say(f'{epochs} epochs fit in {recipe.seconds:g} s')
    state, seconds = _run(epoch, state, epochs, recipe, say)
    state = state._replace(params=rounded(state.params))
    accuracy, mirrored = _accuracies(architecture, state, test_set, recipe.flip)
    features = _evaluate(architecture, state, train_set.images)[1]
    scale = _feature_scale(features, architecture)
    return Trained(
        architecture, state.params, state.statistics, scale, accuracy, mirrored, epochs, seconds
    )


def _run(
    epoch: Epoch, state: _State, epochs: int, recipe: Recipe, say: Say
) -> tuple[_State, float]:
    """Trains for `epochs`; returns the final state and the seconds that it took."""
    began = time.perf_counter()
    for number in range(epochs):
        state, metrics = epoch(state, number, epochs)
        loss, correct = _means(metrics)
        if not math.isfinite(loss):
            raise UserError(
                f'the loss is not finite in epoch {number + 1}; '
                f'lower --learning_rate (now {recipe.learning_rate:g})'
            )
        if (number + 1) % max(1, epochs // 10) == 0 or number + 1 == epochs:
            took = time.perf_counter() - began
            say(
                f'epoch {number + 1}/{epochs}: loss {loss:.4f}, '
                f'training accuracy {correct:.4f}, {took:.1f} s'
            )
    return state, time.perf_counter() - began


def _accuracies(
    architecture: Architecture, state: _State, test_set: Images, mirror: bool
) -> tuple[float, float]:
    """Returns `Trained.accuracy` and `Trained.mirrored_accuracy`."""
    scores = _evaluate(architecture, state, test_set.images)[0]
    accuracy = float(np.mean(scores.argmax(axis=1) == test_set.labels))
    if not mirror:
        return accuracy, math.nan
    scores += _evaluate(architecture, state, np.ascontiguousarray(test_set.images[:, :, ::-1]))[0]
    return accuracy, float(np.mean(scores.argmax(axis=1) == test_set.labels))


def _means(metrics: Metrics) -> tuple[float, float]:
    loss, correct = metrics
    return float(jnp.mean(loss)), float(jnp.mean(correct))


def fitting(seconds: float, epoch: Callable[[], object]) -> int:
    """Returns the number of epochs that fit in this time, at least 1.

    Times epochs for half a second, or for a tenth of `seconds` if that is less. The first epoch is
    slower than the others; it counts only if it alone takes a tenth of `seconds`.

    Args:
      epoch: runs one epoch and waits for it.
    """
    began = time.perf_counter()
    epoch()
    count, took = 1, time.perf_counter() - began
    if took < seconds / 10:
        began = time.perf_counter()
        count, took = 0, 0.0
        while took < min(0.5, seconds / 10):
            epoch()
            count, took = count + 1, time.perf_counter() - began
    return max(1, int(seconds * count / took))


def _architecture(train_set: Images, channels: int) -> Architecture:
    height, width = train_set.images.shape[1:3]
    pixels = train_set.images.reshape(-1, 3)
    # Sum in parts: all pixels as float64 would take eight times the memory.
    sums = [
        np.stack([part.sum(axis=0), (part**2).sum(axis=0)])
        for part in (p.astype(np.float64) for p in _parts(pixels, 2**20))
    ]
    mean, square = np.sum(sums, axis=0) / len(pixels) / np.array([[255.0], [255.0**2]])
    deviation = np.maximum(np.sqrt(np.maximum(square - mean**2, 0.0)), 1 / 255)
    classes = int(train_set.labels.max()) + 1
    return Architecture(
        height, width, channels, classes, tuple(mean.tolist()), tuple(deviation.tolist())
    )


def _parts(array: np.ndarray, size: int) -> list[np.ndarray]:
    return [array[i : i + size] for i in range(0, len(array), size)]


def _dtype(recipe: Recipe) -> str:
    return recipe.dtype or ('bfloat16' if jax.default_backend() == 'gpu' else 'float32')


def _start(
    architecture: Architecture, optimizer: optax.GradientTransformation, recipe: Recipe
) -> _State:
    params, statistics = init(architecture, jax.random.key(recipe.seed))
    return _State(params, statistics, optimizer.init(params))


def _make_step(
    architecture: Architecture,
    optimizer: optax.GradientTransformation,
    recipe: Recipe,
    size: int,
    steps: int,
) -> Step:
    """Returns a function (state, all images, all labels, step number, epochs) -> (state, metrics).

    Args:
      size: images per step.
      steps: steps per epoch.
    """
    dtype = jnp.dtype(_dtype(recipe))

    def loss_fn(
        params: Parameters, x: Array, target: Array
    ) -> tuple[Array, tuple[Array, Statistics]]:
        scores, _, used = apply(architecture, params, x, None, dtype=dtype)
        correct = jnp.mean(
            (jnp.argmax(scores, axis=1) == jnp.argmax(target, axis=1)).astype(jnp.float32)
        )
        return jnp.mean(optax.softmax_cross_entropy(scores, target)), (correct, used)

    def step(
        state: _State, images: Array, labels: Array, number: Array, epochs: Array
    ) -> tuple[_State, Metrics]:
        rows = batch_indices(number, size, images.shape[0], recipe.seed)
        key = jax.random.fold_in(jax.random.key(recipe.seed + 1), number)
        target = optax.smooth_labels(
            jax.nn.one_hot(labels[rows], architecture.classes, dtype=jnp.float32),
            recipe.label_smoothing,
        )
        x = augment(normalise(architecture, images[rows]), key, recipe)
        if recipe.cutmix:
            x, target = mix(x, target, jax.random.fold_in(key, 1), recipe.cutmix)
        (loss, (correct, used)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state.params, x, target
        )
        grads = jax.tree.map(lambda g, p: g + recipe.weight_decay * p, grads, state.params)
        updates, momentum = optimizer.update(grads, state.optimizer)
        share = (number + 1).astype(jnp.float32) / (epochs * steps).astype(jnp.float32)
        rate = recipe.learning_rate * (size / 512) * one_cycle(share)
        params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
        decay = STATISTICS_DECAY
        statistics = jax.tree.map(
            lambda old, new: decay * old + (1 - decay) * new, state.statistics, used
        )
        return _State(params, statistics, momentum), (loss, correct)

    return step


def _compile_epoch(step: Step, steps: int, data: tuple[_State, Array, Array]) -> Epoch:
    """Returns a function (state, epoch number, epochs) -> (state, metrics of each step)."""
    state, images, labels = data
    zero = jnp.int32(0)
    if jax.default_backend() == 'cpu':
        # Inside a loop, XLA runs convolutions on one CPU core, ten times slower.
        one = jax.jit(step).lower(state, images, labels, zero, zero).compile()

        def by_steps(state: _State, number: int, epochs: int) -> tuple[_State, Metrics]:
            pieces = []
            for i in range(number * steps, (number + 1) * steps):
                state, metrics = one(state, images, labels, jnp.int32(i), jnp.int32(epochs))
                pieces.append(metrics)
            return state, jax.tree.map(lambda *values: jnp.stack(values), *pieces)

        return by_steps

    def scan(
        state: _State, images: Array, labels: Array, number: Array, epochs: Array
    ) -> tuple[_State, Metrics]:
        numbers = number * steps + jnp.arange(steps, dtype=jnp.int32)
        return lax.scan(lambda s, i: step(s, images, labels, i, epochs), state, numbers)

    whole = jax.jit(scan).lower(state, images, labels, zero, zero).compile()
    return lambda state, number, epochs: whole(
        state, images, labels, jnp.int32(number), jnp.int32(epochs)
    )


def _evaluate(
    architecture: Architecture, state: _State, images: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns class scores and unscaled features of all images."""

    @jax.jit
    def run(params: Parameters, statistics: Statistics, batch: Array) -> tuple[Array, Array]:
        outputs = apply(
            architecture,
            params,
            normalise(architecture, batch),
            statistics,
            precision=lax.Precision.HIGHEST,
        )
        return outputs.scores, outputs.features

    parts = []
    for batch in _parts(images, EVALUATION_BATCH):
        # Pad the last batch, because another shape would need another compilation.
        missing = min(EVALUATION_BATCH, len(images)) - len(batch)
        full = np.concatenate([batch, np.zeros((missing, *batch.shape[1:]), np.uint8)])
        scores, features = run(state.params, state.statistics, full)
        parts.append((np.asarray(scores)[: len(batch)], np.asarray(features)[: len(batch)]))
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _feature_scale(
    features: Float[np.ndarray, 'n d'], architecture: Architecture
) -> Float[np.ndarray, ' d']:
    """Returns factors that bring the mean variance of each stage's features to 1."""
    scales, start = [], 0
    for channels in architecture.stages:
        variance = features[:, start : start + channels].astype(np.float64).var(axis=0).mean()
        scales.append(np.full(channels, 1 / math.sqrt(max(variance, 1e-12))))
        start += channels
    return np.concatenate(scales).astype(np.float32)
