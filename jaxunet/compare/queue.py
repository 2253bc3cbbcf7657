"""Trains and measures a list of jobs in one process, within a time limit.

    python -m jaxunet.metrics.train_features --reference train.zip --test test.zip \\
      --output features.npz
    python -m jaxunet.compare.queue --jobs docs/results/recipes/jobs.py:objects --data data/ \\
      --features features.npz --limit 1150 --output runs/recipes

Made for a GPU that is available only for minutes: the jobs run in their order, each compiles its
samplers while it trains, and every row is written as soon as it is measured. The clock of a job
counts only training steps, without compiling, measuring and saving. Processes that share a GPU slow
each other down, so their clocks count `--step_ms` for each step: its time measured alone.
If a job names several averages of the weights, a smaller draw of samples chooses the best average
of each checkpoint, and only that one is measured.

The same command continues: it skips times that have their rows, and resumes unfinished runs. A run
saves its state at each of its times, and when the limit comes near or a signal stops it; when it is
done, its work folder is removed. With `--noresume`, for a machine that keeps no files, a run saves
nothing, trains only for those of its times that fit into the rest of the limit, and is measured
even if the limit has passed. Each process needs its own `--output`; with a common folder
`--claims`, processes divide the jobs.

Output: rows.jsonl (a row for each checkpoint and sampler), stretches.jsonl (the seconds of each
piece of work), pictures/ (unpicked samples), logs/JOB.csv (the metrics.csv of the run), and work/.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import math
import pathlib
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from jaxunet.compare import BEGAN
from jaxunet.compare.comparison_file import read_jobs
from jaxunet.compare.job_runner import Queue
from jaxunet.compare.measure import Measurements
from jaxunet.compare.step_times import step_times
from jaxunet.compare.stopwatch import Limit
from jaxunet.runtime import command, compiled_cache
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.interrupt import interrupt_when_terminated
from jaxunet.runtime.paths import of_user

JOBS = flags.DEFINE_string(
    'jobs', None, 'FILE or FILE:PART; see jaxunet.compare.comparison_file.', required=True
)
DATA = flags.DEFINE_string(
    'data', '.', 'Folder of the archives of images that the file of jobs names.'
)
FEATURES = flags.DEFINE_string(
    'features',
    '',
    'File of the feature network, for which jobs wait; without it nothing is compared.',
)
JUDGE = flags.DEFINE_string(
    'judge',
    '',
    'File of a second feature network, whose Fréchet and kernel distances stand beside those of '
    '--features, such as the weights of EfficientNet-Lite0 (docs/evaluation.md).',
)
LIMIT = flags.DEFINE_float(
    'limit',
    24 * 3600.0,
    'Seconds from the start of the command after which no training begins.',
    lower_bound=1,
)
RESERVE = flags.DEFINE_float(
    'reserve',
    30.0,
    'Seconds of the limit to reserve for compiling, and for saving or measuring.',
    lower_bound=0,
)
STEP_MS = flags.DEFINE_string(
    'step_ms',
    '0',
    'Milliseconds to count for each step, its time measured alone, so that processes can share a '
    'GPU: a number, or a file of rows of jaxunet.compare.step_cost, with a number for each case; '
    '0 = measure training time.',
)
DEVICES = flags.DEFINE_integer(
    'devices',
    1,
    'Devices on which each run trains, data-parallel; 0 = as its config says. More than one needs '
    '--step_ms.',
    lower_bound=0,
)
SHARED_BY = flags.DEFINE_integer('shared_by', 1, 'Processes that share the GPU.', lower_bound=1)
SLOWDOWN = flags.DEFINE_float(
    'slowdown',
    0.0,
    'Expected training time of a job, divided by its time alone on the GPU; 0 = --shared_by.',
    lower_bound=0,
)
KNOWN = flags.DEFINE_string(
    'known', '', 'rows.jsonl of earlier queues, same features: what it has is not measured again.'
)
CLAIMS = flags.DEFINE_string(
    'claims', '', 'Folder in which processes with the same jobs mark those that they take.'
)
RESUME = flags.DEFINE_bool(
    'resume', True, 'Save runs on the way, and go on with those that are not done.'
)
WORK = flags.DEFINE_string(
    'work', '', 'Folder of the runs, which processes may share; default: work in the output.'
)
TIMEOUT = flags.DEFINE_float(
    'timeout',
    math.inf,
    'Seconds after which a job that is not done ends the command.',
    lower_bound=0.1,
)
OUTPUT = flags.DEFINE_string('output', 'runs/queue', 'Folder of the results.')
of_user(JOBS, DATA, FEATURES, JUDGE, STEP_MS, KNOWN, CLAIMS, WORK, OUTPUT)


def main(argv: Sequence[str]) -> int:
    """Runs the jobs of the flags; returns 1 if some failed or were left out.

    Raises:
      UserError: the file of jobs is wrong, or a field of the jobs has no effect.
    """
    interrupt_when_terminated()  # its work so far gets a row, too
    if KNOWN.value and not pathlib.Path(KNOWN.value).is_file():
        raise UserError(f'--known: no file {KNOWN.value}')
    output = pathlib.Path(OUTPUT.value)
    work = pathlib.Path(WORK.value) if WORK.value else output / 'work'
    jobs = read_jobs(JOBS.value, DATA.value, begun=output.exists() or work.exists())
    step_ms = step_times(STEP_MS.value, [job.case for job in jobs])
    if SHARED_BY.value > 1 and not step_ms:
        raise UserError(
            f'--shared_by: {SHARED_BY.value} processes slow each other down, so their training '
            'time means nothing; give --step_ms too'
        )
    if DEVICES.value > 1 and not step_ms:
        raise UserError(
            f'--devices: a step on {DEVICES.value} devices takes another time than on one; give '
            '--step_ms too'
        )
    compiled_cache.enable_compilation_cache()
    queue = Queue(
        output=output,
        measurements=Measurements(FEATURES.value, output / 'pictures', JUDGE.value),
        limit=Limit(
            LIMIT.value,
            RESERVE.value,
            shared_by=SHARED_BY.value,
            slowdown=SLOWDOWN.value,
            began=BEGAN,
        ),
        step_ms=step_ms,
        known=KNOWN.value,
        claims=CLAIMS.value,
        work=work,
        devices=DEVICES.value,
        resume=RESUME.value,
        timeout=TIMEOUT.value,
        command=shlex.join(['python', '-m', 'jaxunet.compare.queue', *sys.argv[1:]]),
    )
    try:
        problems = queue.run(jobs)
    except KeyboardInterrupt:
        print('\nstopped; the same command goes on from here', file=sys.stderr, flush=True)
        return 130
    for problem in problems:
        print(problem, file=sys.stderr, flush=True)
    return 1 if problems else 0


if __name__ == '__main__':
    command.run(main)
