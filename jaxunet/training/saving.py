"""Writes the checkpoints of a run, and the snapshots of its averages, beside the training steps.

If training ends with an error, the run is still saved, provided that its state is good.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator

import jax

from jaxunet.checkpoint.snapshots import SnapshotWriter, spacing
from jaxunet.checkpoint.store import CheckpointWriteError
from jaxunet.runtime.attempts import quietly
from jaxunet.runtime.distributed import end
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.out_of_memory import OutOfMemoryError, memory_for
from jaxunet.training.resume import StartingPoint
from jaxunet.training.session import STEP_MEMORY, Session
from jaxunet.training.subject import Subject
from jaxunet.training.workdir import Lock


class Saver:
    """Saves the state of a session, on process 0; the other processes write nothing.

    A write that fails is a warning, and the next checkpoint tries again. `check` raises the error
    of the last one.

    Args:
      subject: with its session's steps per call known.
      begin: where the run starts; its state is not kept.
      lock: on the workdir.
      snapshots: write snapshots, if the config has `ema.widths`.
      warn: shows a line to the user.
    """

    def __init__(
        self,
        subject: Subject,
        begin: StartingPoint,
        lock: Lock,
        *,
        snapshots: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._checkpoints, self._session = subject.checkpoints, subject.session
        self._config, self._lock, self._warn = subject.config, lock, warn
        self._facts = begin.facts
        self._main = jax.process_index() == 0
        self._failure = ''  # why the last checkpoint could not be written
        # On every process, so that all read as many calls before a snapshot.
        self._snapshot_every = (
            spacing(self._config, self._session.steps_per_call) if snapshots else 0
        )
        self._snapshots = (
            SnapshotWriter(subject.workdir, self._config, begin.step)
            if self._snapshot_every and self._main
            else None
        )

    def close(self) -> None:
        """Waits for a snapshot in progress and ends its thread."""
        if self._snapshots is not None:
            self._snapshots.close()

    def snapshot_due(self, step: int) -> bool:
        """Returns True if a snapshot is to be taken after this step, on all processes alike."""
        return self._snapshot_every > 0 and step % self._snapshot_every == 0

    def snapshot(self, step: int) -> None:
        """Starts writing a snapshot of the power-function averages."""
        if self._snapshots is None and not self._session.parallel.fetch_is_collective:
            return
        state = self._session.state
        averages = {name: state.ema[name] for name in self._config.ema.width_names}
        skipped, averages = self._session.parallel.fetch((state.skipped, averages))
        if self._snapshots is not None:
            self._show(self._snapshots.write(step, step - int(skipped), averages))

    def save(self, step: int, seconds: float, milestone: float | None = None) -> None:
        """Starts writing a checkpoint, once the snapshots before it are on disk.

        Every process must call it if `Parallel.fetch_is_collective`, as it must `snapshot`.

        If the workdir has been moved, it is written where the workdir is now; if another is in its
        place, nothing is written. Both are errors of `check`.

        Args:
          seconds: training time so far.
          milestone: the training time that a hook waits for and that has just been reached.
        """
        if not self._main:
            if self._session.parallel.fetch_is_collective:
                self._session.parallel.fetch(self._session.state)
            return
        self._wait_for_snapshots()
        state = self._session.parallel.fetch(self._session.state)
        self._failure = self._lock.why_lost()
        if self._failure and self._lock.moved_to() is None:
            self._show(self._failure)
            return
        facts = dataclasses.replace(self._facts, seconds=seconds, milestone=milestone)
        try:
            warning = self._checkpoints.save(step, state, self._config, facts)
        except CheckpointWriteError as error:
            warning = self._failure = str(error)
        self._show(warning)

    def latest(self) -> int | None:
        """Returns the step of the newest checkpoint, or None."""
        return self._checkpoints.latest()

    def wait(self) -> None:
        """Waits until everything is on disk; `check` raises the error of a checkpoint."""
        self._wait_for_snapshots()
        try:
            self._checkpoints.wait()
        except CheckpointWriteError as error:
            self._failure = str(error)

    def check(self) -> None:
        """Raises `CheckpointWriteError` if the last checkpoint could not be written."""
        if self._failure:
            raise CheckpointWriteError(self._failure)

    def _wait_for_snapshots(self) -> None:
        if self._snapshots is not None:
            self._show(self._snapshots.wait())

    def _show(self, warning: str) -> None:
        if warning:
            self._warn(f'warning: {warning}')


@contextlib.contextmanager
def save_on_error(session: Session, saver: Saver, save: Callable[[], object]) -> Iterator[None]:
    """Saves all trained steps if the block raises a UserError, such as for a corrupt image.

    If the block runs out of memory and does not say for what, the error names the training step.
    A training step that fails this way leaves no state to save: it has overwritten the one before.

    Args:
      save: saves what is not saved; its own errors are warnings.
    """
    try:
        with memory_for(*STEP_MEMORY):
            yield
    except UserError as error:
        if isinstance(error, OutOfMemoryError) and not session.is_whole():
            quietly('checkpoints', saver.wait)
            step = saver.latest()
            saved = 'there is no checkpoint yet' if step is None else f'step {step} is saved'
            raise OutOfMemoryError(f'{error}; {saved}') from None
        quietly('saving what was trained', save)
        raise


@contextlib.contextmanager
def write_error_ends() -> Iterator[None]:
    """Ends the process if the block raises a `CheckpointWriteError`, with one line.

    It is written in one piece and on a line of its own, as threads of the storage library may be
    printing tracebacks at this moment.
    """
    try:
        yield
    except CheckpointWriteError as error:
        sys.stderr.flush()
        os.write(2, f'\nerror: {error}\n'.encode())
        end(error.exit_code)
