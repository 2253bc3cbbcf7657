"""SIGTERM and SIGINT: finish the step, save, exit 0."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from jaxunet.runtime.distributed import end

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """`requested` turns true when the process is asked to stop; the loop looks at it between steps. A second SIGINT aborts.

    Python runs a signal handler only between bytecodes, and compiling a step can keep it away from them for a minute. So while
    `nothing_to_save` is true, a thread that the C-level handler wakes ends the process at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self.nothing_to_save = True
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            return self  # signals belong to the main thread; an embedding program keeps its own
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
                    f'\n{signal.Signals(data[0]).name}: stopped before anything new was trained; nothing to save.',
                    file=sys.stderr,
                    flush=True,
                )
                end(0)
        os.close(self._reader)
