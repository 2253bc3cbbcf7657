"""Trains for a long time and shows that nothing grows: memory, open files, threads, step time.

    PYTHONPATH=.:tests python tools/soak/run.py --minutes 30 --output runs/soak -- \
      --config=configs/elephants64.py --config.data.path=elephants64.zip \
      --config.train.checkpoint_every=2000 --config.train.sample_every=2000

What follows `--` are the flags of `jaxunet.train`; let the run evaluate, draw and save in turns.
Writes samples.jsonl (a measurement every `--every` seconds), soak.png (with the extra `plots`;
`plot` draws it later) and appends a row to rows.jsonl. Ends with status 1 if a quantity kept
growing, by more than `--limit` of itself after `--settled` of the run, which is minute 3 of 30
(`tools.soak.watch.growth`). The threads of tensorstore's pool come and go with the file operations
that wait; they are told apart, with the most that there were.

The run returns the memory that it frees to the system (`tools/soak/trimmed.py`). It has two heaps
(MALLOC_ARENA_MAX=2) in place of one for each thread, which fill one after the other: that looks
like growth for many minutes.

One growth is known: for each array of a checkpoint, tensorstore 0.1.86 never frees some 200 bytes
and the checkpoint's path (`KvStore.Spec.to_json`, which orbax calls). With hundreds of checkpoints
that can pass the limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys

from support.commands import ROOT, python_path

from jaxunet.runtime import rows
from jaxunet.training.logs import read_metrics
from tools.docs.soak_table import QUANTITIES
from tools.soak.watch import POOL, Sample, ends, growths, more_threads, watch


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--minutes', type=float, default=30.0)
    parser.add_argument('--settled', type=float, default=0.1, help='share of the run')
    parser.add_argument('--every', type=float, default=2.0, help='seconds')
    parser.add_argument('--limit', type=float, default=0.02)
    parser.add_argument('--output', type=pathlib.Path, required=True)
    parser.add_argument('flags', nargs='+', metavar='-- FLAGS', help='of jaxunet.train')
    options = parser.parse_args()
    row = soak(options)
    print(json.dumps(row, indent=1))
    return int(bool(row['grown']) or row['exit_status'] != 0)


def soak(options: argparse.Namespace) -> rows.Row:
    """Trains, writes the measurements and returns the row."""
    output: pathlib.Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    command = ['-m', 'tools.soak.trimmed', *options.flags, f'--workdir={output / "run"}']
    variables = {
        'MALLOC_ARENA_MAX': '2',
        'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',  # else GPU memory is all taken at once
        'PYTHONPATH': os.pathsep.join([python_path(), str(ROOT / 'tests')]),
    }
    process = subprocess.Popen([sys.executable, *command], env=os.environ | variables)
    try:
        samples, names = watch(
            process,
            60 * options.minutes,
            options.every,
            lambda: process.send_signal(signal.SIGTERM),
        )
    finally:
        process.kill()
    lines = [json.dumps(sample) + '\n' for sample in samples]
    (output / 'samples.jsonl').write_text(''.join(lines))
    if not (output / 'run/metrics.csv').exists():
        sys.exit(f'the run ended with status {process.returncode} and logged nothing')
    metrics = read_times(output)
    growing = growths(samples, options.settled) | growths(metrics, options.settled)
    row: rows.Row = {
        'kind': 'soak',
        **rows.provenance(),
        'command': 'MALLOC_ARENA_MAX=2 PYTHONPATH=.:tests ' + shlex.join(['python', *command]),
        'minutes': samples[-1]['seconds'] / 60,
        'steps': int(read_metrics(output / 'run/metrics.csv')[-1]['step']),
        'settled': options.settled,
        'limit': options.limit,
        'ends': ends(samples, options.settled) | ends(metrics, options.settled),
        'growth': growing,
        'grown': [name for name, share in growing.items() if share > options.limit],
        'more_threads': more_threads(names, options.settled),
        'pool_threads': max(n[POOL] for n in names),
        'exit_status': process.returncode,
    }
    rows.append(output / 'rows.jsonl', row)
    plot(output)
    return row


def read_times(output: pathlib.Path) -> list[Sample]:
    """Returns the step time in ms of every logged step, by seconds of training."""
    return [
        {'seconds': float(row['training_seconds']), 'step_ms': float(row['step_ms'])}
        for row in read_metrics(output / 'run/metrics.csv')
    ]


def plot(output: pathlib.Path) -> None:
    """Draws soak.png, the quantities of a soak over minutes; nothing without matplotlib."""
    path = output / 'soak.png'
    if importlib.util.find_spec('matplotlib') is None:
        print(f'{path}: not drawn, as matplotlib is missing (the extra `plots`)')
        return
    from matplotlib.figure import Figure  # noqa: PLC0415

    samples = [json.loads(line) for line in (output / 'samples.jsonl').read_text().splitlines()]
    curves = {
        label: [(s['seconds'] / 60, s[name]) for s in table]
        for table in (samples, read_times(output))
        for name, label in QUANTITIES.items()
        if name in table[0]
    }
    figure = Figure(figsize=(7, 1.6 * len(curves)), layout='constrained')
    axes = figure.subplots(len(curves), sharex=True)
    for axis, (label, curve) in zip(axes, curves.items(), strict=True):
        axis.plot(*zip(*curve, strict=True), linewidth=1)
        axis.set_title(label, loc='left', fontsize='medium')
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel('minutes')
    figure.savefig(path, dpi=120)


if __name__ == '__main__':
    sys.exit(main())
