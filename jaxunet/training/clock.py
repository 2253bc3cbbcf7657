"""Measures training time, and defines the training times at which something happens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxunet.model.unet import Params
from jaxunet.runtime.errors import UserError


def due(every: int, step: int, last: int) -> bool:
    """Returns True every so many steps and after the last step; never if `every` is 0."""
    return every > 0 and (step % every == 0 or step == last)


class Clock:
    """Measures the time of training steps, without compiling and pauses.

    Args:
      step: the step that the run starts from.
      seconds: training time of the run so far, from its checkpoint.
      now: returns the current time in seconds.
    """

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


def _ignore() -> None:
    """Does nothing."""


def _always() -> bool:
    """Returns True."""
    return True


class PassedError(UserError):
    """A run that would resume has passed a milestone whose weights are gone."""


@dataclass(frozen=True)
class Milestones:
    """Training times at which a run of one process is inspected; it ends after the last.

    Attributes:
      seconds: the times, ascending.
      reached: called with the step, the training time in seconds, the averages of the weights by
        their names in the training state, on this process's first device, and a function that
        returns True once a signal has asked the run to stop. The clock is paused meanwhile.
      step_seconds: fixed seconds of a step, such as its time measured alone, for runs that share a
        device. 0 = training time is measured.
      saves: the run writes a checkpoint at each milestone, before `reached` is called, and when it
        is stopped, and resumes from it. Otherwise it saves nothing.
      keep_on: asked before each call of the step; False stops the run.
      compiled: called once the step is compiled.
      saving: called before a checkpoint is written.
      interrupted: called before a signal ends the process, because no step was trained yet. The
        main thread goes on meanwhile.
    """

    seconds: tuple[float, ...]
    reached: Callable[[int, float, dict[str, Params], Callable[[], bool]], None]
    step_seconds: float = 0.0
    saves: bool = False
    keep_on: Callable[[], bool] = _always
    compiled: Callable[[], None] = _ignore
    saving: Callable[[], None] = _ignore
    interrupted: Callable[[], None] = _ignore

    def time(self, step: int, measured: float) -> float:
        """Returns the training time at a step; `measured` is that of the clock."""
        return self.step_seconds * step if self.step_seconds else measured

    def check(self, step: int, measured: float, milestone: float | None) -> None:
        """Checks that a run that starts at a step still comes to all milestones.

        Args:
          step: that of its checkpoint; 0 for a fresh run.
          measured: training time of the checkpoint, by the clock.
          milestone: the milestone at which the checkpoint was saved, whose weights it still has.

        Raises:
          PassedError: it has passed one of them.
        """
        now = self.time(step, measured)
        for seconds in self.seconds if step else ():
            if seconds <= now and seconds != milestone:
                raise PassedError(
                    f'the checkpoint is of {now:.1f} s of training, and no longer has the weights '
                    f'of {seconds:g} s'
                )


NO_MILESTONES = Milestones((), lambda step, seconds, averages, asked: None, saves=True)
