"""Tunes models for few evaluations, and measures them beside their teachers.

    PYTHONPATH=. python docs/results/few_steps/measure.py --data data --output runs/few/1

`--data` names the folder of cifar10_train.tar.xz, objects64_train.zip, elephants64.zip, emoji64.zip
and features.npz, the classifier of objects64 (docs/results.md, "Recipes"), which judges all sets of
64×64 pixels; docs/results/methods/features.npz judges cifar10.

The work, in this order: teachers of cifar10 and objects64; on cifar10, short tunings that differ in
q, the learning rate and dropout, to choose among them by the Fréchet distance in two evaluations;
on objects64, two with the chosen rate and a third of it, for all sets of its pixels; the tuning so
chosen for cifar10 and objects64, with two seeds; then a teacher and a tuning of elephants64 and of
emoji64. The better of two averages of the weights is measured, by a draw of its own
(`Job.averages`).

Several processes divide the work if each has its own --output beside the others'
(tools/gpu/few_steps.sh starts them). They meet where they need each other's results. The same
command goes on where it stopped. Output: as of `jaxunet.compare.queue`, with the runs in work/ and
the jobs taken in claims/, both beside --output. Times are seconds of training, as they pass.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import dataclasses
import pathlib
import shlex
import sys
import time
from collections.abc import Mapping, Sequence

from absl import flags

from jaxunet.compare import BEGAN
from jaxunet.compare.collected import ROWS, key_of, measured_keys
from jaxunet.compare.job_runner import DONE, Queue
from jaxunet.compare.jobs import FOREVER, TINY, Job
from jaxunet.compare.measure import TRAINING, Measurements
from jaxunet.compare.stopwatch import Limit
from jaxunet.config import Config
from jaxunet.data.automatic import complete
from jaxunet.runtime import command, compiled_cache
from jaxunet.runtime.interrupt import interrupt_when_terminated
from jaxunet.runtime.rows import Row, read
from jaxunet.training.tuning import for_tuning, init_from_config
from jaxunet.training.values import chosen_values, fields_by_path

DATA = flags.DEFINE_string('data', '.', 'Folder of the archives and of features.npz.')
OUTPUT = flags.DEFINE_string(
    'output', None, 'Folder of this process, such as runs/few/1.', required=True
)
LIMIT = flags.DEFINE_float('limit', 3600.0, 'Seconds of this command.', lower_bound=1)
RESERVE = flags.DEFINE_float(
    'reserve', 12.0, 'Seconds of the limit to reserve for saving or measuring.', lower_bound=0
)
SCREEN = flags.DEFINE_float('screen', 20.0, 'Seconds of a short tuning.', lower_bound=0.1)
IS_TINY = flags.DEFINE_bool('tiny', False, 'Digits for seconds on a CPU instead of the images.')

Fields = Mapping[str, object]
Values = tuple[int, float, float]  # q, learning rate, dropout
ROOT = pathlib.Path(__file__).parents[3]
# A time ends a run; nothing is drawn or saved on the way but by the queue.
QUIET: Fields = {
    'parallel.devices': 1,
    'data.holdout': 0.0,
    'train.holdout_every': 0,
    'train.steps': FOREVER,
    'train.checkpoint_every': FOREVER,
    'train.sample_every': 0,
    'train.evaluate_every': 0,
    'train.keep': 1,
}
TUNED = ('consistency:2', 'consistency:1', 'consistency:4')  # the first chooses the average
AVERAGES = ('0.995', '0.9993')
QS, RATES, DROPOUT = (16, 64), (1e-3, 3e-4, 1e-4), 0.2


@dataclasses.dataclass(frozen=True)
class Run(Job):
    """A job with the choices of `jaxunet.train`; it may start from trained weights."""

    def load_config(self, devices: int = 1, step_seconds: float = 0.0) -> Config:
        """Returns the config of the run, which never ends by its steps."""
        fields = {**QUIET, **self.fields, 'seed': self.seed}
        values = chosen_values(self.config, fields, None)
        start = init_from_config(values, None)
        named = [path for path, _ in fields_by_path(fields)]
        return complete(for_tuning(values, None, start, named), None, start)


@dataclasses.dataclass(frozen=True)
class Images:
    """A set of images, and how its runs are made.

    Fields:
      config: a recipe.
      path: of the archive.
      fields: of the teacher.
      sampler: the usual one of the teacher, beside Heun 25.
      seconds: of the teacher.
      tuning: seconds of tuning at which it is measured.
      samples: number drawn for each measurement.
      features: file of the feature network; '' = features.npz beside the images.
    """

    name: str
    config: str
    path: str
    fields: Fields
    sampler: str
    seconds: float
    tuning: tuple[float, ...] = (30, 60, 120)
    samples: int = 2000
    features: str = ''
    metrics: tuple[str, ...] = ('fid', 'kid', 'precision', 'recall', 'copies')
    seeds: tuple[int, ...] = (0, 1)

    def teacher(self, data: str) -> Run:
        """Returns the run to tune."""
        heun = 'heun:2' if self.name.startswith('digits') else 'heun:25'
        fields = {**self.fields, 'data.path': str(pathlib.Path(data) / self.path)}
        if self.path.endswith(':'):
            fields['data.path'] = self.path
        return self._run('teacher', fields, (self.seconds,), (heun, self.sampler))

    def tuning_run(self, work: pathlib.Path, case: str, fields: Fields, seed: int) -> Run:
        """Returns a run that tunes the teacher.

        Args:
          work: folder of the runs.
          fields: those that differ from the choices of `jaxunet.train`.
        """
        start = {
            'init_from': str(work / f'{self.name}_teacher_seed0'),
            'diffusion.objective': 'consistency',
            'ema.rates': tuple(map(float, AVERAGES)),
            **{k: v for k, v in self.fields.items() if k.startswith('train.')},
        }
        run = self._run(case, start | fields, self.tuning, TUNED, seed)
        return dataclasses.replace(run, averages=AVERAGES, choosing=min(self.samples, 2000))

    def _run(
        self,
        case: str,
        fields: Fields,
        seconds: tuple[float, ...],
        samplers: tuple[str, ...],
        seed: int = 0,
    ) -> Run:
        return Run(
            case,
            self.name,
            self.config,
            fields,
            seconds,
            samplers,
            {TRAINING: ('train', self.metrics)},
            seed=seed,
            samples=self.samples,
            batch_size=500,
            picture=64 if seed == 0 else 0,
            all_pictures=True,
            kept=True,
        )


CIFAR10 = Images(
    'cifar10',
    'configs/cifar10.py',
    'cifar10_train.tar.xz',
    {'diffusion.objective': 'edm', 'optimizer.warmup_steps': 500},
    'dpmpp_2m:20',
    106,  # about 10,000 steps
    samples=10_000,
    features='docs/results/methods/features.npz',
    metrics=('fid', 'kid', 'precision', 'recall'),
)
OBJECTS64 = Images(
    'objects64',
    'configs/images.py',
    'objects64_train.zip',
    {'diffusion.objective': 'flow'},
    'heun:20',
    120,
)
FEW = tuple(
    Images(
        name,
        'configs/images.py',
        f'{name}.zip',
        {'diffusion.objective': 'edm'},
        'dpmpp_2m:20',
        60,
        (30, 60),
        seeds=(0,),
    )
    for name in ('elephants64', 'emoji64')
)
# Seconds on a CPU: they show that the command works, and nothing about the method.
TINY_SETS = tuple(
    Images(
        name,
        'configs/digits.py',
        'digits:',
        {
            **{k: v for k, v in TINY.items() if k != 'data.holdout'},
            'diffusion.objective': objective,
            'train.log_every': 5,
        },
        sampler,
        1,
        (0.5, 1),
        samples=64,
        features='docs/results/digits/features.npz',
    )
    for name, objective, sampler in (
        ('digits', 'edm', 'dpmpp_2m:2'),
        ('digits_flow', 'flow', 'heun:3'),
        ('digits_last', 'edm', 'ddim:2'),
    )
)


def short(images: Images, work: pathlib.Path, values: Sequence[Values]) -> list[Run]:
    """Returns the short tunings with these values of q, the rate and dropout."""
    images = dataclasses.replace(images, tuning=(SCREEN.value,), samples=min(images.samples, 2000))
    return [
        dataclasses.replace(
            images.tuning_run(work, f'q{q}-{rate:.2g}-d{dropout:g}', settings(q, rate, dropout), 0),
            picture=0,
            kept=False,
        )
        for q, rate, dropout in values
    ]


def settings(q: int, rate: float, dropout: float) -> Fields:
    """Returns the fields of a tuning that are compared."""
    return {
        'diffusion.consistency_q': q,
        'optimizer.learning_rate': rate,
        'model.dropout': dropout,
    }


def best(rows: Sequence[Row]) -> Values:
    """Returns q, rate and dropout of the row with the smallest Fréchet distance."""
    row = min(rows, key=lambda row: row['values']['train']['fid'])
    return tuple(row['fields'][path] for path in settings(0, 0, 0))


class Lane:
    """One of the processes: a queue for each feature network."""

    def __init__(self) -> None:
        self.output = pathlib.Path(OUTPUT.value)
        self.claims, self.work = self.output.parent / 'claims', self.output.parent / 'work'
        self.limit = Limit(LIMIT.value, RESERVE.value, began=BEGAN)
        self.queues: dict[str, Queue] = {}
        self.problems: list[str] = []
        self.number = int(self.output.name) if self.output.name.isdigit() else 0

    def run(self, images: Sequence[Images], jobs: Sequence[Run]) -> None:
        """Runs the jobs that no other process has done or taken, its share of the images first."""
        by_name = {one.name: (place, one) for place, one in enumerate(images, 1)}
        order = sorted(jobs, key=lambda job: (by_name[job.data][0] - self.number) % len(images))
        for job in order:
            features = by_name[job.data][1].features
            path = str(ROOT / features if features else pathlib.Path(DATA.value) / 'features.npz')
            if path not in self.queues:
                line = ['python', 'docs/results/few_steps/measure.py', *sys.argv[1:]]
                self.queues[path] = Queue(
                    output=self.output,
                    measurements=Measurements(path, self.output / 'pictures'),
                    limit=self.limit,
                    command=shlex.join(line),
                    work=self.work,
                    claims=str(self.claims),
                )
            if not self.has_rows(job):
                self.problems += self.queues[path].run([job])

    def meet(self, jobs: Sequence[Run]) -> list[Row]:
        """Waits until the jobs are done, by whichever process; returns their rows."""

        def done(job: Run) -> bool:
            claim = self.claims / job.name
            ended = claim.exists() and claim.read_text(encoding='utf-8') == DONE
            return ended or self.has_rows(job)

        while not all(map(done, jobs)) and self.limit.left > self.limit.reserve:
            time.sleep(1)
        keys = {(job.data, job.case, job.seed) for job in jobs}
        rows = [row for file in self.files() for row in read(file)]
        return [row for row in rows if key_of(row)[:3] in keys]

    def has_rows(self, job: Run) -> bool:
        """Returns True if some process has measured all of a job."""
        measured = measured_keys(self.files())
        return all(
            (job.data, job.case, job.seed, seconds, sampler) in measured
            for seconds in job.seconds
            for sampler in job.samplers
        )

    def files(self) -> list[pathlib.Path]:
        """Returns the files of rows of all processes."""
        return sorted(self.output.parent.glob(f'*/{ROWS}'))


def main(argv: Sequence[str]) -> int:
    """Does the work of one process; returns 1 if some of it is left."""
    interrupt_when_terminated()
    compiled_cache.enable_compilation_cache()
    lane = Lane()
    first, few = (TINY_SETS[:2], TINY_SETS[2:]) if IS_TINY.value else ((CIFAR10, OBJECTS64), FEW)
    main_set, other_set = first
    teachers = [images.teacher(DATA.value) for images in first]
    lane.run(first, teachers)
    lane.meet(teachers)

    def compared(images: Images, values: Sequence[Values]) -> list[Row]:
        jobs = short(images, lane.work, values)
        lane.run(first, jobs)
        return [row for row in lane.meet(jobs) if row['sampler'] == TUNED[0]]

    rates = RATES[:1] if IS_TINY.value else RATES
    rows = compared(main_set, [(q, rate, 0.0) for rate in rates for q in QS])
    if not rows:
        return 1
    q, rate, _ = best(rows)
    other = (q, 2 * rate, 0.0) if rate == max(RATES) else (32, rate, 0.0)
    q, rate, dropout = best([*rows, *compared(main_set, [(q, rate, DROPOUT), other])])
    rows = compared(other_set, [(q, rate, dropout), (q, rate / 3, dropout)])
    if not rows:
        return 1
    fields = {images.name: settings(*best(rows)) for images in (other_set, *few)}
    fields[main_set.name] = settings(q, rate, dropout)
    print(f'chosen: {fields}', flush=True)

    def tunings(sets: Sequence[Images]) -> list[Run]:
        return [
            one.tuning_run(lane.work, 'tuned', fields[one.name], seed)
            for seed in (0, 1)
            for one in sets
            if seed in one.seeds
        ]

    lane.run(first, tunings(first))
    last = [images.teacher(DATA.value) for images in few]
    lane.run(few, last)
    lane.meet(last)
    lane.run(few, tunings(few))
    for queue in lane.queues.values():
        queue.measurements.wait()
    return 1 if lane.problems else 0


if __name__ == '__main__':
    command.run(main)
