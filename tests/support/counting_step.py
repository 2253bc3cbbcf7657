"""Training steps without a network, for tests of the loop around the steps."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxunet.checkpoint.optimizer import learning_rate_schedule
from jaxunet.training.session import Session


def count_only(session: Session, *, cache: bool = False, moves: bool = False) -> None:
    """Replaces `Session.compile`, which takes most of the time of a short run.

    The loss of a step is its number.

    Args:
      moves: each step also moves the weights and their averages.
    """
    del cache
    put, local = session.parallel.replicate, session.parallel.local
    names = ('loss', 'learning_rate', 'grad_norm', 'loss_scale', 'bad_steps', 'skipped')
    metrics = put(dict.fromkeys(names, np.float32(0)))
    rate = learning_rate_schedule(session.config)

    def step(state, data):
        count = int(local(state.step)) + 1
        changed = {'step': np.int32(count)}
        if moves:
            for name in ('params', 'ema'):
                changed[name] = jax.tree.map(_moved, session.parallel.fetch(getattr(state, name)))
        found = {'loss': np.float32(count), 'learning_rate': np.float32(rate(count - 1))}
        return dataclasses.replace(state, **put(changed)), metrics | put(found)

    session.step = step


def move_weights(session: Session, *, cache: bool = False) -> None:
    """Replaces `Session.compile` like `count_only`, with steps that move the weights."""
    count_only(session, cache=cache, moves=True)


def _moved(x: np.ndarray) -> np.ndarray:
    return 0.9 * x + np.float32(0.01)
