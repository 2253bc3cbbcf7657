"""Calls a logger in a thread, so that a slow or failing one costs the training steps nothing."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping, Sequence

import numpy as np
from absl import logging

from jaxunet.runtime.untrusted import one_line
from jaxunet.training.loggers.interface import Logger, RunStart

WAITING = 1000  # most calls that wait for the thread
CLOSE_SECONDS = 60.0  # longest wait for the thread at the end of a run


class BesideSteps(Logger):
    """A logger whose methods a thread calls, one after another.

    The first failure is a warning, and further ones are silent. After a failed `start` nothing more
    is logged; otherwise later calls are tried.

    Args:
      name: its name in `train.loggers`.
    """

    in_loop = True

    def __init__(self, name: str, logger: Logger) -> None:
        self._name, self._logger = name, logger
        self._calls: queue.Queue[tuple[str, tuple[object, ...]]] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name=f'logger {name}', daemon=True)
        self._warned = False

    def start(self, run: RunStart) -> None:
        """Begins the log in the thread."""
        self._put('start', run)
        self._thread.start()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._put('metrics', step, dict(values))

    def image(self, step: int, name: str, picture: np.ndarray) -> None:
        self._put('image', step, name, picture)

    def table(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        self._put('table', name, rows)

    def close(self) -> None:
        """Waits until everything is logged, but not for much longer than `CLOSE_SECONDS`."""
        with contextlib.suppress(queue.Full):
            self._calls.put(('close', ()), timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn(f'has not finished within {CLOSE_SECONDS:g} s; the rest may be lost')

    def _put(self, method: str, *arguments: object) -> None:
        try:
            self._calls.put_nowait((method, arguments))
        except queue.Full:
            self._warn(f'takes too long; {WAITING} values wait for it, and later ones are lost')

    def _work(self) -> None:
        method, works = '', True
        while method != 'close':
            method, arguments = self._calls.get()
            if not works:
                continue
            try:
                getattr(self._logger, method)(*arguments)
            except (Exception, SystemExit) as error:
                works = method != 'start'
                self._warn(
                    f'{method} failed ({type(error).__name__}: {one_line(error)}); the run goes '
                    f'on {"and tries later values" if works else "without it"}'
                )

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            logging.warning('train.loggers: %s: %s', self._name, what)
