"""Measures how long the commands take to their first step and first picture, cold and warm.

    python tools/gpu/starts.py --output docs/results/start/commands.jsonl
    python tools/gpu/starts.py --table docs/results/start/commands.jsonl

Every case runs its command twice with its own cache folder: cold, with an empty folder, then warm.
Training stops at the first row of metrics.csv, after the first call (20 steps). Sampling draws 256
images; the first picture is there once the first batch of 64 is stored. Weights and images are
random, with the sizes of configs/elephants64.py. Most cases sample from a .bin file; one each uses
a .pt file, a .safetensors file and the workdir of a run in bfloat16.

Most of a start is work of the host, so `--lanes` cases run at a time, each on its share of the CPU
cores; the rows say how many. Cases begin in the order of `CASES` until `--seconds` have passed. Any
that still run then are stopped, and their rows get an error.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

from support.commands import python_path  # noqa: E402
from support.origin import origin  # noqa: E402

from jaxunet.runtime import markdown, rows  # noqa: E402
from jaxunet.runtime.rows import Row  # noqa: E402
from jaxunet.training.logs import read_metrics  # noqa: E402

IMAGES, BATCH, EVALUATIONS = 256, 64, 50
POLL = 0.005  # seconds between two checks of what a command has written
WEIGHTS = """
import sys
import pathlib
import numpy as np
from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import Checkpoints
from jaxunet.config import resolve
from jaxunet.model.cost import forward_flops
from jaxunet.weights import write_weights
sys.path.insert(0, 'configs')
import elephants64
config = resolve(elephants64.get_config()).replace(model={'zero_init': False})
folder, state = sys.argv[1], fresh_state(config)
for suffix, period in (('bin', 1000), ('pt', 10000), ('safetensors', 1000)):
    # A .pt file has no other period of the embedding.
    same = config.replace(model={'max_period': period})
    write_weights(f'{folder}/model.{suffix}', state.params, same)
store = Checkpoints(pathlib.Path(folder) / 'workdir', keep=1)
store.save(1, state.replace(step=np.int32(1)), config.replace(precision='bfloat16'))
store.close()
print(forward_flops(config))
"""


class Case(NamedTuple):
    """One command; with `backend` None, the command chooses the backend."""

    task: str  # train or sample
    precision: str
    backend: str | None
    checkpoint: str = 'model.bin'  # the file that sampling reads


CASES = (
    Case('train', 'bfloat16', None),
    Case('train', 'float32', 'cuda'),
    Case('sample', 'float32', 'pallas'),  # by far the longest
    Case('sample', 'float32', 'cuda'),
    Case('sample', 'bfloat16', 'cuda'),
    Case('sample', 'float32', 'xla'),
    Case('train', 'bfloat16', 'cuda'),
    Case('sample', 'bfloat16', 'xla'),
    Case('sample', 'float32', None),
    Case('sample', 'bfloat16', None),
    Case('train', 'float32', None),
    Case('sample', 'bfloat16', None, 'workdir'),
    Case('sample', 'float32', None, 'model.pt'),
    Case('sample', 'float32', None, 'model.safetensors'),
)


class Folders:
    """The folder of all cases, with weights and images, and the folder of one case."""

    def __init__(self, shared: pathlib.Path, number: int) -> None:
        self.shared, self.images = shared, shared / 'images.npz'
        self.own = shared / f'case{number}'
        self.own.mkdir()


def arguments(case: Case, folders: Folders, out: pathlib.Path) -> list[str]:
    """Returns the arguments of `python -m` for a case."""
    if case.task == 'train':
        named = [f'--config.backend={case.backend}'] if case.backend else []
        return [
            'jaxunet.train',
            '--config=configs/elephants64.py',
            f'--config.data.path={folders.images}',
            f'--config.precision={case.precision}',
            '--config.train.log_every=20',
            f'--workdir={out}',
            *named,
        ]
    # A weight file gets float32 by itself, and the workdir bfloat16.
    given = 'bfloat16' if case.checkpoint == 'workdir' else 'float32'
    precision = [f'--precision={case.precision}'] if case.precision != given else []
    return [
        'jaxunet.sample',
        f'--checkpoint={folders.shared / case.checkpoint}',
        f'--num_samples={IMAGES}',
        f'--batch_size={BATCH}',
        '--sampler=ddim',
        f'--steps={EVALUATIONS}',
        f'--output={out}/samples.npz',
        *precision,
        *([f'--backend={case.backend}'] if case.backend else []),
    ]


def environment(case: Case, folders: Folders, lanes: int) -> dict[str, str]:
    """Returns the environment of a case, with its own caches and a share of the GPU's memory."""
    caches = {'XDG_CACHE_HOME': 'cache', 'CUDA_CACHE_PATH': 'cuda', 'TRITON_CACHE_DIR': 'triton'}
    kept = {k: v for k, v in os.environ.items() if k != 'JAX_COMPILATION_CACHE_DIR'}
    return kept | {
        **{name: str(folders.own / folder) for name, folder in caches.items()},
        'PYTHONPATH': python_path(),
        'PYTHONUNBUFFERED': '1',
        'XLA_PYTHON_CLIENT_MEM_FRACTION': f'{0.8 / lanes:.2f}',
    }


def first_output(case: Case, out: pathlib.Path) -> bool:
    """Returns True once the first step's row or the first picture is there."""
    if case.task == 'train':
        table = out / 'metrics.csv'
        return table.exists() and table.read_bytes().count(b'\n') > 1
    return any(out.glob('samples.npz.partial/*-*.npz')) or (out / 'samples.npz').exists()


def measure(
    case: Case, folders: Folders, cores: Sequence[int], lanes: int, *, warm: bool, end: float
) -> Row:
    """Runs the command of a case once; returns what was measured, as fields of a row."""
    out = folders.own / ('warm' if warm else 'cold')
    out.mkdir()
    log = folders.own / f'{out.name}.log'
    command = [sys.executable, '-m', *arguments(case, folders, out)]
    with log.open('w') as printed:
        began = time.perf_counter()
        process = subprocess.Popen(
            ['taskset', '-c', ','.join(map(str, cores)), *command],
            cwd=ROOT,
            env=environment(case, folders, lanes),
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        first = imported = None
        while process.poll() is None and time.monotonic() < end:
            if imported is None and log.stat().st_size:
                imported = time.perf_counter() - began
            if first is None and first_output(case, out):
                first = time.perf_counter() - began
                if case.task == 'train':
                    break
            time.sleep(POLL)
        seconds = time.perf_counter() - began
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    text = log.read_text(errors='replace').replace('\r', '\n')
    if first is None and first_output(case, out):  # written just before the command ended
        first = seconds
    metrics = read_metrics(out / 'metrics.csv') if case.task == 'train' and first else None
    row: Row = {
        'cache': 'kept' if warm else 'empty',
        'imported_s': imported and round(imported, 2),
        'first_s': first and round(first, 2),
        'total_s': round(seconds, 2) if case.task == 'sample' and code == 0 else None,
        'ready_s': _number(r'the sampler was ready after ([\d.]+) s', text),
        'step_ms': float(metrics[0]['step_ms']) if metrics else None,
        'ops': (re.findall(r'^ops: .*$', text, re.MULTILINE) or [None])[-1],
        'said': re.findall(r'^backend=.*$', text, re.MULTILINE),
        'arguments': ' '.join(command[1:]).replace(str(folders.own.parent), 'TMP'),
        'error': None,
    }
    if first is None or (case.task == 'sample' and code != 0):
        why = 'cut off by --seconds' if code == -signal.SIGKILL else f'exit status {code}'
        row['error'] = f'{why}: {text[-300:]}'
    return row


def _number(pattern: str, text: str) -> float | None:
    match = re.search(pattern, text)
    return float(match[1]) if match else None


def script(text: str, *arguments: str, **variables: str) -> str:
    """Runs a Python program; returns what it prints."""
    done = subprocess.run(
        [sys.executable, '-c', text, *arguments],
        cwd=ROOT,
        env=os.environ | {'PYTHONPATH': python_path()} | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def run(cases: Sequence[Case], output: pathlib.Path, seconds: float, lanes: int) -> list[Row]:
    """Measures the cases and appends their rows to `output`; returns them."""
    began = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    share = max(len(cores) // lanes, 1)
    todo: queue.SimpleQueue[tuple[int, Case]] = queue.SimpleQueue()
    for item in enumerate(cases):
        todo.put(item)
    measured: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(lanes + 2) as pool:
        shared = pathlib.Path(folder)
        images = np.random.default_rng(0).integers(0, 256, (500, 64, 64, 3), np.uint8)
        np.savez(shared / 'images.npz', images=images)
        flops = pool.submit(script, WEIGHTS, folder, JAX_PLATFORMS='cpu')
        asked = pool.submit(origin, ROOT)

        def keep(row: Row) -> None:
            """Adds the row to the file at once, in case this command is stopped."""
            measured.append(
                asked.result()
                | {'kind': 'start', 'config': 'elephants64', 'forward_flops': float(flops.result())}
                | {'command': f'python tools/gpu/starts.py --seconds {seconds:g} --lanes {lanes}'}
                | row
            )
            rows.append(output, measured[-1])
            print(f'[{time.monotonic() - began:.0f} s] {line(row)}', flush=True)

        def work(lane: int) -> None:
            mine = cores[lane * share : (lane + 1) * share] or cores
            while time.monotonic() - began < seconds:
                try:
                    number, case = todo.get_nowait()
                except queue.Empty:
                    return
                if case.task == 'sample':
                    flops.result()  # the weights are written
                folders = Folders(shared, number)
                for warm in (False, True):
                    row = measure(case, folders, mine, lanes, warm=warm, end=began + seconds)
                    keep(case._asdict() | row | {'cores': len(mine), 'lanes': lanes})
                    if row['error']:
                        break

        for done in [pool.submit(work, lane) for lane in range(lanes)]:
            done.result()
    while not todo.empty():
        print(f'not run: {todo.get()[1]}')
    return measured


def line(row: Row) -> str:
    """Returns one readable line of a row."""
    names = ('imported_s', 'first_s', 'ready_s', 'total_s', 'step_ms')
    values = ', '.join(f'{name} {row[name]}' for name in names if row[name] is not None)
    shown = ' '.join([read_from(row), row['precision'], row['backend'] or 'auto'])
    shown += f', cache {row["cache"]}'
    return ' | '.join([f'{shown}: {row["error"] or values}', *row['said']])


def read_from(row: Row) -> str:
    """Returns the task of a row, with what sampling reads."""
    return row['task'] + (f' {row["checkpoint"]}' if row['task'] == 'sample' else '')


def table(rows: Sequence[Row]) -> str:
    """Returns a Markdown table: seconds to the first step or picture, cold and warm."""
    cases: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        key = read_from(row), row['precision'], row['backend'] or 'auto'
        cases.setdefault(key, {})[row['cache']] = row

    def shown(row: Row | None, name: str) -> str:
        return f'{row[name]:.1f}' if row and row[name] is not None else '-'

    body = []
    for key, by_cache in sorted(cases.items()):
        cold, warm = by_cache.get('empty'), by_cache.get('kept')
        cells = [shown(cold, 'first_s'), shown(warm, 'first_s'), shown(warm or cold, 'step_ms')]
        body.append([*key, *cells])
    head = ('command', 'precision', 'backend', 'cold s', 'warm s', 'step ms')
    return markdown.table(head, body)


def main() -> None:
    """Runs what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--output', type=pathlib.Path, default=pathlib.Path('starts.jsonl'))
    parser.add_argument('--seconds', type=float, default=170)
    parser.add_argument('--lanes', type=int, default=3)
    parser.add_argument('--table', type=pathlib.Path, help='print the table of these rows, and end')
    parser.add_argument(
        '--auto', action='store_true', help='only cases that leave the backend to the command'
    )
    options = parser.parse_args()
    if options.table:
        print(table(rows.read(options.table)))
        return
    cases = [case for case in CASES if case.backend is None or not options.auto]
    print(table(run(cases, options.output, options.seconds, options.lanes)))


if __name__ == '__main__':
    main()
