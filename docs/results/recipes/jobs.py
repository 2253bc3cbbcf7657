"""The jobs behind docs/results/recipes, for `python -m jaxunet.compare.queue --jobs`.

    docs/results/recipes/jobs.py:a      one GPU: epsilon-linear for ten minutes, then elephants
    docs/results/recipes/jobs.py:b      another: the other objectives, then second seeds
    docs/results/recipes/jobs.py:tiny   seconds on a CPU, on the embedded digits

`--data` names the folder of objects64_train.zip, objects64_test.zip and elephants64.zip.
"""

from __future__ import annotations

from pathlib import Path

from jaxunet.compare.jobs import Job
from jaxunet.runtime.errors import UserError

CONFIG = 'configs/elephants64.py'  # its network, batch, learning rate and averages
OBJECTIVES: dict[str, dict[str, object]] = {
    'epsilon-linear': {'diffusion.prediction': 'epsilon', 'diffusion.schedule': 'linear'},
    'epsilon-cosine': {'diffusion.prediction': 'epsilon', 'diffusion.schedule': 'cosine'},
    'v-cosine': {'diffusion.prediction': 'v', 'diffusion.schedule': 'cosine'},
}
SAMPLERS = ('ddim:50', 'heun:25', 'dpmpp_2m:20', 'heun:10')
COMPARED = ('fid', 'kid', 'precision', 'recall')


def objects(
    case: str, data: str, seconds: tuple[float, ...], seed: int = 0, **fields: object
) -> Job:
    """Returns a job on 9,000 photographs of 20 classes.

    Args:
      fields: further fields of the config, with __ for the dot.
    """
    train, test = Path(data) / 'objects64_train.zip', Path(data) / 'objects64_test.zip'
    name = '_'.join([case, *(f'{k.split("__")[-1]}={v}' for k, v in fields.items())])
    return Job(
        name,
        'objects64',
        CONFIG,
        {
            'data.path': str(train),
            **OBJECTIVES[case],
            **{k.replace('__', '.'): v for k, v in fields.items()},
        },
        seconds,
        SAMPLERS,
        {str(train): ('train', COMPARED), str(test): ('test', ('kid',))},
        seed=seed,
    )


def elephants(case: str, data: str, seconds: tuple[float, ...]) -> Job:
    """Returns a job on 500 photographs of one animal."""
    path = str(Path(data) / 'elephants64.zip')
    return Job(
        case,
        'elephants64',
        CONFIG,
        {'data.path': path, **OBJECTIVES[case]},
        seconds,
        ('heun:25', 'dpmpp_2m:20'),
        {path: ('train', ('kid', 'precision', 'recall'))},
        samples=500,
    )


def tiny(case: str, seed: int = 0) -> Job:
    """Returns a job that takes less than a second of training on a CPU."""
    return Job(
        case,
        'digits',
        'configs/digits.py',
        {
            **OBJECTIVES[case],
            'model.base_channels': 8,
            'model.channel_mult': (1,),
            'model.attention_resolutions': (),
            'model.num_head_channels': 8,
            'model.norm_groups': 4,
            'data.batch_size': 8,
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
      part: a, b or tiny.
      data: folder of the archives.

    Raises:
      UserError: another part.
    """
    others = [case for case in OBJECTIVES if case != 'epsilon-linear']
    animals = [case for case in OBJECTIVES if case != 'epsilon-cosine']
    parts = {
        'a': [
            objects('epsilon-linear', data, (60, 180, 600)),
            *(elephants(case, data, (60, 180)) for case in animals),
        ],
        'b': [
            *(objects(case, data, (60, 180)) for case in others),
            *(objects(case, data, (60,), seed=1) for case in OBJECTIVES),
            *(
                objects('v-cosine', data, (60,), optimizer__learning_rate=rate)
                for rate in (2e-4, 4e-4)
            ),
        ],
        'tiny': [*(tiny(case) for case in OBJECTIVES), tiny('v-cosine', seed=1)],
    }
    if part not in parts:
        raise UserError(f'--jobs: expected jobs.py:PART with one of {", ".join(parts)}')
    return parts[part]
