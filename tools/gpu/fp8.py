"""Trains with the operands of 3×3 convolutions rounded to FP8: does quality suffer?

    python tools/gpu/fp8.py --data data --features features.npz --output runs/fp8/1

No kernel computes in FP8 here: `tools/gpu/fp8_ops.py` rounds the operands, and says how. Every
seed trains all variants for the same number of steps, on the same batches and noise:

    bf16     the same ops, without rounding
    forward  e4m3 activations and weights in the forward pass, which also draws the samples
    e4m3     ... and e4m3 dy and weights in the input gradient
    e5m2     ... and e5m2 dy, e4m3 weights
    kernels  not by default: backend=cuda as it is. It differs from bf16 only in the order of sums
             and in the rounding of activations, so it shows how far chance takes a run.

`--data` names the folder of the archives; `--features` a feature network, of which rows compare
only with those of the same file (docs/results/recipes/jobs.py says how to make it).

The table has, for each variant, means over seeds with standard errors: of the loss of the last
tenth of all steps and of the averaged weights' loss on held-out images, and of both distances; in
brackets, the ratio to (losses) or the difference from (distances) bf16 of the same seed. `RMS` is
the root mean square difference of the first samples from those of bf16, of pixels from 0 to 1.

Runs that `--rows` has are not repeated, and unfinished ones start again, so the same command goes
on where it stopped. `--jobs`, `--seeds`, `--variants`, `--steps` and `--limit` make it shorter. A
folder of outputs has runs of one `--steps`. Processes share the work if each has a GPU
(CUDA_VISIBLE_DEVICES), variants and an --output of its own, such as runs/fp8/1 and runs/fp8/2; the
seeds of a variant share its compiled step. The last to end adds the runs of all to `--rows`; so
does `--collect`.
"""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import jaxunet.runtime.quiet  # isort: skip  # noqa: E402, F401 (before slow imports)

import argparse  # noqa: E402
import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import functools  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import runpy  # noqa: E402
import shlex  # noqa: E402
from collections.abc import Callable, Iterator, Mapping, Sequence  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from jaxunet.compare import BEGAN, collected  # noqa: E402
from jaxunet.compare.job_runner import Queue  # noqa: E402
from jaxunet.compare.jobs import Job  # noqa: E402
from jaxunet.compare.measure import Measurements  # noqa: E402
from jaxunet.compare.statistics import mean_over  # noqa: E402
from jaxunet.compare.stopwatch import Limit  # noqa: E402
from jaxunet.runtime import compiled_cache, rows  # noqa: E402
from jaxunet.runtime.interrupt import interrupt_when_terminated  # noqa: E402
from jaxunet.runtime.markdown import table  # noqa: E402
from jaxunet.training.logs import read_metrics  # noqa: E402
from jaxunet.training.parallel import Parallel  # noqa: E402
from jaxunet.training.step_fields import relevant  # noqa: E402
from tools.gpu import fp8_ops  # noqa: E402

RECIPES = ROOT / 'docs/results/recipes/jobs.py'
OPS = ('conv3x3', 'norm_silu_conv3x3')
# The backend of the convolutions; that of all other ops is cuda on a GPU, xla elsewhere.
VARIANTS = {
    'bf16': 'fp8-none',
    'forward': 'fp8-forward',
    'e4m3': 'fp8-e4m3',
    'e5m2': 'fp8-e5m2',
    'kernels': '',
}
BASELINE, CLOCK_MS = 'bf16', 1.0  # the clock of the queue counts steps
SETS = ('elephants64', 'objects64', 'digits')  # the last trains a tiny network, on a CPU
SAMPLES, SAMPLER = 2000, 'heun:25'
METRICS = ('fid', 'kid', 'precision', 'recall', 'copies')
Find = Callable[[rows.Row], float]


@functools.cache
def recipes() -> Mapping[str, Callable[..., Job]]:
    """Returns the functions that make the jobs of docs/results/recipes."""
    return runpy.run_path(str(RECIPES))


def backend_of(variant: str) -> str:
    """Returns the backend of a variant, as `Config.backend`."""
    others = 'cuda' if jax.default_backend() == 'gpu' else 'xla'
    owner = VARIANTS[variant]
    return '+'.join([others, *(f'{op}={owner}' for op in OPS if owner)])


def job_of(data: str, variant: str, seed: int, steps: int, folder: str) -> Job:
    """Returns a run.

    Args:
      data: the images, one of `SETS`.
      folder: of the archives.
    """
    make = recipes()
    job = {
        'elephants64': lambda: make['elephants']('flow', folder, seed=seed),
        'objects64': lambda: make['objects']('flow', folder, seed=seed),
        'digits': lambda: make['tiny']('flow', seed),
    }[data]()
    (path, *_) = job.references
    fields = {
        **job.fields,
        'backend': backend_of(variant),
        'data.holdout': job.fields.get('data.holdout', 200),
        'data.cache': 'stream',  # `shared_steps`
        'train.log_every': 100 if steps >= 2000 else 1,
        'train.holdout_every': 0,
    }
    return dataclasses.replace(
        job,
        case=variant,
        fields=fields,
        seconds=(steps * CLOCK_MS / 1e3,),
        samplers=job.samplers[-1:] if data == 'digits' else (SAMPLER,),
        samples=job.samples if data == 'digits' else SAMPLES,
        references={path: ('train', METRICS)},
        picture=job.picture or 64,
    )


@contextlib.contextmanager
def shared_steps() -> Iterator[None]:
    """Lets runs that differ only in their seeds share a compiled step.

    The seed is in the program only if the images are in the device's memory: their order then is.
    """
    compiled: dict[str, jax.stages.Compiled] = {}
    compile_step = Parallel.compile

    def compile_once(parallel: Parallel, *arguments: Any, **options: Any) -> jax.stages.Compiled:
        assert parallel.config.data.cache == 'stream'
        key = json.dumps(relevant(parallel.config.replace(seed=0)), sort_keys=True)
        if key not in compiled:
            compiled[key] = compile_step(parallel, *arguments, **options)
        return compiled[key]

    with mock.patch.object(Parallel, 'compile', compile_once):
        yield


def last_tenth(path: pathlib.Path) -> tuple[int, float, float]:
    """Returns the last step of a log, the mean loss of the last tenth, and the time of a step.

    The time is the median of the whole run, in milliseconds.
    """
    lines = [line for line in read_metrics(path) if line['loss']]
    end = int(lines[-1]['step'])
    late = [float(line['loss']) for line in lines if int(line['step']) > 0.9 * end]
    return end, float(np.mean(late)), float(np.median([float(line['step_ms']) for line in lines]))


def distance(first: pathlib.Path, second: pathlib.Path) -> float:
    """Returns the root mean square difference of two pictures, of pixels from 0 to 1."""
    a, b = (np.asarray(Image.open(path), np.float64) / 255 for path in (first, second))
    return float(np.sqrt(np.mean((a - b) ** 2)))


def finished(parent: pathlib.Path) -> list[rows.Row]:
    """Returns a row for each finished run of all processes.

    Args:
      parent: the folder of their outputs.
    """
    found = []
    for path in sorted(parent.glob(f'*/{collected.ROWS}')):
        for row in rows.latest([path], collected.key_of, lambda *_: None).values():
            name, baseline = (
                f'{row["data"]}_{case}_seed{row["seed"]}' for case in (row['case'], BASELINE)
            )
            log = path.parent / f'logs/{name}.csv'
            if not log.is_file():
                continue  # the run has been measured, and is about to end
            end, loss, milliseconds = last_tenth(log)
            if not end <= row['step'] < end + row['fields']['train.log_every']:
                continue  # a later run of other steps has replaced the log
            row |= {'loss': loss, 'ms': milliseconds}
            ending = f'{row["seconds"]:g}s.png'
            own = path.parent / f'pictures/{name}_{ending}'
            others = [*parent.glob(f'*/pictures/{baseline}_{ending}')]
            if own.is_file() and others and row['case'] != BASELINE:
                row['rms'] = distance(own, others[0])
            found.append(row)
    return found


def cell(of: Mapping[int, float], base: Mapping[int, float], *, ratio: bool) -> str:
    """Returns a mean over seeds, and in brackets how it compares with that of the baseline.

    Args:
      of: numbers by seed.
      base: those of the baseline; {} = compare with nothing.
      ratio: compare by the mean ratio of the same seeds; otherwise by the mean difference.
    """

    def shown(values: Sequence[float], form: str) -> str:
        mean = mean_over(values)
        error = '' if math.isnan(mean.error) else f' ± {mean.error:.2g}'
        return f'{mean.value:{form}}{error}'

    if not of:
        return ''
    text, seeds = shown([*of.values()], '.4g'), sorted(of.keys() & base.keys())
    if not seeds:
        return text
    if ratio:
        return f'{text} ({shown([of[seed] / base[seed] for seed in seeds], ".4f")})'
    return f'{text} ({shown([of[seed] - base[seed] for seed in seeds], "+.2g")})'


COLUMNS: Mapping[str, tuple[Find, bool]] = {
    'loss, last tenth': (lambda row: row['loss'], True),
    'held-out loss': (lambda row: row['losses']['held_out_loss'], True),
    'Fréchet distance': (lambda row: row['values']['train']['fid'], False),
    'kernel distance': (lambda row: row['values']['train']['kid'], False),
    'Fréchet, judge': (lambda row: row['judged']['train']['fid'], False),
    'kernel, judge': (lambda row: row['judged']['train']['kid'], False),
    'RMS': (lambda row: row['rms'], False),
    'ms a step': (lambda row: row['ms'], True),
}


def report(every: Sequence[rows.Row]) -> str:
    """Returns the table of the rows, in Markdown."""
    groups: dict[tuple[str, int, str], list[rows.Row]] = {}
    for row in every:
        groups.setdefault((row['data'], row['step'], row['case']), []).append(row)
    lines, order = [], [*VARIANTS]
    for data, steps, case in sorted(groups, key=lambda key: (*key[:2], order.index(key[2]))):
        group, others = groups[data, steps, case], groups.get((data, steps, BASELINE), [])
        cells = []
        for find, ratio in COLUMNS.values():
            base = _by_seed(others, find) if case != BASELINE else {}
            cells.append(cell(_by_seed(group, find), base, ratio=ratio))
        seeds = ', '.join(str(seed) for seed in sorted(row['seed'] for row in group))
        lines.append([data, f'{steps:,}', case, seeds, *cells])
    return table(['images', 'steps', 'variant', 'seeds', *COLUMNS], lines)


def _by_seed(group: Sequence[rows.Row], find: Find) -> dict[int, float]:
    """Returns a number of each row by its seed; rows without it are left out."""
    numbers = {}
    for row in group:
        try:
            numbers[row['seed']] = find(row)
        except KeyError:
            continue
    return numbers


def collect(parent: pathlib.Path, path: pathlib.Path) -> list[rows.Row]:
    """Adds the finished runs of all processes to the file of rows, and prints the table."""
    known = rows.latest([path], collected.key_of, lambda *_: None)
    known |= {collected.key_of(row): row for row in finished(parent)}
    every = [known[key] for key in sorted(known)]
    if every:
        collected.write(path, every)
        print(report(every), flush=True)
    return every


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    add = parser.add_argument
    add('--jobs', nargs='+', default=SETS[:1], choices=SETS, help='images')
    add('--variants', nargs='+', default=[*VARIANTS][:4], choices=VARIANTS)
    add('--seeds', nargs='+', type=int, default=[0, 1, 2])
    add('--steps', type=int, default=14_000, help='steps of a run')
    add('--ms', type=float, default=6.0, help='expected milliseconds of a step')
    add('--limit', type=float, default=1e5, help='seconds; no run begins that would take longer')
    add('--reserve', type=float, default=25, help='seconds that a run does not train')
    add('--data', default='.', help='folder of the archives')
    add('--features', default='', help='file of the feature network; without it, no distances')
    add('--judge', default='', help='a second one, as of jaxunet.compare.queue')
    add('--output', type=pathlib.Path, default=pathlib.Path('runs/fp8/1'), help='folder')
    add('--rows', type=pathlib.Path, help='a row for each run; default: fp8.jsonl beside --output')
    add('--collect', action='store_true', help='train nothing')
    options = parser.parse_args(arguments)
    if options.features and not pathlib.Path(options.features).is_file():
        parser.error(f'--features: no file {options.features}')
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing; returns 1 if something failed or was left out."""
    options = parsed(arguments)
    output, parent = options.output, options.output.parent
    path = options.rows or parent / 'fp8.jsonl'
    if options.collect:
        collect(parent, path)
        return 0
    interrupt_when_terminated()
    fp8_ops.check_rounding()
    fp8_ops.install(output / 'package')
    compiled_cache.enable_compilation_cache()
    queue = Queue(
        output=output,
        measurements=Measurements(options.features, output / 'pictures', options.judge),
        limit=Limit(options.limit, options.reserve, slowdown=options.ms / CLOCK_MS, began=BEGAN),
        command=shlex.join(['python', 'tools/gpu/fp8.py', *(arguments or sys.argv[1:])]),
        work=output / 'work',
        step_ms=dict.fromkeys(VARIANTS, CLOCK_MS),
        known=str(path),
        resume=False,
    )
    jobs = [
        job_of(data, variant, seed, options.steps, options.data)
        for data in options.jobs
        for seed in options.seeds
        for variant in options.variants
    ]
    try:
        with shared_steps():
            left = queue.run(jobs)
    finally:
        collect(parent, path)
    return 1 if left else 0


if __name__ == '__main__':
    # As steps of cuda alone: `jaxunet.training.compiler_options`.
    os.environ.setdefault('XLA_FLAGS', '--xla_gpu_command_buffer_scheduling_mode=CONCURRENT')
    sys.exit(main())
