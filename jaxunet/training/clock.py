"""Measures training time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


def due(every: int, step: int, last: int) -> bool:
    """Returns True every so many steps and after the last step; never if `every` is 0."""
    return every > 0 and (step % every == 0 or step == last)


class Clock:
    """Measures the time of training steps, without compiling and pauses.

    Args:
      step: the step that the run starts from.
      seconds: training time of the run so far, from its checkpoint.
      now: returns the current time in seconds.

    Attributes:
      step_seconds: seconds that a step counts in `trained`, such as its time measured alone, for
        runs that share a device; 0 = its training time is measured.
    """

    step_seconds = 0.0

    def __init__(
        self, step: int, seconds: float = 0.0, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now, self._step = now, step
        self._lap_from, self._before = seconds, seconds
        self._since, self._until = now(), math.inf  # when it started, and was paused

    @property
    def seconds(self) -> float:
        """Training time of the run, that of earlier processes included."""
        return self.at(self._now())

    def at(self, time: float) -> float:
        """Returns `seconds` as they were at a time of `now` since the clock last started."""
        return self._before + min(time, self._until) - self._since

    def trained(self, step: int, time: float | None = None) -> float:
        """Returns the training time of a step, done at a time of `now` (default: just now)."""
        if self.step_seconds:
            return self.step_seconds * step
        return self.at(self._now() if time is None else time)

    def lap(self, step: int, done: float) -> tuple[float, int]:
        """Returns the seconds and steps since the last lap; `step` was done at a time of `now`."""
        seconds = self.at(done)
        lap = seconds - self._lap_from, step - self._step
        self._lap_from, self._step = seconds, step
        return lap

    def pause(self) -> None:
        """Stops the clock, unless it is stopped."""
        self._until = min(self._until, self._now())

    def resume(self) -> None:
        """Starts the clock again."""
        self._before, self._since, self._until = self.seconds, self._now(), math.inf
