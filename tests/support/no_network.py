"""Training steps without a network, for tests of what becomes of the weights after a step.

All of the step is real but its loss: which images and keys it gets, the optimizer and the averages.
Such a step is traced and compiled in half of the time.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxunet.model.unet import Params
from jaxunet.training.session import Session
from jaxunet.training.update import Scalar
from support.shared_steps import shared_steps


def loss_fn(
    parts: object, params: Params, state: object, keys: object, batch: dict, scale: Scalar
) -> tuple[Scalar, tuple[Scalar, None]]:
    """Moves all weights towards one number, drawn anew for each step.

    Arguments and results are those of `jaxunet.training.gradients.loss_fn`.
    """
    del parts, state
    goal = jnp.mean(jax.vmap(jax.random.normal)(keys.noise)) + jnp.mean(batch['image'] / 255)
    loss = sum(jnp.mean(jnp.square(leaf - goal)) for leaf in jax.tree.leaves(params))
    return loss * scale, (loss, None)


@contextlib.contextmanager
def no_network() -> Iterator[None]:
    """Gives the steps of `jaxunet.training.loop.train` this loss; equal ones are compiled once."""
    with (
        unittest.mock.patch.object(Session, '_loss', staticmethod(loss_fn)),
        shared_steps('no network'),
    ):
        yield
