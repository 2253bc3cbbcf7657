"""The training loop: runs steps, and schedules logging, sampling, evaluating, saving and stopping.

Steps run in a `Session`; `Outputs` and `Saver` write the results. So that the device rarely waits
for Python, `Session.calls_ahead` calls are queued before the metrics of the oldest are read.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import time

import jax
import numpy as np
from tqdm import tqdm

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.newest import newest_classes
from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config
from jaxunet.data.source import Source, in_order_of
from jaxunet.model.unet import Params
from jaxunet.runtime.attempts import quietly
from jaxunet.runtime.distributed import agree, wait_for_others
from jaxunet.runtime.own_types import own_types
from jaxunet.runtime.progress import progress_bar
from jaxunet.training.calls import Calls
from jaxunet.training.clock import NO_MILESTONES, Clock, Milestones, due
from jaxunet.training.evaluation import Evaluator
from jaxunet.training.outputs import Missing, Outputs, missing_outputs
from jaxunet.training.parallel import stop_asked
from jaxunet.training.preemption import Caller
from jaxunet.training.replicas import Replicas
from jaxunet.training.resume import StartingPoint, how_to_go_on, keep_images, starting_point
from jaxunet.training.rollback import TooManySkippedError, with_rollbacks
from jaxunet.training.saving import Saver, save_on_error
from jaxunet.training.session import Session
from jaxunet.training.stalls import StallWatch
from jaxunet.training.workdir import Lock, opened


@own_types()
def train(
    config: Config,
    workdir: pathlib.Path,
    source: Source,
    initial: TrainState | None = None,
    milestones: Milestones | None = None,
    caller: Caller | None = None,
) -> int:
    """Trains until `train.steps`, or until the caller asks it to stop.

    Args:
      workdir: gets checkpoints, logs and samples. A run that it holds is resumed.
      source: the images (`jaxunet.data.sources.open_images`).
      initial: numpy state for a workdir without checkpoints; None starts with fresh weights.
      milestones: times that end a run of one process, which saves only what they say.
      caller: asks the run to stop, and hears of it: a command passes `Preemption`.

    Returns the step reached, which is saved.

    Raises:
      PassedError: the run has passed a milestone without reporting it.
      UserError: the workdir holds another run, the data does not fit the config, too many steps in
        a row were not finite, or the last checkpoint could not be written.
      OutOfMemoryError: no memory is left. What was trained is saved, unless the step itself failed.
    """
    if milestones and jax.process_count() > 1:
        raise ValueError('milestones: expected a run of one process, found several')
    source = in_order_of(source, newest_classes(workdir))
    with opened(workdir) as lock, caller or Caller() as preemption:
        return with_rollbacks(
            lambda failed: _Loop(
                config, workdir, source, lock, preemption, milestones or NO_MILESTONES
            ).run(initial, failed),
            limit=0 if milestones else config.train.rollbacks,
        )


class _Loop:
    """One call of `train`.

    Attributes:
      step: the step reached by the calls made so far, which may still be running.
      rollbacks: number of times that the run has gone back to an earlier checkpoint.
      calls: those whose metrics have not been read.
      stop: all processes of the run have seen that one of them was asked to stop.
      saver: writes checkpoints and snapshots.
      watch: waits for the devices.
      outputs: writes everything else, on process 0; None on the others.
    """

    step: int
    rollbacks: int
    saver: Saver
    clock: Clock
    watch: StallWatch
    bar: tqdm

    def __init__(
        self,
        config: Config,
        workdir: pathlib.Path,
        source: Source,
        lock: Lock,
        preemption: Caller,
        milestones: Milestones,
    ) -> None:
        self.config, self.workdir, self.source = config, workdir, source
        self.lock, self.preemption, self.milestones = lock, preemption, milestones
        self.milestones_left = list(milestones.seconds)
        self.main = jax.process_index() == 0
        self.session = Session(config, source)
        self.replicas = Replicas(config, self.session.parallel)
        self.evaluator = (
            Evaluator(config, source, self.session.parallel.local_devices)
            if config.train.evaluate_every and self.main
            else None
        )
        self.checkpoints = checkpoint.Checkpoints(
            workdir,
            keep=config.train.keep,
            keep_every=config.train.keep_every,
            keep_best=config.train.keep_best,
            scores=self.evaluator.scores_of(workdir) if self.evaluator else dict,
        )
        self.outputs: Outputs | None = None
        self.calls = Calls()
        self.stop = False

    def run(self, initial: TrainState | None, failed: TooManySkippedError | None) -> int:
        """Trains, and returns the step reached; `failed` as in `starting_point`."""
        config, total = self.config, self.config.train.steps
        with contextlib.ExitStack() as stack:
            stack.callback(quietly, 'checkpoints', self.checkpoints.close)
            names = self.source.class_names
            begin = keep_images(
                starting_point(config, self.workdir, self.checkpoints, names, initial, failed),
                self.source,
            )
            facts = begin.facts
            self.step, self.rollbacks = begin.step, facts.rollbacks
            self.milestones.check(self.step, facts.seconds, facts.milestone)
            agree({'the step to resume from': self.step})
            if failed and self.main:
                self.checkpoints.set_aside_after(self.step)
            if self.step >= total and (jax.process_count() > 1 or not any(self._missing_outputs())):
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
                self.workdir,
                self.checkpoints,
                session,
                begin,
                self.lock,
                snapshots=not self.milestones.seconds,
                warn=self._warn,
            )
            stack.callback(quietly, 'snapshots', self.saver.close)
            session.open_stream()
            agree({'the steps per call': session.steps_per_call})
            self.bar = stack.enter_context(
                progress_bar(
                    total=None if self.milestones.seconds else total,  # ends by time, not by steps
                    initial=self.step,
                    unit='step',
                    disable=not self.main,
                )
            )
            if self.main:
                self.outputs = self._open_outputs()
                stack.callback(quietly, 'logs', self.outputs.close)
            self._compile(begin)
            del begin  # its state is a second copy of all weights, in this machine's memory
            # Training time leaves out how much longer other processes compile.
            wait_for_others('compiled the step')
            self.clock = Clock(self.step, facts.seconds)
            # Objects that exist now stay: collecting them again would stall the loop for 0.1 s.
            gc.freeze()
            self._write_missing_outputs()
            if self._report_restored(facts.milestone):
                self._train()
        if self.milestones_left or not self.milestones.seconds:
            self.saver.check()
        return self.step

    def _warn(self, text: str) -> None:
        self.bar.write(text)

    def _open_outputs(self) -> Outputs:
        return Outputs(
            self.config,
            self.workdir,
            self.source,
            self.step,
            rollbacks=self.rollbacks,
            devices=self.session.parallel.local_devices,
            evaluator=self.evaluator,
            bar=self.bar,
            keep_on=lambda: not self.preemption.requested,
            logged=self.preemption.logged,
        )

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
        self.milestones.compiled()
        self.bar.set_description('training')

    def _train(self) -> None:
        """Runs steps until the last one, the last milestone, or a signal."""
        self.bar.unpause()  # its speed and remaining time leave out compiling
        while self.step < self.config.train.steps and not self._asked_to_stop():
            self._call()
            if not self._do_what_is_due():
                return
        self._read_metrics()
        if self.step < self.config.train.steps and self.milestones.saves:
            self._check_replicas()
            self._save_unsaved()
            self.bar.write(f'stopped at step {self.step}; the same command resumes from there')
        self.saver.wait()

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

    def _do_what_is_due(self) -> bool:
        """Saves, samples, evaluates and reports a milestone, each if it is due after this step.

        Returns False after the last milestone, with which the run ends.
        """
        train = self.config.train
        save, sample = self._due(train.checkpoint_every), self._due(train.sample_every)
        evaluate, held_out = self._due(train.evaluate_every), self._due(train.holdout_every)
        check = self._due(train.check_replicas_every)
        snapshot, milestone = self.saver.snapshot_due(self.step), self._milestone()
        work = save or sample or evaluate or held_out or milestone or snapshot or check
        if (work or self._due(train.log_every)) and self.lock.why_lost():
            self.outputs = None  # they would go to another run's folder
            with self._save_on_error():
                self.lock.check()
        if not work:
            return True
        self._read_metrics(leave=1)
        with self._save_on_error():
            self.watch.wait(self.calls.newest.metrics)
        self.clock.pause()
        if check or save:
            self._check_replicas()
        if snapshot:
            self.saver.snapshot(self.step)
        if held_out and self.outputs:
            with self._save_on_error():
                self.outputs.measure_held_out(self.step, self._averaged_weights())
        self._read_metrics()  # logs this step, with its held-out loss
        if (save or milestone) and self.milestones.saves:
            self._save(milestone)
        self._show(sample=sample, evaluate=evaluate)
        if milestone and not self._report_milestone():
            return False
        self.clock.resume()
        return True

    def _milestone(self) -> float | None:
        """Returns the first milestone that is left, if the training time has come to it."""
        left = self.milestones_left
        return left[0] if left and self._seconds() >= left[0] else None

    def _report_milestone(self) -> bool:
        """Reports the first milestone that is left; returns False if it was the last."""
        self.milestones_left.pop(0)
        averages = self.session.parallel.local(self.session.state.ema)
        self.milestones.reached(
            self.step, self._seconds(), averages, lambda: self.preemption.requested
        )
        return bool(self.milestones_left)

    def _report_restored(self, milestone: float | None) -> bool:
        """Reports the milestone of the checkpoint that the run resumes from, if it is left.

        An earlier process may have died before it was done with it. Returns False if no milestone
        is left.
        """
        if milestone is None or milestone not in self.milestones_left:
            return True
        self.clock.pause()
        more = self._report_milestone()
        self.clock.resume()
        return more

    def _show(self, *, sample: bool, evaluate: bool) -> None:
        """Draws samples of this step and measures it."""
        if not self.outputs:
            return
        with self._save_on_error():
            if sample:
                self.outputs.sample(self.step, self._averaged_weights())
            if evaluate:
                self.outputs.evaluate(self.step, self._averaged_weights(), self._seconds())

    def _missing_outputs(self) -> Missing:
        """Returns the outputs that an earlier process did not write at the resumed step."""
        if not self.main or self.checkpoints.latest() != self.step:
            return Missing()
        return missing_outputs(self.config, self.workdir, self.step)

    def _write_missing_outputs(self) -> None:
        missing = self._missing_outputs()
        if any(missing):
            self.clock.pause()
            self._show(sample=missing.samples, evaluate=missing.metrics)
            self.clock.resume()

    def _seconds(self) -> float:
        """Returns the training time, by the milestones' seconds per step if they fix it."""
        return self.milestones.time(self.step, self.clock.seconds)

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
                    seconds = self.milestones.time(step, self.clock.at(done.result()))
                    self.outputs.log(step, last, elapsed / steps, seconds)

    def _save_on_error(self) -> contextlib.AbstractContextManager[None]:
        return save_on_error(self.session, self.saver, self._save_all)

    def _save_all(self) -> None:
        """Saves what is not saved; in a run of several processes, without asking the others."""
        self._read_metrics()
        if jax.process_count() > 1 and self.config.train.check_replicas_every:
            return  # nothing is saved unchecked, and a check needs all processes
        if self.milestones.saves:
            self._check_replicas()
            self._save_unsaved()
            self.saver.wait()

    def _asked_to_stop(self) -> bool:
        asked = self.preemption.requested if jax.process_count() == 1 else self.stop
        return asked or not self.milestones.keep_on()

    def _check_replicas(self) -> None:
        saved = self.checkpoints.latest()
        self.watch.call(self.replicas.check, self.session.state, self.step, saved)

    def _save(self, milestone: float | None = None) -> None:
        self.milestones.saving()
        self.saver.save(self.step, self.clock.seconds, milestone)

    def _save_unsaved(self) -> None:
        if self.checkpoints.latest() != self.step:
            # The steps that were still running may have taken the clock past a milestone.
            self.clock.pause()
            self._save(self._milestone())

    def _averaged_weights(self) -> Params:
        """Returns the average that sampling uses, on this process's first device."""
        return self.session.parallel.local(self.session.state.ema[str(self.config.ema.rates[0])])
