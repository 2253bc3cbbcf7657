"""Wall-clock of training alone, and what is to be done when it reaches certain times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxunet.model.unet import Params


class Clock:
    """Time of the steps alone: compiling, and what is done between `pause` and `go_on`, do not count.

    Args:
      step: the run goes on from.
      seconds: that earlier processes of the run have trained, from its checkpoint.
      now: tells the time.
    """

    def __init__(
        self, step: int, seconds: float = 0.0, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now, self._step = now, step
        self._lap_from, self._before = seconds, seconds
        self._running_since: float | None = now()

    @property
    def seconds(self) -> float:
        """Of training, in all."""
        return self._before + (
            self._now() - self._running_since if self._running_since is not None else 0.0
        )

    def lap(self, step: int) -> tuple[float, int]:
        """Seconds and steps since the lap before."""
        seconds = self.seconds
        lap = seconds - self._lap_from, step - self._step
        self._lap_from, self._step = seconds, step
        return lap

    def pause(self) -> None:
        self._before, self._running_since = self.seconds, None

    def go_on(self) -> None:
        self._running_since = self._now()


@dataclass(frozen=True)
class Milestones:
    """Times of training at which a run, of one process, is looked at; it ends after the last.

    Fields:
      seconds: ascending.
      reached: is given the step, the seconds of training, and the first average of the weights, on this process's first device; the
        clock stands still meanwhile.
    """

    seconds: tuple[float, ...]
    reached: Callable[[int, float, Params], None]
