"""The jobs behind docs/results/recipes, for `python -m jaxunet.compare.queue --jobs`.

    docs/results/recipes/jobs.py:objects    9,000 photographs of 20 classes
    docs/results/recipes/jobs.py:minute     the same for one minute alone
    docs/results/recipes/jobs.py:three      ... for three minutes alone
    docs/results/recipes/jobs.py:ten        ... for ten minutes alone
    docs/results/recipes/jobs.py:images     configs/images.py itself for three minutes, until which
                                            its rate falls: needs --step_ms
    docs/results/recipes/jobs.py:elephants  500 photographs of one animal
    docs/results/recipes/jobs.py:small      ... with EDM's augmentation, and with another seed
    docs/results/recipes/jobs.py:all        objects, elephants, then small
    docs/results/recipes/jobs.py:alone      seconds a sample; needs a GPU of its own, no --step_ms
    docs/results/recipes/jobs.py:costs      each objective once, for jaxunet.compare.step_cost
    docs/results/recipes/jobs.py:endings    how a run ends: rate, schedule, batch, AdamW or Muon
    docs/results/recipes/jobs.py:endings_costs ... each case once, for jaxunet.compare.step_cost
    docs/results/recipes/jobs.py:endings_tiny  ... in seconds on a CPU
    docs/results/recipes/jobs.py:digits     images of configs/digits.py; needs features of digits
    docs/results/recipes/jobs.py:tiny       seconds on a CPU, on the embedded digits

`--data` names the folder of objects64_train.zip, objects64_test.zip, elephants64.zip and, for
endings, emoji64.zip (600 pictures with transparency, which are drawn on white). All parts
but alone, digits, and those for costs or a CPU take the features of a classifier of objects64:

    python -m jaxunet.metrics.train_features --reference objects64_train.zip \\
      --test objects64_test.zip --channels 32 --seconds 25 --output features.npz

Only rows of one file can be compared; that of rows.jsonl, classifier-be9ba4b0, is in the history of
the repository as docs/results/recipes/features.npz (439a6061).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from jaxunet.compare.jobs import TINY, Job
from jaxunet.runtime.errors import UserError

CONFIG = 'configs/elephants64.py'  # its network, batch, learning rate and averages
OBJECTIVES: dict[str, dict[str, object]] = {
    'epsilon-linear': {'diffusion.objective': 'epsilon', 'diffusion.schedule': 'linear'},
    'epsilon-cosine': {'diffusion.objective': 'epsilon', 'diffusion.schedule': 'cosine'},
    'v-cosine': {'diffusion.objective': 'v', 'diffusion.schedule': 'cosine'},
    # The schedule is that of the objectives with timesteps; its default means none.
    'edm': {'diffusion.objective': 'edm', 'diffusion.schedule': 'linear'},
    'flow': {'diffusion.objective': 'flow', 'diffusion.schedule': 'linear'},
}
# Within 50 evaluations of the network; heun takes 2 · steps - 1.
SAMPLERS = ('heun:25', 'dpmpp_2m:20', 'ddpm:50')
RATE = 1e-4  # of batches of 32; others have RATE √(batch / 32)
WIDTHS = (0.05, 0.1, 0.15)  # of averages of which the endings choose one, beside the config's


def _ending(schedule: str, factor: float, batch: int = 32, **fields: object) -> dict[str, object]:
    return {
        'optimizer.schedule': schedule,
        'optimizer.learning_rate': factor * RATE * math.sqrt(batch / 32),
        'data.batch_size': batch,
        **fields,
    }


MUON = {'optimizer.name': 'muon'}
ENDINGS = {  # only the batches, Muon and dropout change what a step costs
    'constant-1': _ending('constant', 1),
    'linear-4': _ending('linear', 4),  # the recipe
    'dropout-linear-4': _ending('linear', 4, **{'model.dropout': 0.2}),  # for few images
    'cooldown-4': _ending('cooldown', 4),
    'batch16-linear-4': _ending('linear', 4, 16),
    'muon-linear-4': _ending('linear', 4, **MUON),
    'linear-2': _ending('linear', 2),
    'batch64-linear-4': _ending('linear', 4, 64),
}
COMPARED = ('fid', 'kid', 'precision', 'recall', 'copies')


def objects(case: str, data: str, *, seed: int = 0) -> Job:
    """Returns a job on 9,000 photographs of 20 classes.

    Args:
      case: an objective.
    """
    train, test = Path(data) / 'objects64_train.zip', Path(data) / 'objects64_test.zip'
    return Job(
        case,
        'objects64',
        CONFIG,
        {'data.path': str(train), **OBJECTIVES[case]},
        (60, 180, 600),
        SAMPLERS,
        {str(train): ('train', COMPARED), str(test): ('test', ('kid',))},
        seed=seed,
        picture=64 if seed == 0 else 0,
    )


def images(data: str, *, seed: int = 0) -> Job:
    """Returns a job of configs/images.py as it is, on the 9,000 photographs."""
    job = objects('flow', data, seed=seed)
    fields = {'data.path': job.fields['data.path'], 'optimizer.schedule': 'linear'}  # as there
    return dataclasses.replace(
        job, case='images', config='configs/images.py', fields=fields, seconds=(180,)
    )


def alone(data: str) -> Job:
    """Returns a job that is there for the seconds a sample of its samplers."""
    return dataclasses.replace(
        objects('flow', data),
        data='alone',
        seconds=(1,),
        samplers=(*SAMPLERS, 'heun:10', 'ddpm:20', 'ddim:50'),
        references={},
        picture=0,
    )


def elephants(
    case: str,
    data: str,
    *,
    seconds: tuple[float, ...] = (60, 180, 540),
    seed: int = 0,
    augmented: bool = False,
) -> Job:
    """Returns a job on 500 photographs of one animal.

    Args:
      case: an objective.
      augmented: with EDM's augmentation; such a case has a name of its own.
    """
    path = str(Path(data) / 'elephants64.zip')
    return Job(
        f'{case}-augmented' if augmented else case,
        'elephants64',
        CONFIG,
        {
            'data.path': path,
            **OBJECTIVES[case],
            **({'data.augment': 'edm'} if augmented else {}),
            'data.holdout': 50,
            'train.log_every': 500,
            'train.holdout_every': 1000,
        },
        seconds,
        SAMPLERS,
        {path: ('train', ('kid', 'precision', 'recall', 'copies'))},
        seed=seed,
        samples=500,
        picture=64 if seed == 0 else 0,
    )


def ending(name: str, data: str, folder: str, *, seed: int = 0, seconds: int = 60) -> Job:
    """Returns a job of `ENDINGS`, of one time: a falling rate falls over the whole run.

    Args:
      name: one of `ENDINGS`; runs of other times than a minute add theirs to it, as jobs of one
        case share a work folder.
      data: objects64, which `flow` learns, or elephants64 or emoji64, which `v` learns.
      folder: of the archives.
    """
    if data == 'objects64':
        job = objects('flow', folder, seed=seed)
    else:
        job = elephants('v-cosine', folder, seed=seed)
        path = str(Path(folder) / f'{data}.zip')
        fields, references = {**job.fields, 'data.path': path}, {path: ('train', COMPARED)}
        job = dataclasses.replace(job, data=data, fields=fields, references=references)
    return dataclasses.replace(
        job,
        case=name if seconds == 60 else f'{name}-{seconds}s',
        fields={**job.fields, **ENDINGS[name], 'ema.widths': WIDTHS},
        seconds=(seconds,),
        samplers=('heun:25',),
        samples=2000,
        averages=('0.9995', *map(str, WIDTHS)),
        choosing=1000,
        picture=64 if seconds > 60 else 0,
    )


def endings(folder: str) -> list[Job]:
    """Returns the jobs of `ENDINGS`: the first two everywhere, then each other kind once."""
    constant, recipe, dropout, *others = ENDINGS
    sets = (
        ('objects64', 1, 60),
        ('elephants64', 0, 60),
        ('objects64', 0, 180),
        ('emoji64', 0, 60),
        ('elephants64', 0, 180),
        ('elephants64', 1, 60),
        ('emoji64', 1, 60),
    )
    runs = [(name, *run) for run in sets for name in (constant, recipe)]
    runs += [(dropout, of, 0, s) for s in (60, 180) for of in ('elephants64', 'emoji64')]
    runs += [(name, 'objects64', 0, 60) for name in others]
    return [ending(name, of, folder, seed=seed, seconds=s) for name, of, seed, s in runs]


def tiny_ending(name: str) -> Job:
    """Returns a job of `ENDINGS` for a CPU, on the embedded digits."""
    job = tiny('flow')
    fields = {**job.fields, **ENDINGS[name], 'data.batch_size': 8, 'ema.widths': WIDTHS}
    fields['optimizer.warmup_steps'] = 5
    averages = ('0.995', *map(str, WIDTHS))
    return dataclasses.replace(job, case=name, fields=fields, averages=averages, choosing=20)


def digits(case: str, seed: int) -> Job:
    """Returns a job on the embedded digits: a third of the run of configs/digits.py, and all."""
    return Job(
        case,
        'digits',
        'configs/digits.py',
        OBJECTIVES[case],
        (10, 30),
        ('heun:20', 'heun:10', 'dpmpp_2m:20'),
        {'digits:': ('train', COMPARED)},
        seed=seed,
        samples=1797,
        picture=60,
    )


def tiny(case: str, seed: int = 0) -> Job:
    """Returns a job that takes less than a second of training on a CPU."""
    return Job(
        case,
        'digits',
        'configs/digits.py',
        {
            **OBJECTIVES[case],
            **TINY,
            'train.log_every': 5,
            'train.holdout_every': 10,
        },
        (0.1, 0.3),
        ('ddim:4', 'dpmpp_2m:2'),
        {'digits:': ('train', COMPARED)},
        seed=seed,
        samples=20,
        batch_size=16,
        picture=9,
    )


def get_jobs(part: str, data: str) -> list[Job]:
    """Returns the jobs of a part, the most important first.

    Args:
      part: one of those above.
      data: folder of the archives.

    Raises:
      UserError: another part.
    """
    order = ('flow', 'epsilon-linear', 'v-cosine', 'edm', 'epsilon-cosine')
    photographs = [objects(case, data, seed=seed) for seed in (0, 1) for case in order]
    animals = [elephants(case, data) for case in order]
    few = [
        *(elephants(c, data, seconds=(60, 180), augmented=True) for c in ('v-cosine', 'flow')),
        *(elephants(c, data, seconds=(60,), seed=1) for c in ('v-cosine', 'flow')),
    ]
    parts = {
        'all': [*photographs, *animals, *few],
        'objects': photographs,
        **{
            name: [dataclasses.replace(job, seconds=(seconds,)) for job in photographs]
            for name, seconds in (('minute', 60), ('three', 180), ('ten', 600))
        },
        'images': [images(data, seed=seed) for seed in (0, 1)],
        'alone': [alone(data)],
        'costs': [objects(case, data) for case in OBJECTIVES],  # the ratios are to the first
        'elephants': animals,
        'small': few,
        'endings': endings(data),
        'endings_costs': [
            ending(name, 'objects64', data, seconds=s) for s in (60, 180) for name in ENDINGS
        ],
        'endings_tiny': [tiny_ending(name) for name in ENDINGS],
        'digits': [digits(case, seed) for seed in (0, 1) for case in ('v-cosine', 'edm', 'flow')],
        'tiny': [*(tiny(case) for case in OBJECTIVES), tiny('v-cosine', seed=1)],
    }
    if part not in parts:
        raise UserError(f'--jobs: expected jobs.py:PART with one of {", ".join(parts)}')
    return parts[part]
