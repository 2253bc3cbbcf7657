"""Runs the points of a sweep, each in its own process, and keeps their results.

`OUTPUT/results.jsonl` gets one row per point as soon as the point is done. The row has a key made
from everything that its numbers depend on: the resolved config, the measured ops that
`backend=auto` takes, XLA_FLAGS, the options of the measurement, the versions, the device and the
code. The same command runs only the missing points.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxunet.config import identity
from jaxunet.config.schema import Fields
from jaxunet.ops.backends import UNNAMED
from jaxunet.runtime import fingerprint, rows
from jaxunet.runtime import subprocesses as processes
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.rows import Row
from jaxunet.sweep.config_file import config_file
from jaxunet.sweep.points import Machine, Point
from jaxunet.sweep.row import IMPOSSIBLE, OK, check_row

MEASURE = 'jaxunet.sweep.measure'
RESULTS = 'results.jsonl'
XLA_FLAGS = 'XLA_FLAGS'  # environment variable
# Tool of a point: time training steps, or trace them with jaxunet.profile.
STEP, PROFILE = 'step', 'profile'
PROBE_SECONDS = 300.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """Options of the measurement, for every point.

    Fields:
      steps: timed or traced steps.
      warmup: steps before them.
      max_seconds: time limit of the timed steps.
      timeout: seconds after which the process of a point is killed.
      retry_failed: run points again that failed before.
      tool: `STEP` or `PROFILE`.
      side_by_side: points that need only some of the GPUs share the machine.
    """

    steps: int = 100
    warmup: int = 10
    max_seconds: float = 60.0
    timeout: float = 900.0
    retry_failed: bool = False
    tool: str = STEP
    side_by_side: bool = False


@dataclass(frozen=True)
class Task:
    """The input of a point's process (`jaxunet.sweep.measure`).

    Fields:
      config: the config as nested dicts.
      jit: compile the step as one program.
      varied: names of the sweep's axes.
      steps: steps to time.
      warmup: steps before them; a stream of batches runs at least as many as it reads ahead.
      max_seconds: time limit of the timed steps, a few of which always run.
    """

    config: Fields
    jit: bool
    varied: list[str]
    steps: int
    warmup: int
    max_seconds: float


def latest_rows(directory: pathlib.Path) -> dict[str, Row]:
    """Returns the latest row of every key in the folder of a sweep.

    Raises:
      UserError: a line that is not such a row.
    """
    return rows.latest([directory / RESULTS], lambda row: row.get('key'), check_row)


def key(point: Point, options: Options, machine: Machine) -> str:
    """Returns the key of a result: equal for points whose numbers measure the same thing."""
    origin = machine.provenance
    same = {
        'config': identity(point.raw),
        'jit': point.jit,
        'measuring': [options.tool, options.steps, options.warmup, options.max_seconds],
        'device': [machine.platform, machine.devices, origin.get('device'), origin.get('driver')],
        'versions': origin.get('versions'),
        'code': code(origin.get('git')),
    }
    # Only if there are any, so that rows of earlier versions keep their keys.
    same |= {
        name: value
        for name, value in (
            ('auto', _auto(point, machine)),
            ('xla_flags', os.environ.get(XLA_FLAGS)),
        )
        if value
    }
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]


def _auto(point: Point, machine: Machine) -> dict[str, str] | None:
    """Returns the measured ops of a point with `backend=auto`; None if it has none."""
    raw = point.raw
    return machine.auto.get(raw['precision']) if raw['backend'].split('+')[0] == UNNAMED else None


def code(git: str | None) -> str:
    """Returns the commit, or a fingerprint of the sources if there is none or files differ."""
    if git and not git.endswith('-dirty'):
        return git
    return fingerprint.sources()


def probe() -> Machine:
    """Returns this machine as JAX sees it, asked in another process.

    The process of the sweep must not hold a device itself.

    Raises:
      UserError: JAX does not start.
    """
    answer = processes.answer(
        [sys.executable, '-m', MEASURE, 'probe'], dict(os.environ), PROBE_SECONDS, None
    )
    if answer.row is None:
        raise UserError(f'JAX does not start on this machine: {answer.failure[1]}')
    return Machine(**answer.row)


def needed_gpus(point: Point, machine: Machine) -> int:
    """Returns the number of GPUs that a point uses; 0 if it cannot run."""
    if point.problem:
        return 0
    return (point.raw['parallel']['devices'] or machine.devices) if point.jit else 1


def gpu_names(machine: Machine) -> list[str]:
    """Returns the GPUs of this machine, as CUDA_VISIBLE_DEVICES names them.

    Raises:
      UserError: there is none.
    """
    if machine.platform != 'gpu':
        raise UserError(
            '--side_by_side: gives each point GPUs of its own, but this machine has none; leave '
            'it out'
        )
    named = os.environ.get('CUDA_VISIBLE_DEVICES')
    return named.split(',') if named else [str(i) for i in range(machine.devices)]


def summary(row: Row) -> str:
    """Summarizes the result of a row in one line."""
    if row['status'] != OK:
        return f'{row["status"]}: {row["reason"]}'
    if 'profile' in row:
        return (
            f'{row["step_ms"]["median"]:.2f} ms per step, device idle {row["idle_share"]:.1%}, '
            f'{row["launches"]:.0f} launches per step'
        )
    low, high = row['step_ms']['quartiles']
    cached = ' (cached)' if row['compile_cached'] else ''
    return (
        f'{row["images_per_s"]:.1f} images/s, '
        f'{row["step_ms"]["median"]:.2f} ms ({low:.2f} to {high:.2f}), '
        f'compiled in {row["compile_s"]:.1f} s{cached}, {row["peak_bytes"] / 2**30:.2f} GiB'
    )


def _command(point: Point, options: Options) -> list[str]:
    task = Task(
        point.raw, point.jit, list(point.values), options.steps, options.warmup, options.max_seconds
    )
    return [sys.executable, '-m', MEASURE, json.dumps(dataclasses.asdict(task))]


def environment(point: Point, machine: Machine, gpus: Sequence[str] = ()) -> dict[str, str]:
    """Returns the environment variables of a point's process.

    Without a GPU, XLA emulates as many devices as the point asks for on the same cores.

    Args:
      point: the point.
      machine: from `probe`.
      gpus: GPUs of the point, as CUDA_VISIBLE_DEVICES names them; empty: all.
    """
    env = processes.environment(gpus)
    wanted = point.raw['parallel']['devices']
    if machine.platform == 'cpu' and wanted > machine.devices:
        env[XLA_FLAGS] = (
            f'{env.get(XLA_FLAGS, "")} --xla_force_host_platform_device_count={wanted}'.strip()
        )
    return env


@dataclass(frozen=True)
class Runner:
    """Measures points, and appends their rows to results.jsonl.

    Fields:
      directory: folder of the sweep.
      machine: from `probe`.
      say: prints one line of progress.
    """

    directory: pathlib.Path
    options: Options
    machine: Machine
    say: Say

    def run(self, points: Sequence[Point]) -> None:
        """Measures those points of the grid that have no row yet.

        They run one after the other so that they do not disturb each other, or at the same time on
        separate GPUs (`Options.side_by_side`).

        Raises:
          UserError: `side_by_side` without a GPU.
        """
        known = latest_rows(self.directory)
        keys = [key(point, self.options, self.machine) for point in points]
        todo = [
            i
            for i, k in enumerate(keys)
            if k not in known or (self.options.retry_failed and known[k]['status'] != OK)
        ]
        if len(todo) < len(points):
            failed = sum(
                known[k]['status'] not in (OK, IMPOSSIBLE)
                for i, k in enumerate(keys)
                if i not in todo
            )
            hint = f' ({failed} of them failed; --retry_failed runs those again)' if failed else ''
            done = f'{len(points) - len(todo)} of {len(points)} points are done{hint}'
            self.say(f'{done}: {self.directory / RESULTS}')
        writing = threading.Lock()

        def work(i: int, gpus: Sequence[str]) -> None:
            label = f'[{i + 1}/{len(points)}] {points[i].label}'
            if not points[i].problem:
                self.say(f'{label} ...')
            row = self._row(points[i], keys[i], gpus)
            with writing:
                rows.append(self.directory / RESULTS, row)
                self.say(f'{label}: {summary(row)}')

        if self.options.side_by_side:
            needed = [(i, needed_gpus(points[i], self.machine)) for i in todo]
            processes.share(needed, gpu_names(self.machine), work)
        else:
            for i in todo:
                work(i, ())

    def _row(self, point: Point, name: str, gpus: Sequence[str]) -> Row:
        """Measures a point if it can run, and returns its row of results.jsonl.

        Args:
          name: its key.
          gpus: as for `environment`.
        """
        began = time.perf_counter()
        if point.problem:
            result: Row = {'status': IMPOSSIBLE, 'reason': point.problem}
        else:
            result = self._measure(point, name, environment(point, self.machine, gpus))
        return {
            'case': 'sweep',
            'key': name,
            **result,
            'seconds': round(time.perf_counter() - began, 1),
            'point': point.values,
            'batch': point.raw['data']['batch_size'],
            'config': point.raw,
            'jit': point.jit,
            'side_by_side': bool(gpus),
            'xla_flags': os.environ.get(XLA_FLAGS, ''),
            **self.machine.provenance,
        }

    def _measure(self, point: Point, name: str, env: dict[str, str]) -> Row:
        log = self.directory / 'logs' / f'{name}.log'
        if self.options.tool == PROFILE:
            answer = self._profile(point, name, env, log)
        else:
            command = _command(point, self.options)
            answer = processes.answer(command, env, self.options.timeout, log)
        if answer.row is not None:
            return answer.row
        status, reason = answer.failure
        return {'status': status, 'reason': reason, 'log': str(log.relative_to(self.directory))}

    def _profile(
        self, point: Point, name: str, env: dict[str, str], log: pathlib.Path
    ) -> processes.Answer:
        """Traces the steps of a point; OUTPUT/profiles/KEY gets the files of `jaxunet.profile`."""
        folder = self.directory / 'profiles' / name
        shutil.rmtree(folder, ignore_errors=True)  # left by a failed attempt
        folder.mkdir(parents=True)
        text = config_file(f'Point of a sweep: {point.label}', point.raw)
        (folder / 'config.py').write_text(text)
        command = [
            sys.executable,
            '-m',
            'jaxunet.profile',
            f'--config={folder / "config.py"}',
            f'--output={folder}',
            '--noplot',
            f'--steps={self.options.steps}',
            f'--warmup={self.options.warmup}',
        ]
        answer = processes.answer(command, env, self.options.timeout, log, json_output=False)
        if answer.failure[0]:
            return answer
        traced = rows.read(folder / 'profile.jsonl')[-1]
        table = next(path for path in folder.glob('*.csv'))
        row = {
            'status': OK,
            'images_per_s': point.raw['data']['batch_size'] / traced['step_ms'] * 1e3,
            'step_ms': {'median': traced['step_ms']},
            'compile_s': traced['compile_s'],
            'ops': traced['ops'],
            **{key: traced[key] for key in ('phase_ms', 'busy_ms', 'idle_share', 'launches')},
            'profile': str(table.relative_to(self.directory)),
        }
        return processes.Answer(row)
