"""The jobs behind PROTOCOL.md, for `python -m jaxunet.compare.queue --jobs`.

    docs/results/methods/jobs.py:all      every run of the protocol, in its order
    docs/results/methods/jobs.py:METHODS  the three runs of each of these methods, such as
                                          uniform,flow+muon
    docs/results/methods/jobs.py:costs    a run of each method, for jaxunet.compare.step_cost
    docs/results/methods/jobs.py:tiny     seconds on a CPU, on the embedded digits

`--data` names the folder of cifar10_train.tar.xz and cifar10_test.tar.xz: the JPEGs of each in
folders by class.
"""

from __future__ import annotations

from pathlib import Path

from jaxunet.compare.jobs import TINY, Job
from jaxunet.compare.methods import BASELINE, named_fields

CONFIG = 'configs/cifar10.py'  # its network, batch, augmentation and learning rate
SECONDS = (60, 120, 240)
SEEDS = (0, 1, 2)
# The first also chooses the average of the weights. heun takes 2 · steps - 1 evaluations.
SAMPLERS = {
    'epsilon': ('ddpm:50', 'heun:25'),
    'v': ('heun:25', 'ddpm:50'),
    'edm': ('heun:25', 'ddpm:50'),
    'flow': ('heun:25', 'ddpm:50'),
}
AVERAGES = ('0.9999', '0.05', '0.15')  # DDPM's, and two widths

FIRST = (
    BASELINE,
    'flow',
    'adaptive',
    'v_cosine',
    'edm',
    'loss_second_moment',
    'min_snr',
    'immiscible',
    'immiscible_assignment',
    'muon',
)
JOINED = (
    'flow+muon',
    'flow+immiscible',
    'flow+immiscible_assignment',
    'flow+adaptive_uniform',
    'flow+muon+immiscible',
    'adaptive+muon',
)
OTHERS = (
    'edm+infonoise',
    'adaptive_uniform',
    'p2',
    'speed',
    'soft_min_snr',
    'uncertainty',
    'policy',
)
# (methods, seeds) in the order in which the table is filled.
ROUNDS = (
    (FIRST, SEEDS[:1]),
    (JOINED, SEEDS[:1]),
    (FIRST + JOINED, SEEDS[1:]),
    (OTHERS, SEEDS),
)


def cifar10(method: str, data: str, seed: int = 0) -> Job:
    """Returns a run on CIFAR-10.

    Raises:
      UserError: no such method.
    """
    train, test = Path(data) / 'cifar10_train.tar.xz', Path(data) / 'cifar10_test.tar.xz'
    fields = {
        'diffusion.objective': 'epsilon',
        'diffusion.schedule': 'linear',
        **named_fields(method),
    }
    return Job(
        method,
        'cifar10',
        CONFIG,
        {
            'data.path': str(train),
            'data.holdout': 1000,
            'optimizer.warmup_steps': 500,
            'ema.widths': tuple(map(float, AVERAGES[1:])),
            **fields,
        },
        SECONDS,
        SAMPLERS[str(fields['diffusion.objective'])],
        {
            str(train): ('train', ('fid', 'kid', 'precision', 'recall')),
            str(test): ('test', ('kid',)),
        },
        seed=seed,
        samples=10_000,
        batch_size=1000,
        picture=64 if seed == 0 else 0,
        averages=AVERAGES,
        choosing=1000,
    )


def tiny(method: str, seed: int = 0) -> Job:
    """Returns a job that takes less than a second of training on a CPU."""
    return Job(
        method,
        'digits',
        'configs/digits.py',
        {
            'diffusion.objective': 'epsilon',
            'diffusion.schedule': 'linear',
            **TINY,
            'ema.widths': (0.15,),
            **named_fields(method),
        },
        (0.1, 0.3),
        ('heun:2', 'ddim:2'),
        {'digits:': ('train', ('fid', 'kid', 'precision', 'recall'))},
        seed=seed,
        samples=20,
        batch_size=16,
        picture=9,
        averages=('0.995', '0.15'),
        choosing=12,
    )


def get_jobs(part: str, data: str) -> list[Job]:
    """Returns the jobs of a part, the most important first.

    Args:
      part: one of those above.
      data: folder of the archives.

    Raises:
      UserError: a method that does not exist.
    """
    if part == 'all':
        return [
            cifar10(method, data, seed)
            for methods, seeds in ROUNDS
            for seed in seeds
            for method in methods
        ]
    if part == 'costs':
        return [cifar10(method, data) for method in FIRST + JOINED + OTHERS]
    if part == 'tiny':
        return [*(tiny(BASELINE, seed) for seed in SEEDS[:2]), tiny('flow+immiscible')]
    return [cifar10(method, data, seed) for seed in SEEDS for method in part.split(',')]
