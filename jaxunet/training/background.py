"""A function beside the training loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Runs a function in a daemon thread: a process that stops need not wait for what it compiles."""

    NAME = 'background compilation'

    def __init__(self, function: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._error: list[BaseException] = []

        def call() -> None:
            try:
                self._outcome.append(function())
            except BaseException as error:  # raised again where the result is wanted
                self._error.append(error)

        self._thread = threading.Thread(target=call, name=self.NAME, daemon=True)
        self._thread.start()

    def result(self, keep_waiting: Callable[[], bool]) -> Any:
        """What the function returned or raised; None if `keep_waiting` turns false before it is done."""
        while self._thread.is_alive():
            if not keep_waiting():
                return None
            self._thread.join(0.1)
        if self._error:
            raise self._error[0]
        return self._outcome[0]
