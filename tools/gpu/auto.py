"""Measures how far `backend=auto` by its table is behind the best choice of backends, in steps.

    python3 tools/gpu/auto.py --precision bfloat16 [--rounds 5] --output rows.jsonl
    python3 tools/gpu/auto.py --table rows.jsonl

`--choose` finds the best choice op by op, compiling one side after the other, and only for the
fastest kernels of a GPU. This times `auto` and the choices that could be faster on a Hopper GPU
(`SIDES`), for every value of JAXUNET_KERNELS, all in turns in one call of tools/gpu/steps.py, which
compiles them at the same time. A file of choices is not followed.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

from support import markdown  # noqa: E402

from jaxunet.runtime import rows  # noqa: E402
from jaxunet.runtime.rows import Row  # noqa: E402

# By precision and value of JAXUNET_KERNELS. XLA's step is the same with all kernels.
SIDES = {
    'bfloat16': {
        'fastest': (
            'auto',
            'pallas+linear=cuda+adamw=cuda',
            *(f'cuda+{op}=pallas' for op in ('attention', 'group_norm', 'conv3x3')),
            'cuda+linear=xla',
        ),
        **{
            kernels: (
                'auto',
                *(f'cuda+{op}=xla' for op in ('attention', 'group_norm', 'linear')),
            )
            for kernels in ('portable', 'ada')
        },
    },
    'float32': {
        'fastest': (
            'auto',
            'cuda',
            'pallas+attention=cuda+adamw=cuda',
            *(f'cuda+linear=xla+{op}=xla' for op in ('attention', 'group_norm')),
        ),
        'portable': ('cuda', 'xla+adamw=cuda', 'xla+attention=cuda+group_norm=cuda+adamw=cuda'),
        'ada': ('cuda', 'xla+attention=cuda+group_norm=cuda+adamw=cuda'),
    },
}
LIMIT = 1.02  # of the time of `auto` over that of the best other choice
AUTO = {('float32', 'portable'): 'xla', ('float32', 'ada'): 'xla'}  # where `auto` is a side already


def command(precision: str, rounds: int, output: pathlib.Path) -> list[str]:
    """Returns the call of tools/gpu/steps.py."""
    sides = [('xla', 'fastest')]
    sides += [(side, kernels) for kernels, own in SIDES[precision].items() for side in own]
    return [
        *(sys.executable, str(ROOT / 'tools/gpu/steps.py'), str(ROOT)),
        f'--backends={",".join(backend for backend, _ in sides)}',
        f'--kernels={",".join(kernels for _, kernels in sides)}',
        *(f'--precision={precision}', f'--rounds={rounds}', f'--output={output}'),
        *('--batch_sizes=32', '--variables=JAXUNET_CHOICES=none.json'),
    ]


def table(measured: Sequence[Row]) -> str:
    """Returns a Markdown table: `auto` and the fastest other choice, by precision and kernels."""
    body = []
    for row in measured:
        precision = row['precision']
        names = list(zip(row['backends'], row['kernels'], strict=True))
        times = dict(zip(names, row['ms'], strict=True))
        for kernels in SIDES[precision]:
            own = {b: ms for (b, k), ms in times.items() if k == kernels or b == 'xla'}
            auto = own.pop(AUTO.get((precision, kernels), 'auto'))
            best = min(own, key=lambda backend: statistics.median(own[backend]))
            ratios = [a / b for a, b in zip(auto, own[best], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            body.append(
                (
                    *(precision, kernels, f'{statistics.median(auto):.2f}', f'`{best}`'),
                    f'{statistics.median(own[best]):.2f}',
                    f'{middle:.3f} ({low:.3f} to {high:.3f})',
                    'yes' if middle <= LIMIT else 'no',
                )
            )
    head = ('precision', 'kernels', 'auto, ms', 'best other', 'its ms', 'auto / other', 'within 2%')
    return markdown.table(head, body)


def main() -> None:
    """Runs what the flags ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--precision', choices=list(SIDES), default='bfloat16')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--output', type=pathlib.Path, default=pathlib.Path('auto.jsonl'))
    parser.add_argument('--table', type=pathlib.Path, help='print the table of these rows, and end')
    options = parser.parse_args()
    if not options.table:
        subprocess.run(command(options.precision, options.rounds, options.output), check=True)
    print(table(rows.read(options.table or options.output)))


if __name__ == '__main__':
    main()
