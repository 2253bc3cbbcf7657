"""How many steps one call of the compiled program runs."""

from __future__ import annotations

import math

from absl import logging

from jaxunet.config import Config
from jaxunet.config.relations import STEP_COUNTS
from jaxunet.runtime.errors import UserError

MOST = 20  # of which a host's share is small; a signal waits for all of them


def steps_of_call(config: Config, *, resident: bool, platform: str, start: int = 0) -> int:
    """`train.steps_per_call`, or where that is 0 as many as suit, which is logged.

    These are on a GPU, of resident images, the most up to `MOST` that divide `start` and all counts of steps; elsewhere one: XLA runs
    such a loop slowly on a CPU, and a streamed batch is of one step.

    Args:
      resident: whether the images lie in device memory.
      start: the step to go on from.
    """
    if config.train.steps_per_call:
        return config.train.steps_per_call
    if platform != 'gpu' or not resident:
        return 1
    common = math.gcd(start, *(getattr(config.train, name) for name in STEP_COUNTS))
    chosen = max(n for n in range(1, MOST + 1) if common % n == 0)
    if chosen == 1:
        counts = 'train.' + ', '.join(STEP_COUNTS)
        logging.warning(
            'train.steps_per_call=0: 1, as nothing up to %d divides %s and step %d, to go on from',
            MOST,
            counts,
            start,
        )
    else:
        logging.info('train.steps_per_call=0: %d', chosen)
    return chosen


def check_start(config: Config, start: int) -> None:
    """Raises UserError: the number of steps of a call asked for does not divide the step to go on from."""
    asked = config.train.steps_per_call
    if asked and start % asked:
        raise UserError(
            f'train.steps_per_call: {asked} does not divide the step to go on from, {start}; set it to 0, 1, or to what does'
        )
