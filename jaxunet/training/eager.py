"""The training step without `jax.jit`: every JAX operation is a program of its own."""

from __future__ import annotations

import jax.numpy as jnp

from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config
from jaxunet.data.order import batch_indices
from jaxunet.training.parallel import CompiledStep, Data
from jaxunet.training.step import Metrics, TrainStep


def eager(step: TrainStep, config: Config) -> CompiledStep:
    """Returns a step that is called as a compiled one, on one device."""

    def whole(state: TrainState, data: Data) -> tuple[TrainState, Metrics]:
        size = config.data.batch_size
        row = jnp.arange(size, dtype=jnp.int32)
        if 'image' in data:
            return step(state, {**data, 'row': row})
        index = batch_indices(state.step, size, data['images'].shape[0], config.seed)
        return step(
            state, {'image': data['images'][index], 'label': data['labels'][index], 'row': row}
        )

    return whole
