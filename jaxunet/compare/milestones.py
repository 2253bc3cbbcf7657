"""Training times at which a run is inspected; the run ends after the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxunet.model.unet import Params
from jaxunet.runtime.errors import UserError
from jaxunet.training.loop import Loop


class PassedError(UserError):
    """A run that would resume has passed a milestone whose weights are gone."""


@dataclass
class Milestones:
    """A hook of a run (`jaxunet.training.loop.Hook`) that ends it by training time.

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
    """

    seconds: tuple[float, ...]
    reached: Callable[[int, float, dict[str, Params], Callable[[], bool]], None]
    step_seconds: float = 0.0
    saves: bool = False
    keep_on: Callable[[], bool] = lambda: True
    compiled: Callable[[], object] = lambda: None
    saving: Callable[[], object] = lambda: None
    _run: Loop | None = field(default=None, init=False)
    _left: list[float] = field(default_factory=list, init=False)

    def between(self, run: Loop) -> bool:
        """Saves and reports the next milestone if the run has come to it.

        Returns False after the last one, or if the run was asked to stop; it is saved then.

        Raises:
          PassedError: the run resumes, and has passed a milestone.
        """
        if run is not self._run:
            self._begin(run)
        elif self._due(run):
            run.pause()
            self._save(run)
            self._report(run)
        if not self._left:
            return False
        if not run.asked and self.keep_on():
            return True
        run.pause()
        if self.saves:
            self._save(run)
            run.say_stopped()
            run.saver.wait()
            run.saver.check()
        return False

    def save(self, run: Loop) -> None:
        """Saves a run that an error ends."""
        run.clock.pause()
        self._save(run)

    def _begin(self, run: Loop) -> None:
        """Starts counting; reports the milestone of the checkpoint that the run resumes from.

        An earlier process may have died before it was done with that milestone.
        """
        run.clock.step_seconds = self.step_seconds
        run.pause()
        at, now = run.facts.milestone, self.step_seconds * run.step or run.facts.seconds
        for seconds in self.seconds if run.step else ():
            if seconds <= now and seconds != at:
                raise PassedError(
                    f'the checkpoint is of {now:.1f} s of training, and no longer has the weights '
                    f'of {seconds:g} s'
                )
        self._run, self._left = run, list(self.seconds)
        self.compiled()
        if at in self._left:
            self._report(run)
        else:
            run.resume()

    def _due(self, run: Loop) -> float | None:
        """Returns the first milestone that is left, if the training time has come to it."""
        return self._left[0] if self._left and run.seconds >= self._left[0] else None

    def _save(self, run: Loop) -> None:
        """Saves the step reached, unless it is saved.

        Waiting for the queued steps may have taken the clock past a milestone.
        """
        if self.saves and not run.saved:
            self.saving()
            run.save(self._due(run))

    def _report(self, run: Loop) -> None:
        """Reports the first milestone that is left, and starts the clock again."""
        self._left.pop(0)
        self.reached(run.step, run.seconds, run.averages(), lambda: run.asked)
        run.resume()
