"""Tunes models for few evaluations, and measures them beside their teachers.

    PYTHONPATH=. python docs/results/few_steps/measure.py --data data --output runs/few/1 \\
      --sets cifar10,elephants64

`--data` names the folder of cifar10_train.tar.xz, objects64_train.zip, elephants64.zip, emoji64.zip
and features.npz, the classifier of objects64 (docs/results.md, "Recipes"), which judges all sets of
64×64 pixels; docs/results/methods/features.npz judges cifar10. `--judge` names a second network.

For each set: its teacher; the shortest tuning with each of `--rates`; then, with the rate that is
best in two evaluations, tunings of all times and seeds. The other fields are those that such a run
chooses itself (`jaxunet.training.tuning`). The better of two averages of the weights is measured,
by a draw of its own (`Job.averages`).

The same command goes on where it stopped; without rows.jsonl, it measures the runs in work/ again,
such as with other noise levels of the sampler. Several processes (tools/gpu/few_steps.sh) have an
--output beside each other's, and sets of their own. Output: as of `jaxunet.compare.queue`, with the
runs in work/ beside --output. The learning rate of a tuning falls until its end, so a step counts
as `--step_ms` in the seconds of training, and processes may share a GPU.
"""

from __future__ import annotations

import jaxunet.runtime.quiet  # isort: skip  # noqa: F401 (before slow imports)

import dataclasses
import pathlib
import shlex
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from jaxunet.compare import BEGAN
from jaxunet.compare.collected import ROWS
from jaxunet.compare.job_runner import Queue
from jaxunet.compare.jobs import FOREVER, TINY, Job, steps_lasting
from jaxunet.compare.measure import TRAINING, Measurements
from jaxunet.compare.stopwatch import Limit
from jaxunet.config import Config
from jaxunet.data.automatic import complete
from jaxunet.runtime import command, compiled_cache, rows
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.interrupt import interrupt_when_terminated
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
JUDGE = flags.DEFINE_string('judge', '', 'As of jaxunet.compare.queue.')
NAMES = flags.DEFINE_list('sets', ['cifar10', 'objects64', 'elephants64', 'emoji64'], 'In turn.')
SECONDS = flags.DEFINE_list('seconds', None, "Times of tuning, in place of the set's.")
SEEDS = flags.DEFINE_multi_integer('seeds', None, "Seeds of tuning, in place of the set's.")
RATES = flags.DEFINE_list('rates', ['2e-4', '6e-4', '2e-3'], 'Learning rates of tunings.')
STEP_MS = flags.DEFINE_list(
    'step_ms', None, 'Milliseconds of a step of a teacher, and of a tuning.', required=True
)

Fields = Mapping[str, object]
ROOT = pathlib.Path(__file__).parents[3]
# Steps end a run (`Run.load_config`); nothing is drawn or saved on the way but by the queue.
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
CASE = 'muon-'  # the rate and the seconds follow


@dataclasses.dataclass(frozen=True)
class Run(Job):
    """A job with the choices of `jaxunet.train`; it may start from trained weights."""

    def load_config(self, devices: int = 1, step_seconds: float = 0.0) -> Config:
        """Returns the config of the run, which its steps end if `step_seconds` is known."""
        fields = {**QUIET, **self.fields, 'seed': self.seed}
        if step_seconds:
            fields['train.steps'] = steps_lasting(self.seconds[-1], step_seconds)
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

    def tunings(self, work: pathlib.Path, rate: float) -> list[Run]:
        """Returns the runs that tune the teacher, one for each time and seed.

        The shortest of the first seed comes first, then the longest.
        """
        times = sorted(self.tuning, reverse=True)
        runs = [self._tuned(work, rate, seconds, seed) for seconds in times for seed in self.seeds]
        return sorted(
            runs, key=lambda run: (run.seconds[-1], run.seed) != (times[-1], self.seeds[0])
        )

    def _tuned(self, work: pathlib.Path, rate: float, seconds: float, seed: int) -> Run:
        fields = {
            'init_from': str(work / f'{self.name}_teacher_seed0'),
            'diffusion.objective': 'consistency',
            'ema.rates': tuple(map(float, AVERAGES)),
            'optimizer.learning_rate': rate,
            **{k: v for k, v in self.fields.items() if k.startswith('train.')},
        }
        run = self._run(f'{CASE}{rate:g}-{seconds:g}s', fields, (seconds,), TUNED, seed)
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
        tuning=(0.5, 1),
        samples=64,
        features='docs/results/digits/features.npz',
    )
    for name, objective, sampler in (
        ('digits', 'edm', 'dpmpp_2m:2'),
        ('digits_flow', 'flow', 'heun:3'),
    )
)


SETS = {images.name: images for images in (CIFAR10, OBJECTS64, *FEW, *TINY_SETS)}


def measure(queue: Queue, images: Images, work: pathlib.Path) -> list[str]:
    """Trains a teacher and tunes it; returns what is left, as `Queue.run`."""
    of_teacher, of_tuning = numbers('step_ms', STEP_MS.value)
    by_rate = {rate: images.tunings(work, rate) for rate in numbers('rates', RATES.value)}
    cases = {run.case for runs in by_rate.values() for run in runs}
    teacher = images.teacher(DATA.value)
    queue.step_ms = {teacher.case: of_teacher} | dict.fromkeys(cases, of_tuning)
    left = queue.run([teacher])
    if not left:
        left = queue.run([runs[0] for runs in by_rate.values()])
    if left:
        return left
    measured = list(rows.read(queue.output / ROWS))
    return queue.run(by_rate[min(by_rate, key=lambda rate: distance(measured, by_rate[rate][0]))])


def numbers(flag: str, texts: Sequence[str]) -> list[float]:
    """Returns the numbers of a flag.

    Raises:
      UserError: none, or one that is not above 0.
    """
    try:
        found = [float(text) for text in texts]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise UserError(f'--{flag}: expected numbers above 0, found {",".join(texts)!r}')
    return found


def narrowed(images: Images) -> Images:
    """Returns the set with the times and seeds that the flags ask for."""
    changes: dict[str, Sequence[float]] = {}
    if SECONDS.value:
        changes['tuning'] = tuple(numbers('seconds', SECONDS.value))
    if SEEDS.value:
        changes['seeds'] = tuple(SEEDS.value)
    return dataclasses.replace(images, **changes)


def distance(measured: Sequence[rows.Row], run: Run) -> float:
    """Returns the Fréchet distance of a run in two evaluations."""
    key = (run.data, run.case, run.seed, TUNED[0])
    return min(
        row['values']['train']['fid']
        for row in measured
        if (row['data'], row['case'], row['seed'], row['sampler']) == key
    )


def main(argv: Sequence[str]) -> int:
    """Does the work of one process; returns 1 if some of it is left.

    Raises:
      UserError: a set that does not exist, or --rates or --step_ms without their numbers.
    """
    interrupt_when_terminated()
    compiled_cache.enable_compilation_cache()
    for name in NAMES.value:
        if name not in SETS:
            raise UserError(f'--sets: expected some of {", ".join(SETS)}, found {name!r}')
    if len(numbers('step_ms', STEP_MS.value)) != 2:
        raise UserError('--step_ms: expected two numbers, of a teacher and of a tuning')
    numbers('rates', RATES.value)
    output = pathlib.Path(OUTPUT.value)
    work = output.parent / 'work'
    limit = Limit(LIMIT.value, RESERVE.value, began=BEGAN)
    problems: list[str] = []
    for images in (narrowed(SETS[name]) for name in NAMES.value):
        features = ROOT / images.features if images.features else f'{DATA.value}/features.npz'
        queue = Queue(
            output=output,
            measurements=Measurements(str(features), output / 'pictures', JUDGE.value),
            limit=limit,
            command=shlex.join(['python', 'docs/results/few_steps/measure.py', *sys.argv[1:]]),
            work=work,
        )
        problems += measure(queue, images, work)
    return 1 if problems else 0


if __name__ == '__main__':
    command.run(main)
