"""Trains the classifier of `jaxunet.metrics.classifier`: the data whole on one device, on GPUs an epoch a call."""

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
from jaxtyping import Array, Float

from jaxunet.data.order import batch_indices
from jaxunet.metrics.classifier import (
    Architecture,
    Parameters,
    Statistics,
    apply,
    init,
    normalise,
    rounded,
)
from jaxunet.metrics.labelled_images import Images
from jaxunet.runtime.errors import UserError

PEAK = 0.2  # share of the steps until the learning rate is at its peak
STATISTICS_DECAY = 0.9  # of the running mean and variance of the batch normalization
EVALUATION_BATCH = 1000
Say = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """How to train. With 96 channels: 93.21% on CIFAR-10 as JPEGs (quality 75) in 308 epochs, 230 s of an H200.

    Fields:
      epochs: passes over the training images.
      seconds: instead of `epochs`: as many as fit, by the time that one takes; 0 = `epochs` decides.
      learning_rate: its peak, for batches of 512; it rises to that in the first fifth, and falls to 0 in straight lines. It is scaled by
        batch_size/512.
      weight_decay: L2, added to the gradient before the momentum.
      flip: images are mirrored at random.
      crop, cutout: share of the side by which crops move at random, and of the side of the square that is blanked.
      cutmix: probability that the images of a batch get a rectangle of their neighbours, and their share of the target.
      dtype: of products and activations; '' = bfloat16 on GPUs, else float32.
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


class Trained(NamedTuple):
    architecture: Architecture
    params: Parameters
    statistics: Statistics
    feature_scale: Float[np.ndarray, ' d']
    accuracy: float  # on the test images, 0 to 1
    mirrored_accuracy: float  # with the scores of each image and its mirror image added; NaN if training mirrored none
    epochs: int
    seconds: float  # of training, without compiling


class _State(NamedTuple):
    params: Parameters
    statistics: Statistics
    optimizer: Any


def train(
    train_set: Images, test_set: Images, channels: int, recipe: Recipe, say: Say = print
) -> Trained:
    """Trains on the default device.

    Args:
      channels: width of the network (`Architecture.channels`).

    Raises:
      UserError: a loss that is not finite.
    """
    count = len(train_set.images)
    size = min(recipe.batch_size, count)
    steps = count // size
    architecture = _architecture(train_set, channels)
    images, labels = jnp.asarray(train_set.images), jnp.asarray(train_set.labels, jnp.int32)
    optimizer = optax.sgd(
        1.0, momentum=recipe.momentum, nesterov=True
    )  # the learning rate comes after the momentum
    state = _start(architecture, optimizer, recipe)

    began = time.perf_counter()
    epoch = _compile_epoch(
        _make_step(architecture, optimizer, recipe, size, steps), steps, (state, images, labels)
    )
    say(
        f'compiled in {time.perf_counter() - began:.1f} s; {count} images, batches of {size}, {_dtype(recipe)}'
    )
    epochs = recipe.epochs
    if recipe.seconds:
        epochs = fitting(recipe.seconds, lambda: _means(epoch(state, 0, 1)[1]))  # thrown away
        say(f'{epochs} epochs fit in {recipe.seconds:g} s')
    began = time.perf_counter()
    for number in range(epochs):
        state, metrics = epoch(state, number, epochs)
        means = _means(metrics)
        if not math.isfinite(means[0]):
            raise UserError(
                f'the loss is not finite in epoch {number + 1}; lower --learning_rate (now {recipe.learning_rate:g})'
            )
        if (number + 1) % max(1, epochs // 10) == 0 or number + 1 == epochs:
            took = time.perf_counter() - began
            say(
                f'epoch {number + 1}/{epochs}: loss {means[0]:.4f}, accuracy in training {means[1]:.4f}, {took:.1f} s'
            )
    seconds = time.perf_counter() - began
    state = state._replace(params=rounded(state.params))
    scores = _evaluate(architecture, state, test_set.images)[0]
    accuracy = float(np.mean(scores.argmax(axis=1) == test_set.labels))
    mirrored = math.nan
    if recipe.flip:
        scores += _evaluate(architecture, state, np.ascontiguousarray(test_set.images[:, :, ::-1]))[
            0
        ]
        mirrored = float(np.mean(scores.argmax(axis=1) == test_set.labels))
    features = _evaluate(architecture, state, train_set.images)[1]
    scale = _feature_scale(features, architecture)
    return Trained(
        architecture, state.params, state.statistics, scale, accuracy, mirrored, epochs, seconds
    )


def _means(metrics: Any) -> tuple[float, ...]:
    return tuple(float(jnp.mean(values)) for values in metrics)


def fitting(seconds: float, epoch: Callable[[], object]) -> int:
    """How many epochs take this time, by those of half a second, or of a tenth of the time if that is less.

    The first is slower than the others; it counts only where it alone takes a tenth of the time.
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
    # Parts at a time: all of them as floats would be many times the images.
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


Step = Callable[[_State, Array, Array, Array, Array], tuple[_State, tuple[Array, Array]]]


def _make_step(
    architecture: Architecture,
    optimizer: optax.GradientTransformation,
    recipe: Recipe,
    size: int,
    steps: int,
) -> Step:
    """(state, all images, all labels, number of the step, epochs) -> state, (loss, share of the batch that is right)."""
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
    ) -> tuple[_State, tuple[Array, Array]]:
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


def _compile_epoch(
    step: Step, steps: int, data: tuple[_State, Array, Array]
) -> Callable[[_State, int, int], tuple[_State, Any]]:
    """(state, number of the epoch, epochs) -> state, (losses, shares) of its steps."""
    state, images, labels = data
    zero = jnp.int32(0)
    if jax.default_backend() == 'cpu':
        # Inside a loop XLA's convolutions run on one core there, ten times slower.
        one = jax.jit(step).lower(state, images, labels, zero, zero).compile()

        def by_steps(state: _State, number: int, epochs: int) -> tuple[_State, Any]:
            told = []
            for i in range(number * steps, (number + 1) * steps):
                state, metrics = one(state, images, labels, jnp.int32(i), jnp.int32(epochs))
                told.append(metrics)
            return state, jax.tree.map(lambda *values: jnp.stack(values), *told)

        return by_steps

    def scan(
        state: _State, images: Array, labels: Array, number: Array, epochs: Array
    ) -> tuple[_State, Any]:
        numbers = number * steps + jnp.arange(steps, dtype=jnp.int32)
        return lax.scan(lambda s, i: step(s, images, labels, i, epochs), state, numbers)

    whole = jax.jit(scan).lower(state, images, labels, zero, zero).compile()
    return lambda state, number, epochs: whole(
        state, images, labels, jnp.int32(number), jnp.int32(epochs)
    )


def one_cycle(share: Float[Array, '']) -> Float[Array, '']:
    """Of the peak learning rate, when this share of the steps is done: up to 1 in the first fifth, then down to 0."""
    return jnp.minimum(share / PEAK, (1 - share) / (1 - PEAK))


def augment(
    x: Float[Array, 'images height width colours'], key: Array, recipe: Recipe
) -> Float[Array, 'images height width colours']:
    """Mirrored, cropped out of the image padded by its reflection, and with a blank square, each at random for each image."""
    height, width = x.shape[1:3]
    pads = [round(recipe.crop * side) for side in (height, width)]
    holes = [round(recipe.cutout * side) for side in (height, width)]
    padded = (
        jnp.pad(x, ((0, 0), (pads[0], pads[0]), (pads[1], pads[1]), (0, 0)), mode='reflect')
        if max(pads)
        else x
    )

    def one(image: Array, key: Array) -> Array:
        flip, *places = jax.random.split(key, 5)
        top, left = (
            jax.random.randint(k, (), 0, 2 * pad + 1)
            for k, pad in zip(places[:2], pads, strict=True)
        )
        image = lax.dynamic_slice(image, (top, left, jnp.int32(0)), (height, width, image.shape[2]))
        if recipe.flip:
            image = jnp.where(jax.random.bernoulli(flip), image[:, ::-1], image)
        if min(holes):
            # Anywhere inside the image.
            starts = [
                jax.random.randint(k, (), 0, side - hole + 1)
                for k, side, hole in zip(places[2:], (height, width), holes, strict=True)
            ]
            inside = [
                (jnp.arange(n) >= s) & (jnp.arange(n) < s + hole)
                for n, s, hole in zip((height, width), starts, holes, strict=True)
            ]
            image = jnp.where((inside[0][:, None] & inside[1][None])[:, :, None], 0.0, image)
        return image

    return jax.vmap(one)(padded, jax.random.split(key, x.shape[0]))


def mix(
    x: Float[Array, 'images height width colours'],
    target: Float[Array, 'images classes'],
    key: Array,
    probability: float,
) -> tuple[Float[Array, 'images height width colours'], Float[Array, 'images classes']]:
    """CutMix (Yun et al. 2019, arXiv 1905.04899, α = 1), if it comes to it the same rectangle for all images of the batch.

    Its centre and its share of the area, before the image cuts it, are uniform. A batch is in random order, so any neighbour will do.
    """
    happens, area, *places = jax.random.split(key, 4)
    share = jnp.where(
        jax.random.bernoulli(happens, probability), jnp.sqrt(jax.random.uniform(area)), 0.0
    )  # of either side
    down, across = (
        jnp.abs(jnp.arange(side, dtype=jnp.float32) + 0.5 - side * jax.random.uniform(k))
        < share * side / 2
        for k, side in zip(places, x.shape[1:3], strict=True)
    )
    hole = down[:, None] & across[None]
    taken = jnp.mean(hole.astype(jnp.float32))
    return jnp.where(hole[None, :, :, None], jnp.roll(x, 1, 0), x), (
        1 - taken
    ) * target + taken * jnp.roll(target, 1, 0)


def _evaluate(
    architecture: Architecture, state: _State, images: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Class scores and unscaled features of all images."""

    @jax.jit
    def run(params: Parameters, statistics: Statistics, batch: Array) -> tuple[Array, Array]:
        return apply(
            architecture,
            params,
            normalise(architecture, batch),
            statistics,
            precision=lax.Precision.HIGHEST,
        )[:2]

    parts = []
    for batch in _parts(images, EVALUATION_BATCH):
        # A last batch is filled up, as another size would compile once more.
        full = np.concatenate(
            [
                batch,
                np.zeros(
                    (min(EVALUATION_BATCH, len(images)) - len(batch), *batch.shape[1:]), np.uint8
                ),
            ]
        )
        scores, features = run(state.params, state.statistics, full)
        parts.append((np.asarray(scores)[: len(batch)], np.asarray(features)[: len(batch)]))
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _feature_scale(
    features: Float[np.ndarray, 'n d'], architecture: Architecture
) -> Float[np.ndarray, ' d']:
    """Factors that bring the mean variance of each stage's features to 1."""
    scales, start = [], 0
    for channels in architecture.stages:
        variance = features[:, start : start + channels].astype(np.float64).var(axis=0).mean()
        scales.append(np.full(channels, 1 / math.sqrt(max(variance, 1e-12))))
        start += channels
    return np.concatenate(scales).astype(np.float32)
