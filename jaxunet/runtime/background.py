"""Runs a function in a thread, beside the main thread of a command."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, TypeVar

Result = TypeVar('Result')
WAIT_SECONDS = 0.1  # seconds between two calls of `keep_waiting`


class Background(Generic[Result]):
    """Runs a function in a daemon thread.

    Python waits for it at exit, as it may crash where Python ends beside such a thread; a command
    (`jaxunet.runtime.command.run`) ends at once instead.

    Args:
      function: called at once, in the thread.
    """

    _all_running: ClassVar[set[Background[Any]]] = set()

    def __init__(self, function: Callable[[], Result]) -> None:
        self._future = Future[Result]()

        def call() -> None:
            try:
                self._future.set_result(function())
            except BaseException as error:  # raised again by `result`
                self._future.set_exception(error)
            finally:
                self._all_running.discard(self)

        self._thread = threading.Thread(target=call, name='background', daemon=True)
        self._all_running.add(self)  # first, because the function may end before `start` returns
        try:
            self._thread.start()
        except Exception:  # but not Ctrl-C, after which the thread may still run
            self._all_running.discard(self)
            raise

    @classmethod
    def running(cls) -> bool:
        """Returns True while the function of any `Background` of this process runs."""
        return bool(cls._all_running)

    def abandon(self) -> None:
        """Makes nothing wait for the end of the function at exit, as it may never come."""
        self._all_running.discard(self)

    def result(self, keep_waiting: Callable[[], bool]) -> Result | None:
        """Waits for the result of the function; returns None if `keep_waiting` returns False first.

        Raises whatever the function raised.
        """
        while self._thread.is_alive():
            if not keep_waiting():
                return None
            self._thread.join(WAIT_SECONDS)
        return self.wait()

    def wait(self) -> Result:
        """Waits for the result of the function, and returns it.

        Raises whatever the function raised.
        """
        self._thread.join()
        return self._future.result()


@atexit.register
def _wait_for_all() -> None:
    for background in list(Background._all_running):
        background._thread.join()
