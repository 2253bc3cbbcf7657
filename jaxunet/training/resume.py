"""Finds where a run starts: its newest checkpoint, given weights, or fresh ones."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from absl import logging

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.meta import RunFacts
from jaxunet.checkpoint.optimizer import rate_jump
from jaxunet.checkpoint.resumable import check_resumable
from jaxunet.checkpoint.state import (
    Draw,
    TrainState,
    draw_state,
    fresh_state,
    start_loss_scale,
    start_methods,
    start_norms,
)
from jaxunet.config import Config
from jaxunet.data.classes import keep_classes, label_table
from jaxunet.data.source import Source
from jaxunet.runtime.background import Background
from jaxunet.training.rollback import TooManySkippedError, last_good


@dataclass(frozen=True)
class StartingPoint:
    """The state that a run starts from.

    Attributes:
      step: the step of the state.
      shapes: the state, or its shapes and types.
      state: returns the state as numpy arrays, once it is there; raises the error of drawing it.
      facts: about the run so far.
    """

    step: int
    shapes: TrainState
    state: Callable[[], TrainState]
    facts: RunFacts

    @classmethod
    def of(cls, state: TrainState, facts: RunFacts) -> StartingPoint:
        """Returns the starting point of a state of numpy arrays."""
        return cls(int(state.step), state, lambda: state, facts)

    @classmethod
    def fresh(cls, config: Config, facts: RunFacts, draw: Draw = draw_state) -> StartingPoint:
        """Returns the starting point of a fresh state, which a thread draws from now on.

        Compiling the step needs only the shapes of the state, and takes longer than drawing it.

        Args:
          draw: as for `fresh_state`.
        """
        shapes = checkpoint.state_template(config, draw)
        drawing = Background(lambda: fresh_state(config, draw))
        return cls(0, shapes, drawing.wait, facts)


def starting_point(
    config: Config,
    workdir: pathlib.Path,
    checkpoints: checkpoint.Checkpoints,
    class_names: tuple[str, ...],
    initial: TrainState | None,
    failed: TooManySkippedError | None = None,
) -> StartingPoint:
    """Returns the newest checkpoint of the run, else `initial`, else a fresh state.

    Args:
      class_names: of the images.
      failed: why this run goes back to its last good checkpoint; None if it does not.

    Raises:
      UserError: the config or the classes do not fit the checkpoint, or none can be read.
      TooManySkippedError: `failed`, if there is no good checkpoint.
    """
    names = class_names if config.model.num_classes else ()
    restored = last_good(checkpoints, failed) if failed else checkpoints.restore()
    if restored is None:
        log_labels(config, names)
        facts = RunFacts(class_names=names)
        if initial is None:
            return StartingPoint.fresh(config, facts)
        return StartingPoint.of(initial, facts)
    changes = check_resumable(restored.config, config, workdir)
    names = keep_classes(restored.facts.class_names, names, config, workdir)
    log_labels(config, names)
    logging.info(
        'resuming %s at step %d%s',
        workdir,
        int(restored.state.step),
        '; changed: ' + ', '.join(changes) if changes else '',
    )
    if warning := rate_jump(restored.config, config, int(restored.state.step)):
        logging.warning('%s', warning)
    facts = dataclasses.replace(restored.facts, class_names=names)
    return StartingPoint.of(adapted(restored, config), facts)


def log_labels(config: Config, names: tuple[str, ...]) -> None:
    """Logs the class of each label of a conditional run, on process 0."""
    if config.model.num_classes and jax.process_index() == 0:
        logging.info('%s', label_table(names))


def with_image_count(begin: StartingPoint, source: Source) -> StartingPoint:
    """Returns the starting point with the number of images that the run began with.

    Warns if the number has changed since, because the choice of held-out images depends on it.

    Args:
      source: the training images.
    """
    held_out = len(source.held_out) if source.held_out else 0
    images = len(source) + held_out
    if held_out and begin.facts.images not in (0, images):
        logging.warning(
            'data.holdout: the run began with %s images and now has %s, so other images are held '
            'out; it has trained on most of them, and their loss does not show copying',
            f'{begin.facts.images:,}',
            f'{images:,}',
        )
    facts = dataclasses.replace(begin.facts, images=begin.facts.images or images)
    return dataclasses.replace(begin, facts=facts)


def how_to_go_on(config: Config, workdir: pathlib.Path, step: int) -> str:
    """Returns advice for the user of a run that has already trained all of its steps."""
    field = config.train.length
    now = getattr(config.train, field)
    return (
        f'{workdir} has already trained {step} steps. To go on, raise --config.train.{field} '
        f'(now {now}); to start over, choose another --workdir.'
    )


def adapted(restored: checkpoint.Restored, config: Config) -> TrainState:
    """Resets the parts of the state whose meaning depends on a field that the config changes."""
    state = restored.state
    if int(state.step) == restored.config.train.steps:  # the last row of the run has these losses
        total, count = jax.tree.map(np.zeros_like, (state.loss_sum, state.loss_count))
        state = dataclasses.replace(state, loss_sum=total, loss_count=count)
    if restored.config.precision != config.precision:
        state = dataclasses.replace(state, loss_scale=jax.device_get(start_loss_scale(config)))
    weighting, timesteps = jax.device_get(jax.jit(lambda: start_methods(config))())
    if restored.config.loss != config.loss:
        state = dataclasses.replace(state, weighting=weighting)
    if restored.config.timesteps != config.timesteps:
        state = dataclasses.replace(state, timesteps=timesteps)
    if bool(restored.config.train.spike_sigmas) != bool(config.train.spike_sigmas):
        state = dataclasses.replace(state, recent_norms=jax.device_get(start_norms(config)))
    return state
