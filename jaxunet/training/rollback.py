"""Goes back to a good checkpoint after too many skipped steps in a row (`train.rollbacks`)."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import jax
from absl import logging

from jaxunet.checkpoint.refused import RefusedError
from jaxunet.checkpoint.store import Checkpoints, Restored
from jaxunet.config import Config
from jaxunet.runtime.distributed import agree
from jaxunet.runtime.errors import UserError


class TooManySkippedError(UserError):
    """A run skipped `train.max_bad_steps` steps in a row.

    Args:
      step: the step reached.
      bad: steps skipped in a row up to it.
      latest: the step of the newest checkpoint; None if there is none.
      rollbacks: number of times that the run has gone back so far.
    """

    def __init__(
        self, config: Config, step: int, bad: int, latest: int | None, rollbacks: int
    ) -> None:
        train = config.train
        spike, advice, back = '', '', ''
        saved = (
            'There is no checkpoint yet.'
            if latest is None
            else f'The last checkpoint is step {latest}.'
        )
        if train.spike_sigmas:
            spike = f', or a norm beyond train.spike_sigmas={train.spike_sigmas}'
            advice = 'raise train.spike_sigmas, '
        if rollbacks:
            back = f' Rollbacks before it: {rollbacks} (train.rollbacks={train.rollbacks}).'
        super().__init__(
            f'training stopped at step {step}: {bad} steps in a row had a loss or gradient '
            f'that is not finite{spike} (train.max_bad_steps={train.max_bad_steps}); {advice}'
            'lower optimizer.learning_rate, set optimizer.clip_norm, or use '
            f'precision=bfloat16. {saved}{back}'
        )
        self.step, self.bad, self.rollbacks = step, bad, rollbacks


def with_rollbacks(run: Callable[[TooManySkippedError | None], int], limit: int) -> int:
    """Returns the result of `run`; repeats it at most `limit` times if it skips too many steps.

    Args:
      run: takes the reason to go back to the last good checkpoint; None the first time.

    Raises:
      TooManySkippedError: the last one.
    """
    failed: TooManySkippedError | None = None
    while True:
        # Process 0 has written its last checkpoint before any process looks for a good one.
        agree({'rollbacks': failed.rollbacks if failed else 0})
        try:
            return run(failed)
        except TooManySkippedError as error:
            if error is failed or error.rollbacks >= limit:
                raise
            failed = error.with_traceback(None)
        # Frees the old state, which would fill the devices; it was alive at `gc.freeze`.
        gc.unfreeze()
        gc.collect()


def last_good(checkpoints: Checkpoints, failed: TooManySkippedError) -> Restored:
    """Returns the newest checkpoint without a skipped step right before it, to resume from.

    The number of rollbacks is folded into its random key: the batches stay the same, but noise,
    timesteps, dropout and augmentation are different.

    Raises:
      TooManySkippedError: `failed`, if there is no such checkpoint.
    """
    for step in checkpoints.steps():
        try:
            restored = checkpoints.restore(step)
        except RefusedError:  # later checkpoints are set aside, and this one may be good
            raise
        except UserError as error:
            logging.warning('%s', error)
            continue
        if restored is None or int(restored.state.bad_steps):
            continue
        count = failed.rollbacks + 1
        logging.warning(
            'step %d: %d steps in a row were skipped; going back to the checkpoint of step %d, '
            'with other random numbers (rollback %d)',
            failed.step,
            failed.bad,
            step,
            count,
        )
        key = jax.random.fold_in(jax.random.wrap_key_data(restored.state.rng), count)
        rng = jax.device_get(jax.random.key_data(key))
        state = dataclasses.replace(restored.state, rng=rng)
        facts = dataclasses.replace(restored.facts, rollbacks=count)
        return dataclasses.replace(restored, state=state, facts=facts)
    raise failed
