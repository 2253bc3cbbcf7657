"""Trains the classifier of noisy images that guides samples: its state, loss and session.

The step is that of a diffusion model (`jaxunet.training.step`) with another network and loss: the
cross-entropy of the classes at uniform timesteps. The state has no averages of the weights.

Source: openai/guided-diffusion, `scripts/classifier_train.py`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from absl import logging

from jaxunet.checkpoint.state import TrainState, fresh_state, state_before_training
from jaxunet.config import Config
from jaxunet.data.source import Source
from jaxunet.model.noisy_classifier import NoisyClassifier, build_classifier, log_probability
from jaxunet.model.unet import Params
from jaxunet.ops.references import XLA
from jaxunet.ops.vocabulary import Ops
from jaxunet.runtime.errors import UserError, itemized
from jaxunet.runtime.remote import on_disk
from jaxunet.training.batch import Batch, Keys, noise_batch
from jaxunet.training.gradients import LossFn, StepParts
from jaxunet.training.session import Session
from jaxunet.training.update import Scalar
from jaxunet.weights import read_classifier
from jaxunet.weights.fields import check_reusable
from jaxunet.weights.guided_diffusion import FIXED
from jaxunet.weights.names import Path, flatten, unflatten
from jaxunet.weights.noisy_classifier import HEAD_CHANNELS

FILE = 'classifier.pt'  # of the weights in a run's workdir
# Values that all of guided-diffusion's classifiers have, and options that this training lacks.
NEEDED: dict[str, object] = {
    **FIXED,
    'model.num_head_channels': HEAD_CHANNELS,
    'model.dropout': 0.0,
    'model.low_res_size': (),
    'data.condition': 'image',
    'loss.weighting': 'uniform',
    'timesteps.sampler': 'uniform',
    'ema.widths': (),
    'train.minutes': 0.0,
    'train.rollbacks': 0,
    'train.evaluate_every': 0,
    'train.check_replicas_every': 0,
    'init_from_order': '',
    'init_from_ema': '',
}
LAST: Path = ('pool', 'proj')  # the layer of the classes in the tree of parameters


def check_trainable(config: Config) -> None:
    """Checks that a config describes a classifier that can be trained and can guide a sampler.

    Raises:
      UserError: it does not; the message lists the fields.
    """
    if problems := list(_problems(config)):
        raise UserError(
            f'no classifier of noisy images can be trained with this config:{itemized(problems)}'
        )


def _problems(config: Config) -> Iterator[str]:
    for name, expected in NEEDED.items():
        section, _, field = name.rpartition('.')
        found = getattr(getattr(config, section) if section else config, field)
        if found != expected:
            yield f'{name}: expected {expected!r}, found {found!r}'
    if config.diffusion.continuous:
        yield (
            'diffusion.objective: expected epsilon, x0 or v, whose timesteps a classifier reads, '
            f'found {config.diffusion.objective}'
        )
    if config.data.augment == 'edm':
        yield 'data.augment: expected none or flip, found edm'
    if config.model.num_classes < 2:
        yield (
            'model.num_classes: expected the number of classes, 2 or more, '
            f'found {config.model.num_classes}'
        )
    height, width = config.image_shape[:2]
    if height != width:
        yield f'data.image_size: a classifier takes square images, found {height}x{width}'


def network_config(config: Config) -> Config:
    """Returns the config of the classifier's network, which has no classes as an input."""
    return config.replace(model={'num_classes': 0, 'label_dropout': 0.0})


def make_network(config: Config, ops: Ops = XLA) -> NoisyClassifier:
    """Returns the classifier of `model.num_classes` classes."""
    return build_classifier(network_config(config), config.model.num_classes, ops)


def draw_state(config: Config) -> TrainState:
    """Draws the state before step 0 from `config.seed`; to be traced by JAX."""
    init_key, run_key = jax.random.split(jax.random.key(config.seed))
    image = jnp.zeros((1, *config.image_shape), jnp.float32)
    network = make_network(config)
    params = network.init(init_key, image, jnp.zeros((1,), jnp.int32))['params']
    state = state_before_training(config, params, jax.random.key_data(run_key))
    return dataclasses.replace(state, ema={})


def starting_state(config: Config) -> TrainState:
    """Returns the state before step 0 with the weights of `config.init_from`.

    Raises:
      UserError: `init_from` is not a classifier of such images, or its network differs from the
        config's in more than the number of classes.
    """
    state = fresh_state(config, draw_state)
    path = pathlib.Path(on_disk(config.init_from))
    if path.is_dir():
        path /= FILE
    classifier = read_classifier(path, config)
    check_reusable(classifier.config, network_config(config), str(path))
    leaves, fresh = flatten(classifier.params), flatten(state.params)
    note = classifier.note
    if classifier.classes != config.model.num_classes:
        leaves |= {place: leaf for place, leaf in fresh.items() if place[:2] == LAST}
        note += f'; fresh: the layer of the {config.model.num_classes} classes here'
    logging.info('starting from %s: %s', path, note)
    return dataclasses.replace(state, params=unflatten(leaves))


def make_loss(network: NoisyClassifier) -> LossFn:
    """Returns the loss of the training step: −log p(label | x_t), at the step's timesteps."""

    def loss_fn(
        parts: StepParts, params: Params, state: TrainState, keys: Keys, batch: Batch, scale: Scalar
    ) -> tuple[Scalar, tuple[Scalar, None]]:
        with jax.named_scope('data'):
            noisy = noise_batch(
                parts.config, parts.diffusion, parts.sampler, state.timesteps, keys, batch
            )
        with jax.named_scope('forward'):
            logits = network.predict(params, noisy.model_input, noisy.time)
            loss = -jnp.mean(log_probability(logits, batch['label']))
        return loss * scale, (loss, None)

    return loss_fn


class ClassifierSession(Session):
    """The training step of a classifier with everything it runs on.

    Attributes:
      network: the classifier, with the ops of `config.backend`.
    """

    def __init__(self, config: Config, source: Source) -> None:
        super().__init__(network_config(config), source)
        self.network = make_network(config, self.kernels.ops)
        self._loss = make_loss(self.network)
