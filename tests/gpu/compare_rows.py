"""Prints the step times that `steps.sh` wrote: each turn of both checkouts, and the ratio of their
medians.

python3 tests/gpu/compare_rows.py FOLDER
"""

from __future__ import annotations

import collections
import json
import pathlib
import statistics
import sys


def main(folder: pathlib.Path) -> None:
    """Prints one line a case."""
    times: dict[tuple[str, ...], dict[str, list[float]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for side in ('old', 'new'):
        for path in sorted(folder.glob(f'{side}_*.jsonl')):
            for line in path.read_text().splitlines():
                row = json.loads(line)
                key = tuple(
                    str(row.get(name))
                    for name in ('direction', 'batch_size', 'precision', 'backend')
                )
                times[key][side].append(
                    row['median_ms'] if row.get('error') is None else float('nan')
                )
    print('case | old ms | new ms | new / old')
    for key, sides in times.items():
        old, new = (statistics.median(sides[side]) for side in ('old', 'new'))
        listed = [' '.join(f'{ms:.3f}' for ms in sides[side]) for side in ('old', 'new')]
        print(f'{" ".join(key)} | {listed[0]} | {listed[1]} | {new / old:.3f}')


if __name__ == '__main__':
    main(pathlib.Path(sys.argv[1]))
