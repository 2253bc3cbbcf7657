"""Turns SIGTERM and SIGINT into a request: finish the step, save, exit with 0."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from jaxunet.runtime.distributed import end

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_Handler = Callable[[int, FrameType | None], object] | int | None  # as `signal.signal` returns it


class Preemption:
    """Catches the signals while its block runs. A second SIGINT raises KeyboardInterrupt.

    Python runs signal handlers only between bytecodes, and compiling a step can delay them by a
    minute. While `nothing_to_save` is true, a thread therefore ends the process at once; Python's C
    handler wakes it.

    Attributes:
      requested: the process was asked to stop; the training loop reads it between steps.
      nothing_to_save: no step has been trained since the start; the training loop clears it.
    """

    def __init__(self) -> None:
        self.requested = False
        self.nothing_to_save = True
        self._previous: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            return (
                self  # only the main thread may set handlers; the embedding program keeps its own
            )
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous:
            signal.set_wakeup_fd(-1)
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            os.close(self._writer)  # ends the watching thread

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def _watch(self) -> None:
        while data := os.read(self._reader, 1):
            if self.nothing_to_save and data[0] in SIGNALS:
                print(
                    f'\n{signal.Signals(data[0]).name}: stopped before anything new was trained; '
                    'nothing to save.',
                    file=sys.stderr,
                    flush=True,
                )
                end(0)
        os.close(self._reader)
