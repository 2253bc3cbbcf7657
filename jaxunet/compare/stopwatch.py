"""Divides wall-clock time among activities, so that a study can say what it cost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Stopwatch:
    """Counts the seconds of each activity. At most one activity runs at a time.

    Args:
      now: returns the current time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._since = now, now()
        self._activity = ''
        self._seconds: dict[str, float] = {}

    def start(self, activity: str) -> None:
        """Ends the present activity and starts another; '' = none."""
        now = self._now()
        if self._activity:
            self._seconds[self._activity] = (
                self._seconds.get(self._activity, 0.0) + now - self._since
            )
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
