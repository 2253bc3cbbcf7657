"""Golden loss trajectories: does the same run still learn alike after an upgrade?

    python tools/golden/losses.py                      # runs, and compares with the recorded rows
    python tools/golden/losses.py --write              # records rows for this version of JAX
    python tools/golden/losses.py --networks digits --backends xla --precisions float32

A case is a network, a backend and a precision; a run of it is 200 steps. Rounding differs between
versions of XLA and between GPUs, and grows from step to step, so that losses of single steps say
little after a while; so `support.golden.distance` compares means over 20 steps. The tolerance of a
case is the distance to a run with another seed, recorded with it: a version that changes more than
the seed does changes the method.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import sys
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

from support.settings import QUICK  # noqa: E402

if __name__ == '__main__':
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {QUICK}'  # as in the suite
    # Both seeds of a case run one program.
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(ROOT / '.pytest_cache' / 'xla'))

from support.configs import load  # noqa: E402
from support.golden import ROWS, distance, recorded  # noqa: E402
from support.tiny import tiny_config  # noqa: E402

from jaxunet.checkpoint.state import fresh_state  # noqa: E402
from jaxunet.config import Config, resolve, to_dict  # noqa: E402
from jaxunet.data.sources import open_images  # noqa: E402
from jaxunet.runtime import rows  # noqa: E402
from jaxunet.training.session import Session  # noqa: E402

STEPS = 200
SEEDS = (0, 1)  # the recorded run, and the one that gives the tolerance
SMALL32 = {
    'model': {
        'base_channels': 8,
        'channel_mult': (1, 2, 2),
        'num_res_blocks': 1,
        'attention_resolutions': (8,),
        'num_head_channels': 8,
        'norm_groups': 4,
    },
    'data': {'image_size': (32,), 'batch_size': 4},
}
RECORDED = {'objective': 'v', 'schedule': 'cosine'}  # whatever the config's objective is now
NETWORKS: dict[str, Callable[[], Config]] = {
    'tiny': tiny_config,  # for the suite, which runs its first steps
    'digits': lambda: resolve(load(ROOT / 'configs/digits.py')).replace(diffusion=RECORDED),
    'small32': lambda: resolve(to_dict(NETWORKS['digits']().replace(**SMALL32))),
}


def config_of(network: str, backend: str, precision: str, seed: int) -> Config:
    """Returns the config of a run. All networks see the digits, which small32 enlarges."""
    return NETWORKS[network]().replace(
        backend=backend,
        precision=precision,
        seed=seed,
        parallel={'devices': 1},
        train={'steps_per_call': 1},
    )


def run(config: Config, steps: int) -> list[float]:
    """Returns the losses of the first steps, to six digits."""
    source = open_images(config)
    losses = []
    with Session(config, source) as session:
        session.load(fresh_state(config))
        session.open_stream()
        session.compile()
        for _ in range(steps):
            losses.append(session.call(session.next_data())['loss'])
        return [float(f'{float(loss):.6g}') for loss in losses]


def measure(network: str, backend: str, precision: str) -> rows.Row:
    """Returns the row of a case: losses of both seeds, and the tolerance."""
    losses = [run(config_of(network, backend, precision, seed), STEPS) for seed in SEEDS]
    return {
        **rows.origin('golden', 'python tools/golden/losses.py --write'),
        'network': network,
        'backend': backend,
        'precision': precision,
        'losses': losses[0],
        'tolerance': float(f'{distance(losses[1], losses[0]):.4g}'),
    }


def main() -> int:
    """Runs the cases; returns 1 if one is farther from a recorded row than another seed."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--networks', default=','.join(NETWORKS))
    parser.add_argument('--backends', default='xla')
    parser.add_argument('--precisions', default='float32,bfloat16')
    parser.add_argument('--write', action='store_true', help=f'append to {ROWS.relative_to(ROOT)}')
    options = parser.parse_args()
    known, failed = recorded(), False
    for network, backend, precision in itertools.product(
        options.networks.split(','), options.backends.split(','), options.precisions.split(',')
    ):
        row = measure(network, backend, precision)
        print(f'{network}, {backend}, {precision}: tolerance {row["tolerance"]}')
        for case, other in known.items():
            if (case[0], case[2]) == (network, precision):
                far = distance(row['losses'], other['losses'])
                bad = far > other['tolerance']
                failed |= bad
                shown = 'TOO FAR' if bad else 'within its tolerance'
                print(f'  from {case[1]} with jax {case[3]}: {far:.2g}, {shown}', flush=True)
        if options.write:
            rows.append(ROWS, row)
    return int(failed)


if __name__ == '__main__':
    sys.exit(main())
