"""Runs the points of a sweep, each in a process of its own, and keeps what they gave.

`OUTPUT/results.jsonl` gets a row a point as soon as it is done, under a key of everything that its numbers depend on: the resolved
config, the measuring options, the versions, the device and the code. The same command again runs what is missing.
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
from typing import Any

from jaxunet.config import Config, to_dict
from jaxunet.runtime import fingerprint, rows
from jaxunet.runtime import subprocesses as processes
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.subprocesses import Row
from jaxunet.sweep.points import Machine, Point

MEASURE = 'jaxunet.sweep.measure'
OK, ERROR, IMPOSSIBLE = 'ok', 'error', 'impossible'  # besides how a process fails
STEP, PROFILE = (
    'step',
    'profile',
)  # what a point does: time training steps, or trace them with jaxunet.profile
PROBE_SECONDS = 300.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How every point is measured, and what is done about those that failed before."""

    steps: int = 100
    warmup: int = 10
    max_seconds: float = 60.0
    timeout: float = 900.0
    compile_jobs: int = 0
    retry_failed: bool = False
    tool: str = STEP
    side_by_side: bool = False  # points that need fewer GPUs than there are share the machine


@dataclass(frozen=True)
class Task:
    """What the process of a point is told (`jaxunet.sweep.measure`)."""

    config: dict[str, Any]
    jit: bool
    varied: list[str]  # the axes of the sweep
    steps: int  # to time
    warmup: int  # before them; a stream of batches takes at least as many as it reads ahead
    max_seconds: float  # the timed steps end after this, a few at least are done
    compile_only: bool = False  # fill the compilation cache, and measure nothing else


def results(directory: pathlib.Path) -> dict[str, Row]:
    """The latest row of every key in a sweep's folder."""
    path = directory / 'results.jsonl'
    return {row['key']: row for row in rows.read(path) if 'key' in row} if path.exists() else {}


def key(point: Point, options: Options, machine: Machine) -> str:
    """What a result is kept under: equal for two points whose numbers must be the same thing."""
    origin = machine.provenance
    same = {
        'config': point.raw,
        'jit': point.jit,
        'measuring': [options.tool, options.steps, options.warmup, options.max_seconds],
        'device': [machine.platform, machine.devices, origin.get('device'), origin.get('driver')],
        'versions': origin.get('versions'),
        'code': code(origin.get('git')),
    }
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]


def code(git: str | None) -> str:
    """The commit; where files differ from it, or without one, a fingerprint of the sources."""
    if git and not git.endswith('-dirty'):
        return git
    return fingerprint.sources()


def probe() -> Machine:
    """This machine, as JAX sees it in a process of its own: the sweep itself must not hold any device."""
    answer = processes.answer(
        [sys.executable, '-m', MEASURE, 'probe'], dict(os.environ), PROBE_SECONDS, None
    )
    if answer.row is None:
        raise UserError(f'JAX does not start on this machine: {answer.failure[1]}')
    return Machine(**answer.row)


def run(
    points: Sequence[Point],
    directory: pathlib.Path,
    options: Options,
    machine: Machine,
    say: Say = print,
) -> None:
    """Measures the points that have no row yet: one after the other, so that they do not disturb each other, or on GPUs of their own."""
    known = results(directory)
    keys = [key(point, options, machine) for point in points]
    todo = [
        i
        for i, k in enumerate(keys)
        if k not in known or (options.retry_failed and known[k]['status'] != OK)
    ]
    if len(todo) < len(points):
        failed = sum(
            known[k]['status'] not in (OK, IMPOSSIBLE) for i, k in enumerate(keys) if i not in todo
        )
        hint = f' ({failed} of them failed; --retry_failed runs those again)' if failed else ''
        say(
            f'{len(points) - len(todo)} of {len(points)} points are done{hint}: {directory / "results.jsonl"}'
        )
    able = [i for i in todo if not points[i].problem]
    if options.compile_jobs:
        _compile([points[i] for i in able if points[i].jit], options, machine, directory, say)
    writing = threading.Lock()

    def work(i: int, gpus: Sequence[str]) -> None:
        point = points[i]
        began = time.perf_counter()
        if point.problem:
            row: Row = {'status': IMPOSSIBLE, 'reason': point.problem}
        else:
            say(f'[{i + 1}/{len(points)}] {point.label} ...')
            row = _measure(point, keys[i], options, machine, directory, gpus)
        row |= {
            'seconds': round(time.perf_counter() - began, 1),
            'point': point.values,
            'batch': point.raw['data']['batch_size'],
        }
        row = {
            'case': 'sweep',
            'key': keys[i],
            **row,
            'config': point.raw,
            'jit': point.jit,
            'side_by_side': bool(gpus),
            **machine.provenance,
        }
        with writing:
            rows.append(directory / 'results.jsonl', row)
            say(f'[{i + 1}/{len(points)}] {point.label}: {summary(row)}')

    if options.side_by_side:
        processes.share(
            [(i, needed_gpus(points[i], machine)) for i in todo], gpu_names(machine), work
        )
    else:
        for i in todo:
            work(i, ())


def needed_gpus(point: Point, machine: Machine) -> int:
    """GPUs that a point keeps busy; 0: it does not run."""
    if point.problem:
        return 0
    return (point.raw['parallel']['devices'] or machine.devices) if point.jit else 1


def gpu_names(machine: Machine) -> list[str]:
    """This machine's GPUs, as CUDA_VISIBLE_DEVICES names them.

    Raises:
      UserError: there is none.
    """
    if machine.platform != 'gpu':
        raise UserError(
            '--side_by_side: gives each point GPUs of its own, but this machine has none; leave it out'
        )
    named = os.environ.get('CUDA_VISIBLE_DEVICES')
    return named.split(',') if named else [str(i) for i in range(machine.devices)]


def summary(row: Row) -> str:
    """A row in one line."""
    if row['status'] != OK:
        return f'{row["status"]}: {row["reason"]}'
    if 'profile' in row:
        return f'{row["step_ms"]["median"]:.2f} ms a step, device idle {row["idle_share"]:.1%}, {row["launches"]:.0f} launches a step'
    low, high = row['step_ms']['quartiles']
    return (
        f'{row["images_per_s"]:.1f} images/s, {row["step_ms"]["median"]:.2f} ms ({low:.2f} to {high:.2f}), '
        f'compiled in {row["compile_s"]:.1f} s{" (cached)" if row["compile_cached"] else ""}, {row["peak_bytes"] / 2**30:.2f} GiB'
    )


def _command(point: Point, options: Options, *, compile_only: bool = False) -> list[str]:
    task = Task(
        point.raw,
        point.jit,
        list(point.values),
        options.steps,
        options.warmup,
        options.max_seconds,
        compile_only,
    )
    return [sys.executable, '-m', MEASURE, json.dumps(dataclasses.asdict(task))]


def environment(point: Point, machine: Machine, gpus: Sequence[str] = ()) -> dict[str, str]:
    """Of a point's process: a machine with CPUs only plays as many devices as the point asks for, on the same cores."""
    env = dict(os.environ)
    if gpus:
        env['CUDA_VISIBLE_DEVICES'] = ','.join(gpus)
    wanted = point.raw['parallel']['devices']
    if machine.platform == 'cpu' and wanted > machine.devices:
        env['XLA_FLAGS'] = (
            f'{env.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={wanted}'.strip()
        )
    return env


def _measure(
    point: Point,
    name: str,
    options: Options,
    machine: Machine,
    directory: pathlib.Path,
    gpus: Sequence[str],
) -> Row:
    log = directory / 'logs' / f'{name}.log'
    env = environment(point, machine, gpus)
    if options.tool == PROFILE:
        answer = _profile(point, env, name, options, directory, log)
    else:
        answer = processes.answer(_command(point, options), env, options.timeout, log)
    if answer.row is not None:
        return answer.row
    status, reason = answer.failure
    return {'status': status, 'reason': reason, 'log': str(log.relative_to(directory))}


def _profile(
    point: Point,
    env: dict[str, str],
    name: str,
    options: Options,
    directory: pathlib.Path,
    log: pathlib.Path,
) -> processes.Answer:
    """A trace of the point's steps; the files of `jaxunet.profile` are in OUTPUT/profiles/KEY."""
    folder = directory / 'profiles' / name
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
    folder.mkdir(parents=True)
    (folder / 'config.py').write_text(config_file(point))
    command = [
        sys.executable,
        '-m',
        'jaxunet.profile',
        f'--config={folder / "config.py"}',
        f'--output={folder}',
        '--noplot',
    ]
    answer = processes.answer(
        [*command, f'--steps={options.steps}', f'--warmup={options.warmup}'],
        env,
        options.timeout,
        log,
        json_output=False,
    )
    if answer.failure[0]:
        return answer
    found = rows.read(folder / 'profile.jsonl')[-1]
    rate = point.raw['data']['batch_size'] / found['step_ms'] * 1e3
    numbers = {name: found[name] for name in ('phase_ms', 'busy_ms', 'idle_share', 'launches')}
    timed = {
        'images_per_s': rate,
        'step_ms': {'median': found['step_ms']},
        'compile_s': found['compile_s'],
        'ops': found['ops'],
    }
    table = next(path for path in folder.glob('*.csv'))
    return processes.Answer(
        {'status': OK, **timed, **numbers, 'profile': str(table.relative_to(directory))}
    )


CONFIG_FILE = """\"\"\"Point of a sweep: {label}.\"\"\"

from jaxunet.config import default_config


def get_config():
    config = default_config()
{changes}    return config
"""


def config_file(point: Point) -> str:
    """A point as a config file, for `--config`: what differs from the defaults."""
    default = to_dict(Config())
    changed = []
    for name, value in point.raw.items():
        if isinstance(value, dict):
            changed += [
                (f'{name}.{field}', v) for field, v in value.items() if v != default[name][field]
            ]
        elif value != default[name]:
            changed.append((name, value))
    return CONFIG_FILE.format(
        label=point.label,
        changes=''.join(f'    config.{path} = {value!r}\n' for path, value in changed),
    )


def _compile(
    points: Sequence[Point], options: Options, machine: Machine, directory: pathlib.Path, say: Say
) -> None:
    """Fills the compilation cache, several points at a time. What fails here fails again, and is told, when it is measured."""
    say(f'compiling {len(points)} points, {options.compile_jobs} at a time ...')
    began = time.perf_counter()

    def work(number: int) -> None:
        point = points[number]
        # They share the device, so none may take all of its memory at once.
        env = environment(point, machine) | {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
        processes.answer(
            _command(point, options, compile_only=True),
            env,
            options.timeout,
            directory / 'logs' / f'compile_{number}.log',
        )

    with processes.pool(options.compile_jobs) as threads:
        list(threads.map(work, range(len(points))))
    say(f'compiled in {time.perf_counter() - began:.1f} s')
