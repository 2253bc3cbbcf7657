"""Wall-clock time: divided among activities, to say what a comparison costs, and limited."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator


class Stopwatch:
    """Counts the seconds of each activity. At most one activity runs at a time."""

    def __init__(self) -> None:
        self._activity, self._since = '', time.perf_counter()
        self._seconds: dict[str, float] = {}

    def start(self, activity: str) -> None:
        """Ends the present activity and starts another; '' = none."""
        now, last = time.perf_counter(), self._activity
        if last:
            self._seconds[last] = self._seconds.get(last, 0.0) + now - self._since
        self._activity, self._since = activity, now

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Counts the time of the block for `activity`, then resumes the activity before it."""
        before = self._activity
        self.start(activity)
        try:
            yield
        finally:
            self.start(before)

    def take(self) -> dict[str, float]:
        """Returns the seconds by activity since the last call."""
        self.start(self._activity)
        seconds, self._seconds = self._seconds, {}
        return seconds


@dataclasses.dataclass(frozen=True)
class Limit:
    """The time limit of a command, which decides if training may begin or go on.

    Fields:
      seconds: time limit of the command.
      reserve: seconds of it that a job leaves for compiling, and for saving or measuring.
      shared_by: processes that share the GPU.
      slowdown: expected training time of a job, divided by its time alone on the GPU; 0 =
        `shared_by`.
      began: `time.perf_counter()` at the start of the command.
    """

    seconds: float
    reserve: float = 0.0
    shared_by: int = 1
    slowdown: float = 0.0
    began: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.seconds - (time.perf_counter() - self.began)

    def allows(self, seconds: float, measuring: float = 0.0) -> bool:
        """Returns True if this much training and measuring, in seconds, fits into the time left."""
        return seconds * (self.slowdown or self.shared_by) + measuring + self.reserve <= self.left
