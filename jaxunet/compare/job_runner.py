"""Runs training jobs in one process and writes their results; see `jaxunet.compare.queue`."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax

from jaxunet.checkpoint.load import load_initial
from jaxunet.checkpoint.newest import saved_steps
from jaxunet.compare import work
from jaxunet.compare.collected import (
    FAILED,
    MEASURED,
    ROWS,
    STOPPED,
    STRETCHES,
    TRAINED,
    measured_keys,
    stretch,
)
from jaxunet.compare.jobs import Job
from jaxunet.compare.measure import Checkpoint, Measurements
from jaxunet.compare.milestones import Milestones, PassedError
from jaxunet.compare.stopwatch import Limit
from jaxunet.config import Config
from jaxunet.data.pipeline import decoded
from jaxunet.data.source import Source
from jaxunet.data.sources import images_key, open_images
from jaxunet.metrics.table import general_label
from jaxunet.model.unet import Params
from jaxunet.runtime import rows
from jaxunet.runtime.attempts import quietly
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.whole_files import written
from jaxunet.sampling.generator import StoppedError
from jaxunet.training.loop import train
from jaxunet.training.preemption import Preemption

# Errors that end one job and not the others: mistakes in the job, and too little GPU memory.
FAILURES = (UserError, jax.errors.JaxRuntimeError)
TIMED_OUT = 124  # exit code of a process whose job took longer than its `timeout`
BY_SIGNAL = 'stopped by a signal'
AT_LIMIT = 'stopped at the limit; the same command goes on from there'
DONE = 'done'  # content of a claim whose process has ended the job
POLL_SECONDS = 1.0  # between two checks for the file of features


@dataclass(kw_only=True)
class Queue:
    """Runs jobs and writes their results.

    Attributes that are not described are flags of `jaxunet.compare.queue`.

    Attributes:
      measurements: draws samples and compares them.
      command: the command line, for the rows.
      step_ms: milliseconds that the clock counts for a step, by case; {} = it measures training
        time.
      timeout: a job that takes longer ends this process with the exit code `TIMED_OUT`.
    """

    output: pathlib.Path
    measurements: Measurements
    limit: Limit
    command: str
    work: pathlib.Path
    step_ms: Mapping[str, float] = field(default_factory=dict)
    known: str = ''
    claims: str = ''
    devices: int = 1
    resume: bool = True
    timeout: float = math.inf
    _measuring: float = 0.0  # seconds that the last checkpoint took; the first includes compiling
    _problems: list[str] = field(default_factory=list)
    _sources: dict[object, Source] = field(default_factory=dict)
    _asked: bool = False  # a signal came while a checkpoint was measured

    def __post_init__(self) -> None:
        """Notes where the rows come from."""
        self._origin = {'command': self.command, **rows.provenance()}
        self._watch = self.measurements.watch

    def run(self, jobs: Sequence[Job]) -> list[str]:
        """Runs the jobs that lack rows; returns why jobs failed, stopped or were left out.

        Raises:
          UserError: a learning rate falls over a time whose steps are unknown.
        """
        for job in jobs if not self.step_ms else ():
            if job.schedule != 'constant':
                raise UserError(
                    f'{job.name}: optimizer.schedule: {job.schedule} falls to 0 at the step of the '
                    f'last of the seconds, and only --step_ms says which; give it, or use constant'
                )
        self._watch.start('waiting')
        while any(map(self._lacking, jobs)) and not self.measurements.ready():
            if self.limit.left <= 0:
                self._fail(f'nothing was done, as there is no {self.measurements.features}')
                return self._problems
            time.sleep(POLL_SECONDS)
        self._watch.start('')
        for job in jobs:
            lacking = self._lacking(job)
            seconds = self._fitting(lacking)
            if not lacking:
                self._say(f'{job.name}: is done already')
                self._clear(job)
            elif self._is_taken(job):
                continue
            elif not seconds:
                self._fail(f'{job.name}: left out, {self.limit.left:.0f} s are left')
            elif self._take(job):
                with self._limited(job):
                    self._attempt(job, seconds)
                if self.claims:
                    self._claim(job).write_text(DONE, encoding='utf-8')
        self.measurements.wait()  # a process that ends while it compiles may crash
        return self._problems

    def _lacking(self, job: Job) -> tuple[float, ...]:
        """Returns the times of a job that lack a row of any of its samplers."""
        known = [pathlib.Path(self.known)] if self.known else []
        measured = measured_keys([self.output / ROWS, *known])
        return tuple(
            seconds
            for seconds in job.seconds
            if any((job.data, job.case, job.seed, seconds, s) not in measured for s in job.samplers)
        )

    def _fitting(self, lacking: tuple[float, ...]) -> tuple[float, ...]:
        """Returns those of the times that can be trained for in what is left of the limit."""
        if self.resume:
            # One reserve for compiling, and one that `_goes_on` keeps for saving or measuring.
            return lacking if self.limit.allows(0.0, self.limit.reserve + self._measuring) else ()
        return tuple(
            s for i, s in enumerate(lacking, 1) if self.limit.allows(s, i * self._measuring)
        )

    def _goes_on(self) -> bool:
        """Returns False once a job must stop, so that there is time to save and measure it.

        Without `resume` a job never stops early.
        """
        return not self.resume or self.limit.allows(0.0, self._measuring)

    def _is_taken(self, job: Job) -> bool:
        """Returns True if another process has taken a job, and reports how it ends.

        A job that an earlier process with the same output took, and did not finish, is free.
        """
        if not self.claims or not self._claim(job).exists():
            return False
        return self._claim(job).read_text(encoding='utf-8') != str(self.output)

    def _claim(self, job: Job) -> pathlib.Path:
        return pathlib.Path(self.claims) / job.name

    def _take(self, job: Job) -> bool:
        """Takes a job for this process; returns False if another one has just taken it."""
        if not self.claims:
            return True
        self._claim(job).parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._claim(job).open('x', encoding='utf-8') as file:
                file.write(str(self.output))
        except FileExistsError:
            return not self._is_taken(job)
        return True

    @contextlib.contextmanager
    def _limited(self, job: Job) -> Iterator[None]:
        """Ends this process if the block takes longer than `timeout`."""

        def end() -> None:
            text = f'error: {job.name}: not done after {self.timeout:g} s (--timeout)'
            print(text, file=sys.stderr, flush=True)
            os._exit(TIMED_OUT)

        timer = threading.Timer(min(self.timeout, threading.TIMEOUT_MAX), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _attempt(self, job: Job, seconds: tuple[float, ...]) -> None:
        """Trains a job and records how it ended.

        Raises:
          KeyboardInterrupt: a signal stopped it.
        """
        outcome, reason = STOPPED, ''
        self._watch.start('compiling')
        try:
            reached = self._train(job, seconds)
            if self._asked:
                raise KeyboardInterrupt
            if reached < len(seconds):
                if self._goes_on():
                    raise KeyboardInterrupt  # the loop ends early only after a signal
                reason = AT_LIMIT
                self._fail(f'{job.name}: {reason}')
            else:
                outcome = TRAINED
        except FAILURES as error:
            outcome, reason = FAILED, str(error)
            self._fail(f'{job.name}: {error}')
        except KeyboardInterrupt:
            reason = BY_SIGNAL
            raise
        finally:
            self._watch.start('')
            self._note(job, outcome, reason)
        if not self._lacking(job):
            self._clear(job)

    def _clear(self, job: Job) -> None:
        if not job.kept:
            work.remove(self.work, job)

    def _train(self, job: Job, seconds: tuple[float, ...]) -> int:
        """Trains a job and measures its checkpoints; returns how many of `seconds` it reached."""
        # Finished runs are garbage; `train` froze what was alive at its start.
        gc.unfreeze()
        gc.collect()
        step_seconds = self.step_ms.get(job.case, 0.0) / 1e3
        config = job.load_config(self.devices, step_seconds)
        source = self._source(config)
        self.measurements.prepare(job, config, source)
        names = job.state_names(config)
        workdir = work.prepare(self.work, job, config, step_seconds, resume=self.resume)
        left = list(seconds)

        def compiled() -> None:
            # Only now, because two compilations at once disturb each other's kernel timings.
            devices = jax.local_devices()[: config.parallel.devices or None]
            self.measurements.compile(devices)
            self._watch.start('training')

        def keep(
            step: int, trained: float, kept: dict[str, Params], asked: Callable[[], bool]
        ) -> None:
            averages = {average: kept[name] for average, name in names.items()}
            checkpoint = Checkpoint(job, config, source, left.pop(0), trained, step, averages)
            self._say(f'{job.name}: {trained:.1f} s of training, step {step}')
            self._measure(checkpoint, asked)
            self._watch.start('training' if left else 'saving')

        milestones = Milestones(
            seconds,
            keep,
            step_seconds,
            saves=self.resume,
            keep_on=self._goes_on,
            compiled=compiled,
            saving=lambda: self._watch.start('saving'),
        )

        def train_it() -> None:
            caller = Preemption(lambda: self._note(job, STOPPED, BY_SIGNAL))
            begun = saved_steps(workdir)
            initial = None if begun else load_initial(config, source.class_names)
            train(config, workdir, source, initial, hook=milestones, caller=caller)

        self._say(f'{job.name}: training for {seconds[-1]:g} s')
        try:
            try:
                train_it()
            except PassedError as error:
                self._say(f'{job.name}: {error}; it starts again')
                work.prepare(self.work, job, config, step_seconds, resume=False)
                train_it()
        finally:
            quietly(f'the log of {job.name}', lambda: self._keep_log(job, workdir))
        return len(seconds) - len(left)

    def _measure(self, checkpoint: Checkpoint, asked: Callable[[], bool]) -> None:
        """Measures a checkpoint, until the limit; without `resume`, to the end.

        Args:
          asked: returns True once a signal has asked the job to stop.
        """

        def keep_on() -> bool:
            self._asked = asked()
            return not self._asked and (not self.resume or self.limit.left > 0)

        job, began = checkpoint.job, time.perf_counter()
        about: rows.Row = {'fields': {k: v for k, v in job.fields.items() if k != 'data.path'}}
        if self.step_ms:
            about['step_ms'] = self.step_ms[job.case]
        outcome, reason = MEASURED, ''
        try:
            with self._watch.during('measuring'):
                for row in self.measurements.measure(checkpoint, keep_on):
                    if self.step_ms:  # other processes may slow the device down
                        del row['seconds_per_sample']
                    rows.append(self.output / ROWS, {**row, **about, **self._origin})
                    self._say(summary(row))
        except StoppedError:
            outcome, reason = STOPPED, BY_SIGNAL if self._asked else AT_LIMIT
            self._fail(f'{job.name} at {checkpoint.seconds:g} s: {reason}')
        except FAILURES as error:
            outcome, reason = FAILED, f'{checkpoint.seconds:g} s: {error}'
            self._fail(f'{job.name} at {reason}')
        self._measuring = time.perf_counter() - began
        self._note(job, outcome, reason)
        self._say(f'{outcome} after {self._measuring:.1f} s')

    def _note(self, job: Job, outcome: str, reason: str) -> None:
        """Writes a stretch: how a job ended, and the seconds of each activity since the last."""
        row = stretch(job, outcome, reason, self._watch.take(), self.limit.shared_by)
        rows.append(self.output / STRETCHES, {**row, **self._origin})

    def _source(self, config: Config) -> Source:
        """Returns the images of a config, opened once for all jobs that share them.

        They are decoded, too, except for random crops, which need all pixels of an image.
        """
        data = config.data
        key = (*images_key(config), data.holdout, data.crop)
        if key not in self._sources:
            source = self._sources[key] = open_images(config)
            if data.crop != 'random':
                self._sources[key] = decoded(source)
                if source.held_out is not None:
                    self._sources[key].held_out = decoded(source.held_out)
        return self._sources[key]

    def _keep_log(self, job: Job, workdir: pathlib.Path) -> None:
        if (workdir / 'metrics.csv').exists():
            with written(self.output / 'logs' / f'{job.name}.csv') as partial:
                shutil.copyfile(workdir / 'metrics.csv', partial)

    def _fail(self, problem: str) -> None:
        self._problems.append(problem)
        self._say(problem)

    def _say(self, line: str) -> None:
        print(f'[{time.perf_counter() - self.limit.began:.0f} s] {line}', flush=True)


def summary(row: rows.Row) -> str:
    """Returns a row in one line; its names of metrics are right for any feature network."""
    values = ', '.join(
        f'{name} {general_label(metric)} {value:.4g}'
        for name, metrics in row.get('values', {}).items()
        for metric, value in metrics.items()
    )
    return (
        f'{row["data"]} {row["case"]} seed {row["seed"]}, {row["seconds"]:g} s, {row["sampler"]}: '
        f'{values or "nothing to compare"}'
    )
