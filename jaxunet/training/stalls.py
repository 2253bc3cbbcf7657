"""Notices a run whose devices no longer work, such as GPUs that wait for each other for ever.

The run would neither continue nor end by itself: while JAX waits for a device, Python runs no
signal handlers, and the main thread cannot save.
"""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from jaxunet.checkpoint.newest import saved_steps
from jaxunet.runtime.errors import UserError

STALLED = 6  # exit code of a run whose devices finish no step
LOOKS = 20  # times that the thread looks at a wait before its limit, at least
MAX_PAUSE = 60.0  # seconds between two looks
Arguments = ParamSpec('Arguments')
Result = TypeVar('Result')


class StalledError(UserError):
    """The devices of a run finish no step."""

    exit_code = STALLED


class StallWatch:
    """Waits for devices, and tells the caller of the run once if they take too long.

    Of several processes, only process 0 has a limit: the others wait for it while it draws samples
    or measures. If it ends, JAX ends them.

    Args:
      seconds: time limit of a wait; 0 = none. Time in which this process is suspended does not
        count.
      workdir: of the run, for the message.
      stalled: takes the error, in a thread of its own (`Caller.stalled`).
    """

    def __init__(
        self, seconds: float, workdir: pathlib.Path, stalled: Callable[[StalledError], None]
    ) -> None:
        self._seconds, self._workdir, self._stalled = seconds, workdir, stalled
        self._wait: object | None = None  # stands for the wait in progress
        self._closed = threading.Event()
        if seconds and jax.process_index() == 0:
            threading.Thread(target=self._watch, name='stall watch', daemon=True).start()

    def wait(self, arrays: object) -> None:
        """Waits until all arrays in a tree are computed; raises the errors of their programs."""
        self.call(jax.block_until_ready, arrays)

    def call(
        self,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Calls a function that may wait for devices, and returns its result.

        Starting a program is such a function: on several GPUs, JAX waits until all have started it.
        """
        self._wait = object()
        try:
            return function(*args, **kwargs)
        finally:
            self._wait = None

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _watch(self) -> None:
        every = min(self._seconds / LOOKS, MAX_PAUSE)
        seen, waited, last = None, 0.0, time.monotonic()
        while not self._closed.wait(every):
            wait, now = self._wait, time.monotonic()
            same = wait is not None and wait is seen
            # A thread that looks late was suspended, as was the process.
            waited = waited + min(now - last, 2 * every) if same else 0.0
            seen, last = wait, now
            if waited >= self._seconds:
                self._stalled(self._error())
                return

    def _error(self) -> StalledError:
        saved = 'there is no checkpoint yet'
        try:
            if steps := saved_steps(self._workdir):
                saved = f'step {steps[0]} is saved, and the same command resumes from there'
        except OSError:  # of a disk that is gone
            saved = 'the checkpoints cannot be listed'
        return StalledError(
            f'the devices finished no step within {self._seconds:g} s; {saved}. If a step takes '
            'that long, raise train.stall_seconds'
        )
