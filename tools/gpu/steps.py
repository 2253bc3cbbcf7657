"""Times training steps of several checkouts, backends, sets of kernels or devices, in turns.

A drift of the machine's speed then affects all equally.

    python3 tools/gpu/steps.py OLD NEW [MORE ...] [--config configs/elephants64.py]
      [--batch_sizes 32,256] [--backends auto] [--kernels fastest] [--devices 1]
      [--variables NAME=VALUE] [--fields SECTION.NAME=VALUE] [--precision float32] [--rounds 8]
      [--output rows.jsonl]
    python3 tools/gpu/steps.py . --backends xla,auto,cuda --kernels fastest,fastest,portable
    python3 tools/gpu/steps.py . --devices 1,2
    python3 tools/gpu/steps.py . --devices 2 --variables ,NCCL_MAX_CTAS=8
    python3 tools/gpu/steps.py . --devices 2 --fields ,parallel.shard_optimizer=True

A side is a checkout, a backend, a value of JAXUNET_KERNELS (`--kernels`), a number of devices, each
of which trains on `--batch_sizes` images, environment variables and fields of the config, both
separated by spaces. Give each of these either one value for all sides, or one value for every side.
Each checkout must be built (tools/gpu/build.sh). Each side has its own process, with random images;
all compile at the same time, then one runs while the others wait. The default of `--precision` is
that of the config.
Prints a line for each of `--batch_sizes` with the medians, their ratios to the first side, and the
peak memory of a GPU of each side; rows are appended to the file of `--output`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import pathlib
import runpy
import shlex
import statistics
import subprocess
import sys
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
TURN_SECONDS = 0.4
# The command's arguments with the values of each field of `Variant`.
ARGUMENTS = ('checkouts', '--backends', '--kernels', '--devices', '--variables', '--fields')


class Variant(NamedTuple):
    """One worker's share of the timing; `kernels` is a value of JAXUNET_KERNELS, `variables` are
    environment variables and `fields` those of the config, as NAME=VALUE, separated by spaces.
    """

    checkout: pathlib.Path
    backend: str
    kernels: str
    devices: int
    variables: str
    fields: str


def sides(*lists: list[Any]) -> list[Variant]:
    """Returns the sides; a list of one value is repeated.

    Args:
      lists: the values of each field of `Variant`.

    Raises:
      SystemExit: the lists differ in length, or a variable or field has no name or no value.
    """
    count = max(map(len, lists))
    for name, values in zip(ARGUMENTS, lists, strict=True):
        if len(values) not in (1, count):
            sys.exit(f'{name}: expected 1 or {count} values, found {len(values)}')
    whole = [values * (count // len(values)) for values in lists]
    found = [Variant(*values) for values in zip(*whole, strict=True)]
    for flag, form in (('variables', 'NAME=VALUE'), ('fields', 'SECTION.NAME=VALUE')):
        for pair in ' '.join(getattr(side, flag) for side in found).split():
            name, equals, _ = pair.partition('=')
            if not (name and equals and form.count('.') == name.count('.')):
                sys.exit(f'--{flag}: expected {form}, found {pair}')
    return found


def labels(sides: list[Variant]) -> list[str]:
    """Returns the names of the sides: the properties in which they differ, or their checkout."""
    fields = Variant._fields
    differing = [i for i in range(len(fields)) if len({side[i] for side in sides}) > 1]
    return [' '.join(str(side[i]) or f'no {fields[i]}' for i in differing or [0]) for side in sides]


def main() -> None:
    """Starts the workers and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('checkouts', nargs='+', type=pathlib.Path)
    parser.add_argument('--config', default='configs/elephants64.py')
    parser.add_argument('--batch_sizes', default='32,256')
    parser.add_argument('--backends', '--backend', default='auto')
    parser.add_argument('--kernels', default=os.environ.get('JAXUNET_KERNELS') or 'fastest')
    parser.add_argument('--devices', default='1')
    parser.add_argument('--variables', default='')
    parser.add_argument('--fields', default='')
    parser.add_argument('--precision', help='in place of that of the config')
    parser.add_argument('--rounds', type=int, default=8)
    parser.add_argument('--output', type=pathlib.Path)
    parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    if options.rounds < 2:
        parser.error(f'--rounds: quartiles need 2 or more, found {options.rounds}')
    timed = sides(
        options.checkouts,
        options.backends.split(','),
        options.kernels.split(','),
        [int(count) for count in options.devices.split(',')],
        options.variables.split(','),
        options.fields.split(','),
    )
    names = labels(timed)
    origin = provenance(timed) if options.output else {}
    titles = ('ratios, median (quartiles)', 'peak GiB')
    print(' | '.join(['batch', *(f'{name}, ms' for name in names), *titles]))
    workers = [start(side, options.config, options.precision) for side in timed]
    try:
        for size in map(int, options.batch_sizes.split(',')):
            times = measure(workers, size, options.rounds)
            ratios = [
                statistics.quantiles([a / b for a, b in zip(own, times[0], strict=True)], n=4)
                for own in times[1:]
            ]
            medians = [statistics.median(own) for own in times]
            cells = [str(size), *(f'{ms:.3f}' for ms in medians)]
            cells.append(', '.join(f'{q[1]:.4f} ({q[0]:.4f} to {q[2]:.4f})' for q in ratios))
            peaks = [ask_for(worker, 'peak') or None for worker in workers]
            cells.append(', '.join(f'{peak / 2**30:.2f}' if peak else 'unknown' for peak in peaks))
            print(' | '.join(cells), flush=True)
            if options.output:
                row = origin | {'batch_size': size, 'config': options.config}
                row |= {'precision': options.precision} if options.precision else {}
                row |= {
                    'checkouts': [str(side.checkout) for side in timed],
                    'backends': [side.backend for side in timed],
                    'kernels': [side.kernels for side in timed],
                    'devices_by_side': [side.devices for side in timed],
                    'variables': [side.variables for side in timed],
                    'fields': [side.fields for side in timed],
                    'ms': times,
                    'medians': medians,
                    'peak_bytes': peaks,
                }
                with options.output.open('a') as file:
                    file.write(json.dumps(row, allow_nan=False) + '\n')
    finally:
        for worker in workers:
            worker.kill()


def provenance(sides: list[Variant]) -> dict[str, object]:
    """Returns the origin of rows: device, versions, command and each side's commit.

    `git` is the commit of the last side.
    """
    # Imported here, because a worker must have the modules of its own checkout.
    sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
    from support.origin import origin  # noqa: PLC0415

    origins = {checkout: origin(checkout) for checkout in {side.checkout for side in sides}}
    command = shlex.join(['python3', 'tools/gpu/steps.py', *sys.argv[1:]])
    commits = [origins[side.checkout]['git'] for side in sides]
    return {'kind': 'turns', **origins[sides[-1].checkout], 'command': command, 'commits': commits}


def start(side: Variant, config: str, precision: str | None) -> subprocess.Popen[str]:
    """Starts the process of a side with the modules of its checkout."""
    root = str(side.checkout.resolve())
    path = os.pathsep.join(filter(None, [root, os.environ.get('PYTHONPATH')]))
    flags = ['--worker', '--config', config, '--backend', side.backend]
    flags += ['--devices', str(side.devices), '--fields', side.fields]
    flags += [f'--precision={precision}'] if precision else []
    return subprocess.Popen(
        [sys.executable, str(pathlib.Path(__file__).resolve()), *flags, '.'],
        cwd=side.checkout,
        env=os.environ
        | {
            'PYTHONPATH': path,
            'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
        }
        | {'JAXUNET_KERNELS': side.kernels}
        | dict(variable.split('=', 1) for variable in side.variables.split()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def measure(workers: list[subprocess.Popen[str]], size: int, rounds: int) -> list[list[float]]:
    """Returns each worker's milliseconds per step in each round; every other round is reversed."""
    for worker in workers:
        ask(worker, 'batch', size)
    seconds = [answer(worker) for worker in workers]
    # The same number of calls for all; each turn begins with one that warms up and is not timed.
    calls = max(1, round(TURN_SECONDS / min(seconds)))
    times: list[list[float]] = [[] for _ in workers]
    for turn in range(rounds):
        order = list(zip(workers, times, strict=True))
        for worker, own in order if turn % 2 == 0 else order[::-1]:
            own.append(ask_for(worker, 'run', calls))
    return times


def ask_for(worker: subprocess.Popen[str], what: str, number: int = 0) -> float:
    """Sends a line to a worker, and returns its answer."""
    ask(worker, what, number)
    return answer(worker)


def ask(worker: subprocess.Popen[str], what: str, number: int) -> None:
    """Sends a line to a worker."""
    assert worker.stdin is not None
    worker.stdin.write(f'{what} {number}\n')
    worker.stdin.flush()


def answer(worker: subprocess.Popen[str]) -> float:
    """Waits for the worker's answer, a number; exits if the worker has ended."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith('answer '):
            return float(line.split()[1])
    sys.exit(f'a worker ended with status {worker.wait()}; its messages are above')


def work(options: argparse.Namespace) -> None:
    """Runs a worker.

    It answers `batch N` with seconds per call, `run CALLS` with milliseconds per step, and `peak 0`
    with bytes, or 0 if they are unknown.
    """
    import time  # noqa: PLC0415

    # Imported only in a worker, because they must be the modules of the checkout that is timed.
    from jaxunet.benchmark.cases import benchmark_config  # noqa: PLC0415
    from jaxunet.benchmark.jax_side import JaxSide, synthetic_source  # noqa: PLC0415
    from jaxunet.checkpoint.state import fresh_state  # noqa: PLC0415
    from jaxunet.config import resolve  # noqa: PLC0415

    values = runpy.run_path(options.config)['get_config']()
    config = benchmark_config(resolve(values)).replace(backend=options.backends)
    if options.precision:
        config = config.replace(precision=options.precision)
    devices = int(options.devices)
    config = config.replace(parallel={'devices': devices})
    for pair in options.fields.split():
        path, _, value = pair.partition('=')
        section, _, name = path.partition('.')
        config = config.replace(**{section: {name: _value(value)}})
    source, state, prepared = synthetic_source(config), fresh_state(config), None
    for line in sys.stdin:
        what, number = line.split()
        if what == 'peak':
            print(f'answer {prepared.peak_bytes or 0}', flush=True)
            continue
        if what == 'batch':
            if prepared is not None:
                prepared.close()
            sized = config.replace(data={'batch_size': devices * int(number)})
            prepared = JaxSide(sized, source, state).prepare('step')
            calls, scale = 1, 1.0
        else:
            calls, scale = int(number), 1e3 / prepared.unit
            prepared.run(prepared.unit)
        began = time.perf_counter()
        prepared.run(calls * prepared.unit)
        print(f'answer {(time.perf_counter() - began) / calls * scale}', flush=True)


def _value(text: str) -> object:
    """Returns the value that a text stands for: a literal of Python, or else the text itself."""
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value


if __name__ == '__main__':
    main()
