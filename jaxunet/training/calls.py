"""The calls of the compiled step that are queued, and when each of them was done."""

from __future__ import annotations

import collections
import concurrent.futures
import time
from typing import NamedTuple

import jax

from jaxunet.training.step import Metrics


class Call(NamedTuple):
    """One call of the compiled step.

    Attributes:
      step: the step that it reaches.
      metrics: of its steps, on one device.
      done: the time at which it was done, by `time.perf_counter`; its errors are those of the call.
    """

    step: int
    metrics: Metrics
    done: concurrent.futures.Future[float]


class Calls:
    """The calls whose metrics have not been read, oldest first.

    A thread notes when each is done. The thread that starts calls would often be too late for that:
    on several GPUs, it waits until all of them have started the next call.
    """

    def __init__(self) -> None:
        self._queue: collections.deque[Call] = collections.deque()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, 'calls')

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def newest(self) -> Call:
        """The call that was added last, which must not have been taken."""
        return self._queue[-1]

    def add(self, step: int, metrics: Metrics) -> None:
        """Adds a call that was started just now."""
        self._queue.append(Call(step, metrics, self._thread.submit(_time_when_done, metrics)))

    def take(self) -> Call:
        """Removes the oldest call, and returns it."""
        return self._queue.popleft()

    def close(self) -> None:
        """Ends the thread, once all calls are done."""
        self._thread.shutdown()


def _time_when_done(metrics: Metrics) -> float:
    jax.block_until_ready(metrics)
    return time.perf_counter()
