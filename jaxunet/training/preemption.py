"""Stops a run that the program that calls it, or a signal, asks to stop.

A command turns SIGTERM, SIGHUP and SIGINT into a request: finish the step, save, exit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType

from absl import logging

from jaxunet.runtime.attempts import quietly
from jaxunet.runtime.distributed import end
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.interrupt import INTERRUPTED, handled, terminating

ONE_REQUEST = 0.5  # seconds; `timeout`, and what passes signals on, send Ctrl-C twice at once


class Caller:
    """The program that calls a run, as the run sees it; it touches no signal handler.

    Attributes:
      requested: the run was asked to stop; the training loop reads it between steps.
      nothing_to_save: no step has been trained since the start; the training loop clears it.
    """

    def __init__(self) -> None:
        self.requested = False
        self.nothing_to_save = True

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: there is nothing to undo."""

    def logged(self, row: Mapping[str, float]) -> None:
        """Takes a row of metrics.csv, which the run has just written."""

    def stalled(self, error: UserError) -> None:
        """Takes the error of a run whose devices finish no step; called by another thread."""
        logging.error('%s', error)


class Preemption(Caller):
    """The command that runs a run, and catches signals.

    It catches them while its block runs. A SIGINT after another signal ends the process, unless
    both come at once.

    Python runs signal handlers only between bytecodes, and compiling a step can delay them by a
    minute. So a thread, woken by Python's C handler, ends the process at once if it need not finish
    its step: while `nothing_to_save` is true, and at the second Ctrl-C. An exception in the main
    thread could be raised anywhere, even inside a library that then aborts.

    Args:
      interrupted: called before the process ends while there is nothing to save, for a run that is
        a part of a command. The command has not done its work then, so the exit code is
        `INTERRUPTED`; without it, it is 0. The main thread goes on meanwhile.
    """

    def __init__(self, interrupted: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._interrupted = interrupted
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            # Only the main thread may set handlers; the embedding program keeps its own.
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._stack.callback(os.close, self._writer)  # ends the watching thread
        self._stack.enter_context(handled(self._handle))
        self._stack.callback(signal.set_wakeup_fd, -1)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def stalled(self, error: UserError) -> None:
        """Prints the error and ends the process, whose main thread waits for the devices."""
        with contextlib.suppress(OSError):  # of a terminal that is gone
            os.write(2, f'\nerror: {error}\n'.encode())
        end(error.exit_code)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def _watch(self) -> None:
        asked, signals = 0.0, {signal.SIGINT, *terminating()}
        while data := os.read(self._reader, 1):
            if data[0] not in signals:
                continue
            name = signal.Signals(data[0]).name
            if self.nothing_to_save:
                _say(
                    f'{name}: stopped before anything new was trained; nothing to save. '
                    'The same command goes on from here.'
                )
                if self._interrupted is None:
                    end(0)
                else:
                    quietly('the interrupted run', self._interrupted)
                    end(INTERRUPTED)
            if asked and data[0] == signal.SIGINT and time.monotonic() - asked > ONE_REQUEST:
                _say(f'{name} again: ended without saving; the last checkpoint is kept.')
                end(INTERRUPTED)
            if not asked:
                _say(
                    f'{name}: finishing the steps that have begun, then saving; '
                    'a further Ctrl-C ends at once without saving.'
                )
                asked = time.monotonic()
        os.close(self._reader)


def _say(text: str) -> None:
    print(f'\n{text}', file=sys.stderr, flush=True)
