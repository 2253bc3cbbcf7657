"""Fits the number of steps of a run to a time budget (`train.minutes`).

Before a new run, its step is timed on its devices, with weights that are then dropped. The budget
counts training steps: compiling, sample grids, evaluations and checkpoints come on top. The number
of steps is then fixed, and saved with the config, so that a resumed run ends at the same step, and
a learning rate that falls to 0 at `train.steps` does so at the end of the budget.
"""

from __future__ import annotations

import gc
import math
import pathlib
import time
from collections.abc import Collection

import jax
from absl import logging

from jaxunet.checkpoint.newest import saved_steps
from jaxunet.checkpoint.optimizer import endless_warmup
from jaxunet.config import Config, resolve, to_dict
from jaxunet.data.automatic import steps_of_calls, steps_within
from jaxunet.data.source import Source
from jaxunet.runtime.distributed import number_of_process_0
from jaxunet.runtime.errors import UserError
from jaxunet.training.parallel import Data
from jaxunet.training.session import Session

WARM_UP = 2  # calls that are not timed
TIMED_SECONDS = 3.0
ENDLESS = 10**9  # steps for which a stream of batches is opened


def check_named(config: Config, named: Collection[str]) -> None:
    """Checks that a budget and a number of steps are not asked for at once.

    Args:
      named: paths of the fields that the command line or the caller set.

    Raises:
      UserError: both are.
    """
    if config.train.minutes and 'train.steps' in named:
        raise UserError(
            f'train.minutes: the budget of {config.train.minutes:g} minutes sets the number of '
            'steps; leave train.steps out'
        )


def fitted(
    config: Config, workdir: pathlib.Path, source: Source, images: Data | None = None
) -> Config:
    """Returns the config of a run with the steps that fit into its budget, if it has one.

    A collective operation: all processes of a run get the number of process 0. A run that resumes
    keeps its number (`jaxunet.data.automatic.complete`).

    Args:
      images: as for `Session`; resident ones stay on the devices for the run.

    Raises:
      UserError: as `Session`, or the budget has too many steps.
    """
    if not config.train.minutes or saved_steps(workdir):
        return config
    logging.info('train.minutes: compiling the step, to time it for %g s', TIMED_SECONDS)
    seconds = step_seconds(config, source, images)
    steps = steps_within(config, seconds)
    config = resolve(to_dict(config.replace(train={'steps': steps})))
    logging.info(
        'train.minutes=%g: %s steps of %.3g ms, as timed on these devices; compiling, samples and '
        'checkpoints come on top',
        config.train.minutes,
        f'{config.train.steps:,}',
        1e3 * seconds,
    )
    if warning := endless_warmup(config):
        logging.warning('%s', warning)
    return config


def step_seconds(config: Config, source: Source, images: Data | None = None) -> float:
    """Returns the seconds of a training step, as process 0 times it; `images` as for `Session`."""
    # The rate does not change the time, and a constant one gives a program that the cache of
    # compiled steps may have, whatever the number of steps.
    calls = steps_of_calls(config)  # the run's number divides its steps, and may not divide these
    steps = -(-config.train.steps // calls) * calls
    same = config.replace(optimizer={'schedule': 'constant'}, train={'steps': steps})
    with Session(same, source, images) as session:
        session.load_random(progress=jax.process_index() == 0)
        session.open_stream(end=ENDLESS)
        session.compile(cache=True)
        _timed(session, WARM_UP)
        calls = math.ceil(TIMED_SECONDS / _timed(session, 1))
        calls = max(int(number_of_process_0(calls)), 1)
        seconds = _timed(session, calls) / (calls * session.steps_per_call)
    del session
    gc.collect()  # the state of the run needs its memory
    return number_of_process_0(seconds)


def _timed(session: Session, calls: int) -> float:
    """Returns the seconds that so many calls take."""
    began = time.perf_counter()
    for _ in range(calls):
        metrics = session.call(session.next_data())
        if session.calls_ahead == 1:
            jax.block_until_ready(metrics)
    jax.block_until_ready((session.state, metrics))
    return time.perf_counter() - began
