"""Formats kernel rows as Markdown tables."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable

from jaxunet.benchmark.kernels.peers import PEERS
from jaxunet.benchmark.kernels.verdict import RATES, verdict
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.markdown import table
from jaxunet.runtime.rows import Row
from jaxunet.runtime.untrusted import NUMBER, check_fields

# Our backends in rows, and their titles. The first has plain field names (ratio, tflops, gbps); all
# others, also backends of other packages, have their name as a suffix.
KERNELS = {'pallas': 'Pallas kernels', 'cuda': 'CUDA kernels'}
# Columns of the table beside other libraries, before those of backends of other packages.
TIMED = {
    'cuda': 'CUDA kernels',
    'pallas': 'Pallas kernels',
    'xla': 'XLA',
    'cudnn': 'cuDNN',
    'tokamax': 'tokamax',
    'pytorch': 'PyTorch',
}
HEAD = (
    'op',
    'direction',
    'batch',
    'cases',
    'geometric mean',
    'minimum',
    'slowest case',
    'least share of the rates',
    'verdict',
)
# A later row that agrees in these fields replaces an earlier one.
NEEDED = ('device', 'op', 'case', 'direction', 'batch', 'dtype')


def latest(rows: Iterable[Row]) -> list[Row]:
    """Returns the newest row without an error of every measurement; skips rows of other kinds.

    Raises:
      UserError: there is no such row, or one lacks a field.
    """
    newest: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row.get('kind') != 'kernel' or row.get('error') is not None:
            continue
        sides = suffixes(row)
        fields = dict.fromkeys(NEEDED, str) | {
            'batch': int,
            'us_xla': NUMBER,
            'git': object,
            'versions': dict,
        }
        fields |= {f'{name}?': NUMBER for name in RATES}
        fields |= {f'us_{name}': NUMBER for name in PEERS if f'us_{name}' in row}
        for side, suffix in sides.items():
            fields |= dict.fromkeys((f'us_{side}', f'ratio{suffix}', f'gbps{suffix}'), NUMBER)
            fields[f'tflops{suffix}?'] = NUMBER  # null for ops without products
        check_fields(row, fields, 'a row of kind kernel', advice='remove its line')
        for suffix in sides.values():
            if not row[f'ratio{suffix}'] > 0:
                raise UserError(
                    f'a row of kind kernel: ratio{suffix}: expected more than 0, found '
                    f'{row[f"ratio{suffix}"]}; remove its line'
                )
        newest[tuple(row[name] for name in NEEDED)] = row
    if not newest:
        raise UserError('no measurements of kernels: expected rows of kind kernel without an error')
    return list(newest.values())


def suffixes(row: Row) -> dict[str, str]:
    """Returns the backends of a row and the suffix of their fields ratio, tflops and gbps.

    Other libraries (`jaxunet.benchmark.kernels.peers`) are no backends.
    """
    timed = [
        name.removeprefix('us_')
        for name in row
        if name.startswith('us_') and not name.endswith('_quartiles')
    ]
    first = next(iter(KERNELS))
    others = {'xla', *PEERS}
    sides = [
        side for side in dict.fromkeys([*KERNELS, *timed]) if side in timed and side not in others
    ]
    return {side: '' if side == first else f'_{side}' for side in sides}


def by_backend(rows: Iterable[Row]) -> list[Row]:
    """Returns the newest rows, one per backend, with its `us`, `ratio`, `tflops` and `gbps`."""
    return [
        row
        | {'backend': side, 'us': row[f'us_{side}']}
        | {name: row.get(name + suffix) for name in ('ratio', 'tflops', 'gbps')}
        for row in latest(rows)
        for side, suffix in suffixes(row).items()
    ]


def summary(rows: Iterable[Row]) -> str:
    """Returns Markdown: XLA's time over the kernels', geometric mean and minimum, and a verdict.

    One table for each device and backend, one line for each op, direction and batch size. '' for
    rows of other libraries alone.
    """
    devices: dict[tuple[str, str], dict[tuple[object, ...], list[Row]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for row in by_backend(rows):
        devices[row['device'], row['backend']][row['op'], row['direction'], row['batch']].append(
            row
        )
    parts = []
    for (name, backend), groups in devices.items():
        everything = [row for group in groups.values() for row in group]
        versions = ', '.join(
            dict.fromkeys(f'jax {row["versions"].get("jax")}' for row in everything)
        )
        commits = ', '.join(dict.fromkeys(str(row['git']) for row in everything))
        title = KERNELS.get(backend, f'{backend} kernels')
        parts.append(f"{name}, {versions}, commit {commits}; XLA's time over the {title}'.")
        body = []
        for key, group in groups.items():
            worst, told = min(group, key=lambda r: r['ratio']), verdict(group)
            body.append(
                (
                    *key,
                    len(group),
                    f'{statistics.geometric_mean(r["ratio"] for r in group):.2f}',
                    f'{worst["ratio"]:.2f}',
                    worst['case'],
                    '–' if told.share is None else f'{told.share:.0%}',
                    told.text,
                )
            )
        parts.append(table(HEAD, body))
    return '\n\n'.join(parts)


def tables(rows: Iterable[Row]) -> str:
    """Returns Markdown: the summary, then a table of cases for each backend, op and direction.

    Rows of other libraries alone make the table of `beside_peers`.
    """
    rows = latest(rows)
    if not any(map(suffixes, rows)):
        return beside_peers(rows)
    groups: dict[tuple[str, ...], list[Row]] = collections.defaultdict(list)
    for row in by_backend(rows):
        groups[row['device'], row['backend'], row['op'], row['direction']].append(row)
    parts = [summary(rows)]
    for (name, backend, op, direction), group in groups.items():
        batches = sorted({row['batch'] for row in group})
        cells = {(row['case'], row['batch']): row for row in group}
        head = [
            f'{what}, batch {batch}'
            for batch in batches
            for what in ('µs', 'TFLOP/s', 'GB/s', '× XLA')
        ]
        body = (
            (case, *(cell for b in batches for cell in _cells(cells.get((case, b)))))
            for case in dict.fromkeys(r['case'] for r in group)
        )
        parts += [f'`{op}` {direction}, {backend}, {name}', table(('case', *head), body)]
    return '\n\n'.join(parts)


def beside_peers(rows: Iterable[Row]) -> str:
    """Returns Markdown: the times of every case in µs, of kernel backends, XLA and other libraries.

    The last column is the least time of XLA and the libraries over that of the fastest backend.
    """
    rows = latest(rows)
    titles = TIMED | {s: s for row in rows for s in suffixes(row) if s not in TIMED}
    sides = [side for side in titles if any(f'us_{side}' in row for row in rows)]
    body = []
    for row in rows:
        times = {side: row[f'us_{side}'] for side in sides if f'us_{side}' in row}
        kernels = suffixes(row)
        ours = [us for side, us in times.items() if side in kernels]
        others = [us for side, us in times.items() if side not in kernels]
        body.append(
            (
                *(f'`{row["op"]}`', row['direction'], row['case'], row['batch']),
                *(f'{times[side]:.1f}' if side in times else '–' for side in sides),
                f'{min(others) / min(ours):.2f}' if ours else '–',
            )
        )
    head = ('op', 'direction', 'case', 'batch', *(f'{titles[side]}, µs' for side in sides))
    told = [
        ', '.join(dict.fromkeys(str(row[name]) for row in rows))
        for name in ('device', 'dtype', 'git')
    ]
    versions = ', '.join(
        f'{name} {version}' for name, version in rows[-1]['versions'].items() if version
    )
    text = table((*head, 'best other / best backend'), body)
    return f'{text}\n\n{told[0]}, {told[1]}, {versions}, commit {told[2]}.'


def _cells(row: Row | None) -> tuple[str, ...]:
    if row is None:
        return ('–',) * 4
    rate = '–' if row['tflops'] is None else f'{row["tflops"]:.0f}'
    return f'{row["us"]:.1f}', rate, f'{row["gbps"]:.0f}', f'{row["ratio"]:.2f}'
