"""The training step without `jax.jit`: every JAX operation is a program of its own."""

from __future__ import annotations

import jax.numpy as jnp

from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config
from jaxunet.training.parallel import CompiledStep, Data, batch_of
from jaxunet.training.step import Metrics, TrainStep


def eager(step: TrainStep, config: Config) -> CompiledStep:
    """Returns a step that is called as a compiled one, on one device."""

    def whole(state: TrainState, data: Data) -> tuple[TrainState, Metrics]:
        row = jnp.arange(config.data.batch_size, dtype=jnp.int32)
        return step(state, batch_of(config, state.step, data, row))

    return whole
