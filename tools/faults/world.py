"""The runs that faults happen to, and what they must come to: the same bits as without a fault."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from support.commands import NO_LAUNCHER, ROOT, Fork, free_port, python_path
from support.launchers import by_hand
from support.settings import QUICK
from support.tiny import flags
from support.untrained_features import write_untrained

from jaxunet.checkpoint import store as checkpoint
from jaxunet.training.evaluation import read_evaluations
from jaxunet.training.logs import read_metrics

TRAINS = re.compile(r'process (\d+) trains')  # a supervisor's line
STEPS = 24
SAVE_EVERY = 4
SECONDS = 300  # limit of a command without a fault
TIMES = {'images_per_second', 'step_ms', 'training_seconds', 'devices'}  # differ between runs
RESUMING = re.compile(r'resuming \S+ at step (\d+)')
DEVICES = re.compile(r'compiled the step in \S+ s; (\d+ x .+), \w+$', re.MULTILINE)
SAMPLES, SAMPLE_BATCH = 12, 4


@dataclasses.dataclass(frozen=True)
class Run:
    """A kind of run.

    Fields:
      evaluated: it is measured on the way.
      processes: of the run, one or two; two are on CPU devices.
    """

    evaluated: bool = False
    processes: int = 1


class Ended(RuntimeError):
    """A command without a fault did not end as it should."""


class World:
    """A folder of runs on one platform.

    Args:
      platform: JAX_PLATFORMS of the commands.
      backend: `config.backend`.

    Attributes:
      device: number and kind of the devices, as a finished run printed them.
    """

    def __init__(self, folder: pathlib.Path, platform: str = 'cpu', backend: str = 'auto') -> None:
        self.folder, self.platform, self.backend = folder, platform, backend
        self.device = ''
        self._started: list[Fork] = []
        cache = os.environ.get('JAX_COMPILATION_CACHE_DIR') or str(folder / 'cache')
        self.environment = NO_LAUNCHER | {
            'PYTHONPATH': python_path(),  # for the processes that a supervisor starts
            'JAX_PLATFORMS': platform,
            'JAX_COMPILATION_CACHE_DIR': cache,
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
        }
        if platform == 'cpu':
            self.environment['XLA_FLAGS'] = f'{QUICK} --xla_force_host_platform_device_count=1'

    def start(self, fault: Mapping[str, object], module: str, *arguments: object) -> Fork:
        """Starts a command with a fault, as JSON for `victim.py`."""
        command = ['tools.faults.victim', json.dumps(fault), module, *arguments]
        self._started.append(Fork(command, self.environment, ROOT / 'tests'))
        return self._started[-1]

    def kill_all(self) -> None:
        """Ends the commands that still run."""
        while self._started:
            self._started.pop().kill()

    def train(
        self,
        workdir: pathlib.Path,
        run: Run,
        fault: Mapping[str, object] | None = None,
        *extra: str,
        faulty: int = 0,
    ) -> list[Fork]:
        """Starts the processes of a run.

        Args:
          faulty: the process that the fault happens to.
        """
        options = [
            f'--workdir={workdir}',
            *flags(),
            f'--config.backend={self.backend}',
            f'--config.train.steps={STEPS}',
            f'--config.train.checkpoint_every={SAVE_EVERY}',
            '--config.train.sample_every=8',
            '--config.model.dropout=0.1',
            *(self._evaluation() if run.evaluated else ()),
            *extra,
        ]
        port = free_port() if run.processes > 1 else 0
        started = []
        for rank in range(run.processes):
            together = []
            if run.processes > 1:
                together = [*by_hand(port, rank)[0], '--heartbeat_seconds=10', '--wait_seconds=60']
            own = dict(fault or {}) if rank == faulty else {}
            started.append(self.start(own, 'jaxunet.train', *options, *together))
        return started

    def _evaluation(self) -> list[str]:
        return [
            '--config.train.evaluate_every=12',
            '--config.evaluation.samples=8',
            '--config.evaluation.batch_size=4',
            '--config.evaluation.steps=2',
            '--config.evaluation.metrics=fid,precision',
            f'--config.evaluation.features={self.features}',
        ]

    @functools.cached_property
    def features(self) -> pathlib.Path:
        """A file of features for evaluations."""
        return write_untrained(self.folder)

    def finish(self, workdir: pathlib.Path, run: Run) -> str:
        """Runs to the end without a fault; returns what process 0 printed to stderr.

        Raises:
          Ended: a process did not exit with 0.
        """
        processes = self.train(workdir, run)
        printed = [process.communicate(SECONDS) for process in processes]
        errors = [error for _, error in printed]
        if match := DEVICES.search(printed[0][0]):
            self.device = match[1]
        for process, error in zip(processes, errors, strict=True):
            if process.returncode != 0:
                raise Ended(f'exit code {process.returncode}: {last_line(error)}')
        return errors[0]

    @functools.cache  # noqa: B019 (a world lives as long as its process)
    def undisturbed(self, run: Run) -> Outcome:
        """The outcome of a run without a fault."""
        workdir = self.folder / f'undisturbed-{run.evaluated:d}{run.processes}'
        self.finish(workdir, run)
        return Outcome.of(workdir)

    def sample(self, output: pathlib.Path, fault: Mapping[str, object]) -> Fork:
        """Starts drawing samples of the undisturbed run."""
        self.undisturbed(Run())
        trained = self.folder / 'undisturbed-01'
        return self.start(
            fault,
            'jaxunet.sample',
            f'--checkpoint={trained}',
            f'--output={output}',
            f'--num_samples={SAMPLES}',
            f'--batch_size={SAMPLE_BATCH}',
            '--steps=8',
        )

    @functools.cached_property
    def undisturbed_samples(self) -> dict[str, np.ndarray]:
        """The arrays of `sample` without a fault."""
        output = self.folder / 'samples.npz'
        process = self.sample(output, {})
        error = process.communicate(SECONDS)[1]
        if process.returncode != 0:
            raise Ended(f'exit code {process.returncode}: {last_line(error)}')
        return read_arrays(output)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Everything that a run leaves, except for what depends on its speed.

    Fields:
      state: every array of the last checkpoint, by name, as its type, shape and bytes.
      metrics, evaluations: the rows of the tables.
      pictures: the sample grids by name.
    """

    state: dict[str, tuple[str, tuple[int, ...], bytes]]
    metrics: list[dict[str, str]]
    evaluations: list[dict[str, str]]
    pictures: dict[str, bytes]

    @classmethod
    def of(cls, workdir: pathlib.Path) -> Outcome:
        """Reads what a run left.

        Raises:
          UserError, OSError: it cannot be read.
        """
        leaves = jax.tree.leaves_with_path(checkpoint.read(workdir).state)
        arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
        evaluated = (workdir / 'evaluation.csv').exists()
        return cls(
            {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in arrays.items()},
            _timeless(read_metrics(workdir / 'metrics.csv')),
            _timeless(read_evaluations(workdir)) if evaluated else [],
            {path.name: path.read_bytes() for path in (workdir / 'samples').glob('*')},
        )

    def differences(self, other: Outcome, *, pictures_lost: bool = False) -> list[str]:
        """Names what differs from another outcome.

        Args:
          pictures_lost: `other` may lack pictures; those that it has must be equal.
        """
        differing = [
            f'state{name}'
            for name in sorted(self.state.keys() | other.state.keys())
            if self.state.get(name) != other.state.get(name)
        ]
        for table in ('metrics', 'evaluations'):
            if getattr(self, table) != getattr(other, table):
                differing.append(table)
        names = other.pictures if pictures_lost else self.pictures.keys() | other.pictures.keys()
        return differing + [
            name for name in sorted(names) if self.pictures.get(name) != other.pictures.get(name)
        ]


def _timeless(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    return [{name: v for name, v in row.items() if name not in TIMES} for row in rows]


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def last_line(text: str) -> str:
    """The line of an error, else the last line, shortened."""
    lines = [line for line in text.splitlines() if line.strip()] or ['']
    errors = [line for line in lines if line.startswith('error:')] or lines
    return errors[-1][:200]


def complete_steps(workdir: pathlib.Path) -> list[int]:
    """The steps of the finished checkpoints."""
    folder = workdir / checkpoint.FOLDER
    return sorted(int(path.name) for path in folder.glob('*') if path.name.isdigit())


def read_steps(workdir: pathlib.Path) -> list[int]:
    """The logged steps."""
    path = workdir / 'metrics.csv'
    return [int(row['step']) for row in read_metrics(path)] if path.exists() else []


def resumed_at(error: str) -> int | None:
    """The step that a run said it resumed at; None if it started anew."""
    steps = RESUMING.findall(error)
    return int(steps[-1]) if steps else None


def wait_for(process: Fork, marks: pathlib.Path, stage: str, count: int) -> bool:
    """Waits until a command enters a stage for the `count`th time.

    Args:
      marks: its file of marks (`victim.py`).

    Returns:
      False if the command ended before.

    Raises:
      Ended: nothing happened for `SECONDS`.
    """
    end = time.monotonic() + SECONDS
    while marks.read_text().split().count(stage) < count:
        if process.poll() is not None:
            return False
        if time.monotonic() > end:
            raise Ended(f'no {stage} after {SECONDS} s: {last_line(process.stderr.read_text())}')
        time.sleep(0.001)
    return True


@contextlib.contextmanager
def disk(folder: pathlib.Path, kilobytes: int) -> Iterator[pathlib.Path]:
    """A file system in memory, of a size; needs the right to mount."""
    folder.mkdir()
    _mount('-t', 'tmpfs', '-o', f'size={kilobytes}k', 'tmpfs', folder)
    try:
        yield folder
    finally:
        subprocess.run(['umount', '-l', folder], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def remount(folder: pathlib.Path, options: str) -> None:
    """Changes a `disk`: its size, or whether it can be written."""
    _mount('-o', f'remount,{options}', folder)


def can_mount() -> bool:
    """Returns whether this process may mount a `disk`."""
    if os.geteuid() != 0 or shutil.which('mount') is None:
        return False
    try:
        with tempfile.TemporaryDirectory() as folder, disk(pathlib.Path(folder) / 'disk', 100):
            return True
    except subprocess.CalledProcessError:
        return False


def _mount(*arguments: object) -> None:
    subprocess.run(['mount', *map(str, arguments)], check=True, capture_output=True)


def processes_started(supervisors: Sequence[Fork]) -> list[list[int]]:
    """Returns the processes that each supervisor has started so far."""
    return [[int(n) for n in TRAINS.findall(p.stderr.read_text())] for p in supervisors]
