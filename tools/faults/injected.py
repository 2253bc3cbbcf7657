"""The faults of a case, how each is made to happen, and what it costs."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import random
import shutil
import signal
import time
from typing import Any

import numpy as np
from support.commands import Fork

from jaxunet.runtime.errors import USER_ERROR, UserError
from jaxunet.runtime.interrupt import INTERRUPTED
from jaxunet.runtime.out_of_memory import OUT_OF_MEMORY
from tools.faults.world import (
    SECONDS,
    STEPS,
    Ended,
    Outcome,
    Run,
    World,
    complete_steps,
    disk,
    last_line,
    processes_started,
    read_arrays,
    read_steps,
    remount,
    resumed_at,
    wait_for,
)

Report = dict[str, Any]
# Moments of a training run: how often each is entered at most, and the longest delay after it in
# seconds.
MOMENTS = {
    'start': (1, 0.5),
    'restore': (1, 0.3),
    'compile': (1, 0.6),
    'step': (24, 0.02),
    'checkpoint': (6, 0.1),
    'sampling': (3, 0.05),
    'evaluation': (2, 0.2),
}
# Where the device of a training run runs out of memory: how often it comes there, at most.
FULL = {'load': 1, 'compile': 1, 'step': 24, 'generation': 3, 'evaluation': 2}
OF_PROCESS_0 = ('checkpoint', 'sampling', 'evaluation')  # stages that no other process has
WRITES = 60  # changes of files of a run in Python
RESTARTED = 7.0  # seconds that a process with --restarts lives, with its imports, at least
ROOMY, CRAMPED = 32_000, (100, 2_500)  # kilobytes of a disk: enough, and not


class Faults:
    """The faults of one case, and what they cost.

    Fields of the report:
      faults: what happened, such as the stage of each kill; those that a process escaped because it
        ended before are left out.
      lost: times that a run did not go on from its last finished checkpoint.
      differences: what differs from the run without a fault.
      tracebacks: number of commands that ended by themselves with a traceback.
      unexpected: other things that should not be, as text.
    """

    def __init__(self, world: World, seed: int, folder: pathlib.Path) -> None:
        self.world, self.rng, self.folder = world, random.Random(seed), folder
        self.numbers = itertools.count()
        self.report: Report = {
            'faults': [],
            'lost': 0,
            'differences': [],
            'tracebacks': 0,
            'unexpected': [],
        }

    # The kinds of cases.

    def killed(self) -> None:
        """SIGKILL, up to six times, at any moment of training."""
        run = Run(evaluated=self.rng.random() < 0.3)
        workdir = self.folder / 'run'
        for _ in range(self.rng.randint(1, 6)):
            before = complete_steps(workdir)
            stage, ended = self._kill_at_some_moment(workdir, run)
            self._check_resumed(before, ended)
            if ended.returncode == -signal.SIGKILL:
                self.report['faults'].append(stage)
            else:
                self._check_exit(ended, 0)
        self._finish(workdir, run)

    def signalled(self) -> None:
        """SIGTERM, SIGINT, or two of them, at any moment of training."""
        workdir, run = self.folder / 'run', Run()
        numbers = self.rng.choice(
            [
                [signal.SIGTERM],
                [signal.SIGINT],
                [signal.SIGINT, signal.SIGINT],
                [signal.SIGTERM, signal.SIGINT],
            ]
        )
        gap = self.rng.uniform(0, 0.1)
        stage, process = self._at(workdir, run, self.rng.choice(['compile', 'step', 'checkpoint']))
        for number in numbers:
            process.send_signal(number)
            time.sleep(gap)
        process.communicate(SECONDS)
        names = '+'.join(number.name for number in numbers)
        self.report['faults'].append(f'{names} at {stage}')
        self._check_exit(process, 0, *([INTERRUPTED] if len(numbers) > 1 else []))
        self._finish(workdir, run)

    def healed(self) -> None:
        """A run with `--restarts` whose process is killed from outside, up to four times."""
        workdir, run = self.folder / 'run', Run()
        (process,) = self.world.train(workdir, run, {}, '--restarts=5')
        trained: list[int] = []
        for _ in range(self.rng.randint(1, 4)):
            while len(processes := processes_started([process])[0]) <= len(trained):
                if process.poll() is not None:
                    break
                time.sleep(0.01)
            if process.poll() is not None:
                break
            trained.append(processes[-1])
            time.sleep(self.rng.uniform(1, RESTARTED))
            with contextlib.suppress(ProcessLookupError):
                os.kill(trained[-1], signal.SIGKILL)
                self.report['faults'].append('SIGKILL')
        process.communicate(SECONDS)
        self._check_exit(process, 0)
        self._compare(workdir, run)

    def full_disk(self) -> None:
        """A disk without enough room, which has it again later, in the run or after it."""
        size = self.rng.randint(*CRAMPED)
        heals = self.rng.random() < 0.5
        with disk(self.folder / 'disk', size) as place:
            workdir, run = place / 'run', Run()
            if heals:
                _, process = self._at(workdir, run, 'step')
                remount(place, f'size={ROOMY}k')
            else:
                (process,) = self.world.train(workdir, run)
            error = process.communicate(SECONDS)[1]
            self._check_exit(process, 0, USER_ERROR)
            self.report['faults'].append(f'{size} KB{", room again" if heals else ""}')
            before = complete_steps(workdir)
            remount(place, f'size={ROOMY}k')
            self._finish(workdir, run, before, pictures_lost='samples: cannot be' in error)

    def read_only_disk(self) -> None:
        """A disk that is read-only when the run starts again, and later not."""
        with disk(self.folder / 'disk', ROOMY) as place:
            workdir, run = place / 'run', Run()
            if self.rng.random() < 0.7:
                self._kill_at_some_moment(workdir, run)
            before = complete_steps(workdir)
            remount(place, 'ro')
            (process,) = self.world.train(workdir, run)
            process.communicate(SECONDS)
            self._check_exit(process, USER_ERROR)
            self.report['faults'].append('read-only')
            remount(place, 'rw')
            self._finish(workdir, run, before)

    def folder_removed(self) -> None:
        """Somebody removes a folder of the run while it trains."""
        workdir, run = self.folder / 'run', Run()
        name = self.rng.choice(['checkpoints', 'samples', 'tensorboard', 'checkpoints/4'])
        stage, process = self._at(workdir, run, self.rng.choice(['step', 'checkpoint']))
        shutil.rmtree(workdir / name, ignore_errors=True)
        self.report['faults'].append(f'{name} at {stage}')
        process.communicate(SECONDS)
        self._check_exit(process, 0, USER_ERROR)
        self._finish(workdir, run, pictures_lost=name == 'samples')

    def clock_jumped(self) -> None:
        """The wall clock jumps by years now and then, in a run that is killed once."""
        workdir, run = self.folder / 'run', Run()
        jumps = {'clock': self.rng.randrange(2**32)}
        stage, process = self._kill_at_some_moment(workdir, run, jumps)
        before = complete_steps(workdir)
        (process,) = self.world.train(workdir, run, jumps)
        error = process.communicate(SECONDS)[1]
        self._check_exit(process, 0)
        self._check_resumed(before, process)
        self.report['faults'].append(f'jumps, killed at {stage}')
        self._finish(workdir, run, told=error)

    def memory_full(self) -> None:
        """The device has no memory left, once; the run ends with a line that says what to lower."""
        run = Run(evaluated=self.rng.random() < 0.3)
        stage = self.rng.choice([s for s in FULL if run.evaluated or s != 'evaluation'])
        count, workdir = self.rng.randint(1, FULL[stage]), self.folder / 'run'
        # What is trained is saved by the error alone.
        rare = [f'--config.train.checkpoint_every={STEPS}'] if stage != 'step' else []
        (process,) = self.world.train(workdir, run, {'full': [stage, count]}, *rare)
        error = process.communicate(SECONDS)[1]
        self._check_exit(process, OUT_OF_MEMORY)
        if 'has no memory left' not in last_line(error):
            self.report['unexpected'].append(last_line(error))
        before, logged = complete_steps(workdir), read_steps(workdir)
        if stage != 'step' and before[-1:] != logged[-1:]:
            self.report['lost'] += 1
            self.report['unexpected'].append(f'saved {before}, logged up to {logged[-1:]}')
        self.report['faults'].append(f'{stage} {count}')
        self._finish(workdir, run, before)

    def process_killed(self) -> None:
        """One of two processes is killed, up to twice; the other ends, and both resume."""
        run = Run(evaluated=self.rng.random() < 0.3, processes=2)
        workdir = self.folder / 'run'
        for _ in range(self.rng.randint(1, 2)):
            victim = self.rng.randrange(2)
            stage = self.rng.choice([s for s in MOMENTS if run.evaluated or s != 'evaluation'])
            count, delay = self._moment(stage)
            marks = self._marks()
            processes = self.world.train(
                workdir,
                run,
                {'marks': str(marks)},
                faulty=0 if stage in OF_PROCESS_0 else victim,
            )
            if wait_for(processes[victim], marks, stage, count):
                time.sleep(delay)
            processes[victim].kill()
            for process in processes:
                process.communicate(SECONDS)
            if processes[victim].returncode == 0:  # it had ended before
                continue
            done = complete_steps(workdir)[-1:] == [STEPS]  # the last pictures may be missing
            if processes[1 - victim].returncode == 0 and not done:
                self.report['unexpected'].append('the other process exited with 0')
            self.report['faults'].append(f'process {victim} at {stage}')
        self._finish(workdir, run, complete_steps(workdir))

    def sampling_killed(self) -> None:
        """SIGKILL, up to three times, at any moment of `jaxunet.sample`."""
        output = self.folder / 'out' / 'samples.npz'
        output.parent.mkdir()
        expected = self.world.undisturbed_samples
        for _ in range(self.rng.randint(1, 3)):
            if self.rng.random() < 0.3:
                fault = {'die_at_write': self.rng.randint(1, 12), 'below': str(output.parent)}
                process, stage = self.world.sample(output, fault), 'write'
            else:
                marks = self._marks()
                process = self.world.sample(output, {'marks': str(marks)})
                stage, limit = self.rng.choice([('start', 1.5), ('generation', 0.3)])
                count = self.rng.randint(1, 3) if stage == 'generation' else 1
                if wait_for(process, marks, stage, count):
                    time.sleep(self.rng.uniform(0, limit))
                process.kill()
            process.communicate(SECONDS)
            if process.returncode == -signal.SIGKILL:
                self.report['faults'].append(stage)
            else:
                self._check_exit(process, 0)
        process = self.world.sample(output, {})
        process.communicate(SECONDS)
        self._check_exit(process, 0)
        drawn = read_arrays(output)
        self.report['differences'] += [
            name
            for name in sorted(drawn.keys() | expected.keys())
            if not np.array_equal(drawn.get(name), expected.get(name))
        ]
        if left := [path.name for path in output.parent.iterdir() if path != output]:
            self.report['unexpected'].append(f'left over: {", ".join(left)}')

    # Their parts.

    def _marks(self) -> pathlib.Path:
        path = self.folder / f'marks{next(self.numbers)}'
        path.touch()
        return path

    def _moment(self, stage: str) -> tuple[int, float]:
        times, longest = MOMENTS[stage]
        return self.rng.randint(1, times), self.rng.uniform(0, longest)

    def _at(
        self, workdir: pathlib.Path, run: Run, stage: str, fault: Report | None = None
    ) -> tuple[str, Fork]:
        """Starts a run and returns it at a moment of a stage, or ended before it."""
        count, delay = self._moment(stage)
        marks = self._marks()
        (process,) = self.world.train(workdir, run, {**(fault or {}), 'marks': str(marks)})
        if wait_for(process, marks, stage, count):
            time.sleep(delay)
        return stage, process

    def _kill_at_some_moment(
        self, workdir: pathlib.Path, run: Run, fault: Report | None = None
    ) -> tuple[str, Fork]:
        """Kills a run from outside, or has it kill itself while it writes."""
        stages = [s for s in MOMENTS if run.evaluated or s != 'evaluation']
        stage = self.rng.choice([*stages, 'write', 'write'])
        if stage == 'write':
            deadly = {'die_at_write': self.rng.randint(1, WRITES), 'below': str(workdir)}
            (process,) = self.world.train(workdir, run, {**(fault or {}), **deadly})
        else:
            _, process = self._at(workdir, run, stage, fault)
            process.kill()
        process.communicate(SECONDS)
        return stage, process

    def _check_exit(self, process: Fork, *codes: int) -> None:
        error = process.stderr.read_text()
        if 'Traceback' in error:
            self.report['tracebacks'] += 1
            self.report['unexpected'].append(error[error.index('Traceback') :][:600])
        if process.returncode not in codes:
            self.report['unexpected'].append(f'exit code {process.returncode}: {last_line(error)}')

    def _check_resumed(self, before: list[int], process: Fork) -> None:
        """Counts a start that did not go on from the newest finished checkpoint, once it trained.

        Args:
          before: steps of the finished checkpoints when it started.
        """
        error = process.stderr.read_text()
        steps = resumed_at(error)
        if before and steps is None and 'training:' not in error:
            return  # ended before it read anything
        if steps != (before[-1] if before else None):
            self.report['lost'] += 1
            self.report['unexpected'].append(f'resumed at {steps} of {before}')

    def _finish(
        self,
        workdir: pathlib.Path,
        run: Run,
        before: list[int] | None = None,
        *,
        pictures_lost: bool = False,
        told: str | None = None,
    ) -> None:
        """Ends the run without a fault, and compares."""
        before = complete_steps(workdir) if before is None else before
        try:
            error = self.world.finish(workdir, run)
            steps = resumed_at(error)
            if told is None and steps != (before[-1] if before else None):
                self.report['lost'] += 1
                self.report['unexpected'].append(f'resumed at {steps} of {before}')
        except Ended as problem:
            self.report['unexpected'].append(f'{problem}'[:400])
        self._compare(workdir, run, pictures_lost=pictures_lost)

    def _compare(self, workdir: pathlib.Path, run: Run, *, pictures_lost: bool = False) -> None:
        expected = self.world.undisturbed(run)
        try:
            outcome = Outcome.of(workdir)
        except (UserError, OSError, ValueError) as problem:
            self.report['unexpected'].append(f'{type(problem).__name__}: {problem}'[:400])
            self.report['differences'].append('unreadable')
            return
        self.report['differences'] += expected.differences(outcome, pictures_lost=pictures_lost)
