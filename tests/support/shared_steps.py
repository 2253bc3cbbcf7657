"""Lets the runs of a test process share their compiled training steps."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator

import jax

from jaxunet.checkpoint.state import TrainState
from jaxunet.runtime import compiled_cache
from jaxunet.training.parallel import Data, Parallel
from jaxunet.training.step import TrainStep
from jaxunet.training.step_fields import relevant
from support.memory import STEPS


@contextlib.contextmanager
def shared_steps(loss: str = '') -> Iterator[None]:
    """Makes `jaxunet.training.loop.train` take compiled steps from `STEPS`, and keep them there.

    The key of a step is that of `compiled_cache` on GPUs, except that with a constant learning rate
    the number of steps of the run does not matter.

    Args:
      loss: names the loss of the steps, if it is not that of their configs.
    """
    compile_step = Parallel.compile

    def compile_once(
        self: Parallel,
        make_step: Callable[[str | None], TrainStep],
        state: TrainState,
        data: Data,
        *,
        steps: int = 1,
        cache: bool = False,
    ) -> jax.stages.Compiled:
        if not cache:
            return compile_step(self, make_step, state, data, steps=steps)
        fields = relevant(self.config)
        if self.config.optimizer.schedule == 'constant':
            fields['train'] = {k: v for k, v in fields['train'].items() if k != 'steps'}
        more = {'steps': steps, 'loss': loss}
        key = compiled_cache.key(fields, (state, data), self.devices, more)
        if key not in STEPS:
            STEPS[key] = compile_step(self, make_step, state, data, steps=steps)
        return STEPS[key]

    with unittest.mock.patch.object(Parallel, 'compile', compile_once):
        yield
