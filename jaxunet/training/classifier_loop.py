"""Trains a classifier of noisy images: runs steps, logs, measures, saves and stops.

A workdir gets checkpoints/, metrics.csv, tensorboard/ and classifier.pt, which is written before
every checkpoint. The run has one process, on one or all of its devices.
"""

from __future__ import annotations

import contextlib
import pathlib

import numpy as np
from absl import logging
from tqdm import tqdm

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.meta import RunFacts
from jaxunet.checkpoint.newest import newest_classes
from jaxunet.checkpoint.resumable import FIXED_FIELDS, fixed_changes, other_run
from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config
from jaxunet.data.source import Source, in_order_of
from jaxunet.runtime.attempts import quietly
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.out_of_memory import memory_for
from jaxunet.runtime.own_types import own_types
from jaxunet.runtime.progress import progress_bar
from jaxunet.training.board import Board
from jaxunet.training.calls import Calls
from jaxunet.training.classifier_accuracy import COLUMNS, KINDS, Accuracy, columns, sentence
from jaxunet.training.clock import Clock, due
from jaxunet.training.logs import FILE as METRICS
from jaxunet.training.logs import StepTable, curves, mean_loss
from jaxunet.training.noisy_classifier import (
    FILE,
    ClassifierSession,
    draw_state,
    network_config,
    starting_state,
)
from jaxunet.training.preemption import Caller
from jaxunet.training.resume import (
    StartingPoint,
    adapted,
    how_to_go_on,
    keep_images,
    tell_labels,
)
from jaxunet.training.rollback import TooManySkippedError
from jaxunet.training.saving import Saver, save_on_error
from jaxunet.training.stalls import StallWatch
from jaxunet.training.workdir import Lock, opened
from jaxunet.weights import write_classifier

NETWORK = 'classifier of noisy images'
ACCURACY_MEMORY = (
    'measuring the accuracy',
    'raise optimizer.accumulate_steps or set train.holdout_every=0',
)
LOGGED = ('step', 'loss', 'learning_rate', 'grad_norm', 'step_ms', 'skipped_steps')


@own_types()
def train_classifier(
    config: Config, workdir: pathlib.Path, source: Source, caller: Caller | None = None
) -> int:
    """Trains until `train.steps`, or until the caller asks it to stop.

    Args:
      config: passed by `check_trainable`. `model` is the classifier's network, with the number of
        classes; `diffusion` the process of the models that it will guide.
      workdir: a run that it holds is resumed.
      source: the images (`jaxunet.data.sources.open_images`), whose classes `check_classes` found
        to fit.
      caller: as for `jaxunet.training.loop.train`.

    Returns the step reached, which is saved.

    Raises:
      UserError: the workdir holds another run, the config or the data does not fit, too many steps
        in a row were not finite, or classifier.pt or the last checkpoint could not be written.
      OutOfMemoryError: as `jaxunet.training.loop.train`.
    """
    with opened(workdir) as lock, caller or Caller() as preemption:
        source = in_order_of(source, newest_classes(workdir))
        return _Loop(config, workdir, source, lock, preemption).run()


class _Loop:
    """One call of `train_classifier`.

    Attributes:
      step: the step reached by the calls made so far, which may still be running.
      calls: those whose metrics have not been read.
      measured: columns of metrics.csv by the step whose row has not been written.
      saver: writes checkpoints.
      watch: waits for the devices.
      failure: the error of the last attempt to write classifier.pt; None if it succeeded.
    """

    step: int
    saver: Saver
    clock: Clock
    watch: StallWatch
    bar: tqdm
    table: StepTable
    board: Board

    def __init__(
        self,
        config: Config,
        workdir: pathlib.Path,
        source: Source,
        lock: Lock,
        preemption: Caller,
    ) -> None:
        self.config, self.workdir, self.source = config, workdir, source
        self.lock, self.preemption = lock, preemption
        self.checkpoints = _checkpoints(config, workdir)
        self.session = ClassifierSession(config, source)
        self.accuracy: Accuracy | None = None
        self.calls = Calls()
        self.measured: dict[int, dict[str, float]] = {}
        self.failure: UserError | None = None

    def run(self) -> int:
        """Trains, and returns the step reached."""
        with contextlib.ExitStack() as stack:
            stack.callback(quietly, 'checkpoints', self.checkpoints.close)
            begin = _start(self.config, self.workdir, self.checkpoints, self.source.class_names)
            begin = keep_images(begin, self.source)
            self.step = begin.step
            if self.step >= self.config.train.steps:
                self._write(begin.state())  # a full disk may have refused it
                print(how_to_go_on(self.config, self.workdir, self.step))
            else:
                self._open(begin, stack)
                self.clock = Clock(self.step, begin.facts.seconds)
                del begin  # its state is a second copy of all weights, in this machine's memory
                self._train()
        if self.failure:
            raise self.failure
        return self.step

    def _open(self, begin: StartingPoint, stack: contextlib.ExitStack) -> None:
        """Makes the step and the files ready; `stack` closes what is opened."""
        config, session = self.config, self.session
        self.watch = StallWatch(config.train.stall_seconds, self.workdir, self.preemption.stalled)
        stack.callback(self.watch.close)
        stack.callback(self.calls.close)
        stack.callback(quietly, 'images', lambda: self.watch.call(session.close))
        session.expect(begin.shapes, begin.step, progress=True)
        session.open_stream()
        self.saver = Saver(
            self.workdir,
            self.checkpoints,
            session,
            begin,
            self.lock,
            snapshots=False,
            warn=self._warn,
            config=config,
        )
        if config.train.holdout_every:
            device = session.parallel.local_devices[0]
            self.accuracy = Accuracy(session.config, session.network, self.source, device)
        extra = COLUMNS if self.accuracy else ()
        self.table = StepTable(
            self.workdir / METRICS, (*LOGGED, *extra), self.step, optional=COLUMNS
        )
        stack.callback(quietly, 'logs', self.table.close)
        self.board = Board(self.workdir / 'tensorboard', self.step)
        self.bar = stack.enter_context(
            progress_bar(total=config.train.steps, initial=self.step, unit='step', desc='compiling')
        )
        session.compile(cache=True)
        session.put(begin.state())
        self.bar.set_description('training')

    def _train(self) -> None:
        """Runs steps until the last one, or a signal, and saves it."""
        total = self.config.train.steps
        self.bar.unpause()  # its speed and remaining time leave out compiling
        while self.step < total and not self.preemption.requested:
            self._call()
        self._save_all()
        if self.step < total:
            self.bar.write(f'stopped at step {self.step}; the same command resumes from there')
        self.saver.check()

    def _warn(self, text: str) -> None:
        self.bar.write(text)

    def _call(self) -> None:
        """Queues the next call of the step, and measures and saves what is due after it."""
        session, train = self.session, self.config.train
        with self._save_on_error():
            metrics = self.watch.call(session.call, session.next_data())
            self.step += session.steps_per_call
            self.calls.add(self.step, session.parallel.shards(metrics))
        self._read_metrics(leave=session.calls_ahead)
        self.preemption.nothing_to_save = False
        measure = due(train.holdout_every, self.step, train.steps)
        save = due(train.checkpoint_every, self.step, train.steps)
        if (save or due(train.log_every, self.step, train.steps)) and self.lock.why_lost():
            with self._save_on_error():
                self.lock.check()
        if not (measure or save):
            return
        self._read_metrics(leave=1)
        with self._save_on_error():
            self.watch.wait(self.calls.newest.metrics)
        self.clock.pause()
        if measure and self.accuracy:
            with self._save_on_error(), memory_for(*ACCURACY_MEMORY):
                scores = self.accuracy.measure(session.parallel.local(session.state.params))
            self.measured[self.step] = columns(scores)
            self.bar.write(f'step {self.step}: {sentence(scores[KINDS[0]])}')
        self._read_metrics()
        if save:
            self._save()
        self.clock.resume()

    def _read_metrics(self, leave: int = 0) -> None:
        """Waits for the oldest calls until `leave` are left, and logs their metrics.

        Raises:
          TooManySkippedError: too many steps in a row were skipped.
        """
        train = self.config.train
        while len(self.calls) > leave:
            step, metrics, done = self.calls.take()
            with self._save_on_error():
                self.watch.wait(metrics)  # numpy would crash on those of a step that failed
            bad = int(np.ravel(metrics['bad_steps']).max())
            self.bar.update(self.session.steps_per_call)
            if bad >= train.max_bad_steps:
                raise TooManySkippedError(self.config, step, bad, self.checkpoints.latest(), 0)
            if due(train.log_every, step, train.steps) and not self.lock.why_lost():
                last = {name: float(np.ravel(value)[-1]) for name, value in metrics.items()}
                self._log(step, last, done.result())

    def _log(self, step: int, metrics: dict[str, float], done: float) -> None:
        elapsed, steps = self.clock.lap(step, done)
        row = {
            'step': step,
            'loss': mean_loss(metrics),
            'learning_rate': metrics['learning_rate'],
            'grad_norm': metrics['grad_norm'],
            'step_ms': elapsed / steps * 1e3,
            'skipped_steps': int(metrics['skipped']),
            **self.measured.pop(step, {}),
        }
        self.table.add([row])
        self.board.scalars(curves(row, COLUMNS), step)
        self.bar.set_postfix_str(f'loss={row["loss"]:.4f}, {row["step_ms"]:.1f} ms/step')

    def _save_on_error(self) -> contextlib.AbstractContextManager[None]:
        return save_on_error(self.session, self.saver, self._save_all)

    def _save_all(self) -> None:
        """Saves the step reached, if it is not saved, and waits until it is on disk."""
        self._read_metrics()
        if self.checkpoints.latest() != self.step:
            self._save()
        self.saver.wait()

    def _save(self) -> None:
        """Writes classifier.pt, and starts writing a checkpoint. A failure is a warning."""
        if not self.lock.why_lost():  # otherwise it would be written to another run's folder
            self._write(self.session.parallel.fetch(self.session.state))
        if self.failure:
            self._warn(f'warning: {self.failure}')
        self.saver.save(self.step, self.clock.seconds)

    def _write(self, state: TrainState) -> None:
        network, classes = network_config(self.config), self.config.model.num_classes
        self.failure = None
        try:
            write_classifier(self.workdir / FILE, state.params, network, classes)
        except UserError as error:
            self.failure = error


def _checkpoints(config: Config, workdir: pathlib.Path) -> checkpoint.Checkpoints:
    train = config.train
    return checkpoint.Checkpoints(
        workdir,
        keep=train.keep,
        keep_every=train.keep_every,
        draw=draw_state,
        network=NETWORK,
    )


def _start(
    config: Config,
    workdir: pathlib.Path,
    checkpoints: checkpoint.Checkpoints,
    class_names: tuple[str, ...],
) -> StartingPoint:
    """Returns the newest checkpoint, or the state before step 0.

    Raises:
      UserError: the run in the workdir is another one, no checkpoint can be read, or the run cannot
        start from `init_from`.
    """
    restored, facts = checkpoints.restore(), RunFacts(class_names=class_names)
    tell_labels(config, class_names)
    if restored is None:
        if config.init_from:
            return StartingPoint.of(starting_state(config), facts)
        return StartingPoint.fresh(config, facts, draw_state)
    # A classifier has no averages of its weights.
    fixed = tuple(name for name in FIXED_FIELDS if not name.startswith('ema.'))
    changed = fixed_changes(restored.config, config, fixed)
    if (found := restored.facts.class_names) != class_names:
        changed.append(f'classes: {found} -> {class_names}')
    if changed:
        raise other_run(workdir, changed)
    logging.info('resuming %s at step %d', workdir, int(restored.state.step))
    return StartingPoint.of(adapted(restored, config), restored.facts)
