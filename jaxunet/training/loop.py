"""The training loop: runs steps, and schedules logging, sampling, evaluating, saving and stopping.

`Loop.run` finds where the run starts, compiles the step while a fresh state is drawn, and calls it
until the last step or until it is asked to stop; between calls it does what is due. The `Subject`
says what is trained: its `Session` runs the steps, its `Outputs` and a `Saver` write the results.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import time
from typing import Protocol

import jax
import numpy as np
from tqdm import tqdm

from jaxunet.checkpoint.meta import RunFacts
from jaxunet.checkpoint.newest import newest_classes
from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config
from jaxunet.data.source import Source, with_class_order
from jaxunet.model.unet import Params
from jaxunet.runtime.attempts import quietly
from jaxunet.runtime.distributed import agree, of_process_0, wait_for_others
from jaxunet.runtime.jax_settings import fixed_jax_settings
from jaxunet.runtime.progress import progress_bar
from jaxunet.training.budget import fitted
from jaxunet.training.calls import Calls
from jaxunet.training.clock import Clock, due
from jaxunet.training.parallel import Data, stop_asked
from jaxunet.training.preemption import Caller
from jaxunet.training.replicas import Replicas
from jaxunet.training.resume import StartingPoint, how_to_go_on, with_image_count
from jaxunet.training.rollback import TooManySkippedError, with_rollbacks
from jaxunet.training.saving import Saver, save_on_error
from jaxunet.training.stalls import StallWatch
from jaxunet.training.subject import Due, Outputs, Subject
from jaxunet.training.unet import UNetSubject
from jaxunet.training.workdir import Lock, opened


@fixed_jax_settings()
def train(
    config: Config,
    workdir: pathlib.Path,
    source: Source,
    initial: TrainState | None = None,
    hook: Hook | None = None,
    caller: Caller | None = None,
) -> int:
    """Trains until `train.steps`, or for `train.minutes`, or until the caller asks it to stop.

    Args:
      workdir: gets checkpoints, logs and samples. A run that it holds is resumed.
      source: the images (`jaxunet.data.sources.open_images`).
      initial: numpy state for a workdir without checkpoints; None starts with fresh weights.
      hook: looks into a run of one process between its steps, ends it and saves it.
      caller: asks the run to stop, and hears of it: a command passes `Preemption`.

    Returns the step reached, which is saved.

    Raises:
      UserError: the workdir holds another run, the data does not fit the config, too many steps in
        a row were not finite, or the last checkpoint could not be written.
      OutOfMemoryError: no memory is left. What was trained is saved, unless the step itself failed.
    """
    if hook and jax.process_count() > 1:
        raise ValueError('hook: expected a run of one process, found several')
    source = with_class_order(source, newest_classes(workdir))
    images: Data = {}  # of all sessions of the run: of timing its step, and after each rollback
    with opened(workdir) as lock, caller or Caller() as preemption:
        config = config if hook else fitted(config, workdir, source, images)

        def run(failed: TooManySkippedError | None) -> int:
            subject = UNetSubject(config, workdir, source, initial, images)
            return Loop(subject, lock, preemption, hook).run(failed)

        return with_rollbacks(run, limit=0 if hook else config.train.rollbacks)


class Hook(Protocol):
    """Ends a run, even one that has no steps left, and saves it, in place of the loop."""

    def between(self, run: Loop) -> bool:
        """Called before the first call of the step and after each; False ends the run."""

    def save(self, run: Loop) -> None:
        """Called before an error ends the run: saves what shall be kept."""


class Loop:
    """The run of a subject.

    Attributes:
      step: the step reached by the calls made so far, which may still be running.
      facts: about the run, as of the checkpoint that it resumes from.
      rollbacks: number of times that the run has gone back to an earlier checkpoint.
      calls: those whose metrics have not been read.
      stop: all processes of the run have seen that one of them was asked to stop.
      saver: writes checkpoints and snapshots.
      watch: waits for the devices.
      outputs: writes everything else, on process 0; None on the others.
    """

    step: int
    facts: RunFacts
    rollbacks: int
    saver: Saver
    clock: Clock
    watch: StallWatch
    bar: tqdm

    def __init__(
        self, subject: Subject, lock: Lock, preemption: Caller, hook: Hook | None = None
    ) -> None:
        self.subject, self.config, self.workdir = subject, subject.config, subject.workdir
        self.lock, self.preemption, self.hook = lock, preemption, hook
        self.main, self.alone = jax.process_index() == 0, jax.process_count() == 1
        self.session, self.checkpoints = subject.session, subject.checkpoints
        self.replicas = Replicas(self.config, self.session.parallel)
        self.outputs: Outputs | None = None
        self.calls = Calls()
        self.stop = False

    def run(self, failed: TooManySkippedError | None = None) -> int:
        """Trains, and returns the step reached; `failed` as in `starting_point`."""
        config, total = self.config, self.config.train.steps
        with contextlib.ExitStack() as stack:
            stack.callback(quietly, 'checkpoints', self.checkpoints.close)
            begin = with_image_count(self.subject.start(failed), self.subject.source)
            self.step, self.facts, self.rollbacks = begin.step, begin.facts, begin.facts.rollbacks
            agree({'the step to resume from': self.step})
            if failed and self.main:
                self.checkpoints.set_aside_after(self.step)
            if not self.hook and self.step >= total and not (self.alone and any(self._missing())):
                self.subject.finish(begin)
                print(how_to_go_on(config, self.workdir, self.step))
                return self.step
            session = self.session
            self.watch = StallWatch(
                config.train.stall_seconds, self.workdir, self.preemption.stalled
            )
            stack.callback(self.watch.close)
            stack.callback(self.calls.close)
            stack.callback(quietly, 'images', lambda: self.watch.call(session.close))
            session.expect(begin.shapes, self.step, progress=self.main)
            self.saver = Saver(
                self.subject, begin, self.lock, snapshots=self.hook is None, warn=self._warn
            )
            stack.callback(quietly, 'snapshots', self.saver.close)
            session.open_stream()
            agree({'the steps per call': session.steps_per_call})
            self.bar = stack.enter_context(
                progress_bar(
                    total=None if self.hook else total,
                    initial=self.step,
                    unit='step',
                    disable=not self.main,
                )
            )
            if self.main:
                self.outputs = self.subject.open_outputs(begin, self.bar, self.preemption)
                stack.callback(quietly, 'logs', self.outputs.close)
            if self.asked and self.alone and self.hook is None:
                return self.step  # nothing to save; compiling may take minutes
            self._compile(begin)
            del begin  # its state is a second copy of all weights, in this machine's memory
            # Training time leaves out how much longer other processes compile.
            wait_for_others('compiled the step')
            self.clock = Clock(self.step, self.facts.seconds)
            # Objects that exist now stay: collecting them again would stall the loop for 0.1 s.
            gc.freeze()
            self._write_missing()
            self._train()
        if self.hook is None:
            self.saver.check()
        if self.outputs:
            self.outputs.check()
        return self.step

    def _warn(self, text: str) -> None:
        self.bar.write(text)

    def _compile(self, begin: StartingPoint) -> None:
        """Compiles the step while the state may still be drawn, then puts it on the devices."""
        self.bar.set_description('compiling')
        began = time.perf_counter()
        self.session.compile(cache=True)
        devices = self.session.parallel.devices
        self.bar.write(
            f'compiled the step in {time.perf_counter() - began:.1f} s; {len(devices)} x '
            f'{devices[0].device_kind}, {self.config.parallel.mode}'
        )
        self.session.put(begin.state())
        if self.outputs:
            self.outputs.start_compiling()
        self.bar.set_description('training')

    def _train(self) -> None:
        """Runs steps until the last one, or until the caller or the hook ends the run."""
        more = self._goes_on()
        self.bar.unpause()  # its speed and remaining time leave out compiling
        while more and self.step < self.config.train.steps:
            self._call()
            self._do_what_is_due()
            more = self._goes_on()
        self._read_metrics()
        if self.step < self.config.train.steps and self.hook is None:
            self.save()
            self.say_stopped()
        self.saver.wait()

    def _goes_on(self) -> bool:
        stop = self.asked if self.alone else self.stop
        return self.hook.between(self) if self.hook else not stop

    def _call(self) -> None:
        """Queues the next call of the compiled step, and reads the metrics of an earlier one."""
        session = self.session
        with self._save_on_error():
            data = session.next_data()
            metrics = self.watch.call(session.call, data, stop=self.preemption.requested)
            self.step += session.steps_per_call
            self.calls.add(self.step, session.parallel.shards(metrics))
        self._read_metrics(leave=session.calls_ahead)
        self.preemption.nothing_to_save = False

    def _do_what_is_due(self) -> None:
        """Saves, samples and evaluates, each if it is due after this step."""
        train = self.config.train
        save, check = self._due(train.checkpoint_every), self._due(train.check_replicas_every)
        snapshot, outputs = self.saver.snapshot_due(self.step), self.subject.due(self.step)
        work = save or check or snapshot or any(outputs)
        if (work or self._due(train.log_every)) and self.lock.why_lost():
            self.outputs = None  # they would go to another run's folder
            with self._save_on_error():
                self.lock.check()
        if not work:
            return
        self._wait()
        if check or save:
            self._check_replicas()
        if snapshot:
            self.saver.snapshot(self.step)
        weights = self._weights() if outputs.held_out else None
        if weights is not None and self.outputs:
            with self._save_on_error():
                self.outputs.measure_held_out(self.step, weights)
            del weights
        self._read_metrics()  # logs this step, with its held-out loss
        if save and self.hook is None:  # a hook saves by itself
            self._write_checkpoint()
        self._show(outputs)
        self.clock.resume()

    def _wait(self) -> None:
        """Waits for the steps that have begun, and stops the clock."""
        if self.calls:
            self._read_metrics(leave=1)
            with self._save_on_error():
                self.watch.wait(self.calls.newest.metrics)
        self.clock.pause()

    @property
    def asked(self) -> bool:
        """The caller has asked the run to stop."""
        return self.preemption.requested

    @property
    def seconds(self) -> float:
        """Training time of the step reached."""
        return self.clock.trained(self.step)

    def pause(self) -> None:
        """Waits for the steps that have begun, logs them, and stops the clock."""
        self._wait()
        self._read_metrics()

    def resume(self) -> None:
        """Starts the clock again."""
        self.clock.resume()

    def averages(self) -> dict[str, Params]:
        """Returns the averages of the weights by their names in the state, on one device."""
        return self.session.parallel.local(self.session.state.ema)

    def save(self, milestone: float | None = None) -> None:
        """Starts writing a checkpoint of the step reached, unless it is `saved`.

        Args:
          milestone: the training time that has just been reached, for `facts`.
        """
        self.clock.pause()
        self._check_replicas()
        saved = self.saved
        if self.session.parallel.fetch_is_collective:  # files may reach the other processes later
            (saved,) = of_process_0([saved])
        if not saved:
            self._write_checkpoint(milestone)

    @property
    def saved(self) -> bool:
        """The newest checkpoint is of the step reached."""
        return self.checkpoints.latest() == self.step

    def say_stopped(self) -> None:
        """Says that the run was asked to stop, and is saved."""
        self.bar.write(f'stopped at step {self.step}; the same command resumes from there')

    def _write_checkpoint(self, milestone: float | None = None) -> None:
        if self.outputs and not self.lock.why_lost():
            self.outputs.before_checkpoint(lambda: self.session.parallel.fetch(self.session.state))
        self.saver.save(self.step, self.clock.seconds, milestone)

    def _show(self, what: Due) -> None:
        weights = self._weights() if what.samples or what.metrics else None
        if weights is not None and self.outputs:
            with self._save_on_error():
                self.outputs.show(self.step, what, weights, self.seconds)

    def _missing(self) -> Due:
        """Returns the outputs that an earlier process did not write at the resumed step.

        Other processes than the first return none, unless all must help to write them.
        """
        missing = self.subject.missing(self.step) if self.main and self.saved else Due()
        if self.session.parallel.fetch_is_collective:
            return Due(*of_process_0(missing))
        return missing

    def _write_missing(self) -> None:
        self.clock.pause()
        self._show(self._missing())
        self.clock.resume()

    def _due(self, every: int) -> bool:
        return due(every, self.step, self.config.train.steps)

    def _read_metrics(self, leave: int = 0) -> None:
        """Waits for the oldest calls until `leave` are left, and logs their metrics.

        Raises:
          TooManySkippedError: too many steps in a row were skipped.
        """
        train = self.config.train
        while len(self.calls) > leave:
            step, metrics, done = self.calls.take()
            # Read after the same number of calls in each process, so all stop at the same step.
            with self._save_on_error():
                self.watch.wait(metrics)  # numpy would crash on those of a step that failed
            self.stop |= stop_asked(metrics)
            bad = int(np.ravel(metrics['bad_steps']).max())
            self.bar.update(self.session.steps_per_call)
            if bad >= train.max_bad_steps:
                raise TooManySkippedError(
                    self.config, step, bad, self.checkpoints.latest(), self.rollbacks
                )
            if due(train.log_every, step, train.steps):
                elapsed, steps = self.clock.lap(step, done.result())
                if self.outputs and not self.lock.why_lost():
                    last = jax.tree.map(lambda x: np.ravel(x)[-1], metrics)
                    seconds = self.clock.trained(step, done.result())
                    self.outputs.log(step, last, elapsed / steps, seconds)

    def _save_on_error(self) -> contextlib.AbstractContextManager[None]:
        return save_on_error(self.session, self.saver, self._save_all)

    def _save_all(self) -> None:
        """Saves what is not saved; in a run of several processes, without asking the others."""
        self._read_metrics()
        if self.session.parallel.fetch_is_collective:
            self._warn(
                'warning: nothing more is saved: a process has only parts of the state '
                '(parallel.shard_optimizer); the same command resumes from the last checkpoint'
            )
            return
        if not self.alone and self.config.train.check_replicas_every:
            return  # nothing is saved unchecked, and a check needs all processes
        if self.hook:
            self.hook.save(self)
        else:
            self.save()
        self.saver.wait()

    def _check_replicas(self) -> None:
        saved = self.checkpoints.latest()
        self.watch.call(self.replicas.check, self.session.state, self.step, saved)

    def _weights(self) -> Params | None:
        """Returns the weights to measure, on this process's first device.

        None on a process that measures nothing and has no parts that another one needs.
        """
        parallel = self.session.parallel
        if not (self.outputs or parallel.fetch_is_collective):
            return None
        return parallel.local(self.subject.weights(self.session.state))
