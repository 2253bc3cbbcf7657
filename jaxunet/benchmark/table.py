"""Formats benchmark rows as Markdown tables."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.markdown import table
from jaxunet.runtime.rows import Row
from jaxunet.runtime.untrusted import NUMBER, check_fields, is_pair, shown

HEAD = [
    'config',
    'precision, batch',
    'direction',
    'side',
    'ms, median (quartiles)',
    'ratio',
    'images/s',
    'MFU',
    'bandwidth',
    'peak GiB',
    'compile s',
]
# A later row that agrees in these fields replaces an earlier one.
SAME = ('device', 'config', 'precision', 'batch_size', 'direction', 'backend')
ADVICE = 'remove its line, or measure again'
# Numbers of `jaxunet.benchmark.power`: field, head and form of its column.
POWER = (
    ('watts', 'W', '{:.0f}'),
    ('clock_mhz', 'MHz', '{:.0f}'),
    ('mj_per_image', 'mJ/image', '{:.3g}'),
)
NEEDED = {
    **dict.fromkeys(SAME, str),
    'batch_size': int,
    'git': object,
    'driver': object,
    'versions': dict,
    'matmul_flops': NUMBER,
    'copy_bytes_per_s': NUMBER,
    'error?': str,
    # Older rows and rows of other directions lack these.
    'steps_per_call?': int,
    'concurrent_kernels?': bool,
    'share_of_network?': NUMBER,
    **{f'{field}?': NUMBER for field, _, _ in POWER},
}
MEASURED = {
    'quartiles_ms': list,
    **dict.fromkeys(('median_ms', 'images_per_second', 'mfu', 'compile_s'), NUMBER),
    **dict.fromkeys(('ratio?', 'bandwidth_share?', 'peak_bytes?'), NUMBER),
}


def markdown(rows: Iterable[Row]) -> str:
    """Returns a table for each device, with a caption; rows of other kinds are skipped.

    Raises:
      UserError: there is no benchmark row, or one lacks a field.
    """
    latest: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row.get('kind') != 'benchmark':
            continue
        _check(row)
        latest[(*(row[name] for name in SAME), _variant(row))] = row
    if not latest:
        raise UserError('no benchmark rows; python -m jaxunet.benchmark writes them')
    devices = dict.fromkeys(row['device'] for row in latest.values())
    case = operator.itemgetter('config', 'precision', 'batch_size')
    order = list(dict.fromkeys(map(case, latest.values())))
    sorted_rows = sorted(latest.values(), key=lambda row: order.index(case(row)))
    return '\n\n'.join(
        _table([row for row in sorted_rows if row['device'] == device]) for device in devices
    )


def _check(row: Row) -> None:
    """Raises UserError if a row lacks a field, or has one of another type."""
    done = row.get('error') is None
    check_fields(row, NEEDED | (MEASURED if done else {}), 'a benchmark row', advice=ADVICE)
    if done and not is_pair(row['quartiles_ms']):
        raise UserError(
            'a benchmark row: quartiles_ms: expected two numbers, '
            f'found {shown(row["quartiles_ms"])}; {ADVICE}'
        )


def _table(rows: list[Row]) -> str:
    commits = list(dict.fromkeys(str(row['git']) for row in rows))
    power = [column for column in POWER if any(row.get(column[0]) is not None for row in rows)]
    head = [*HEAD, *(name for _, name, _ in power)]
    head += ['commit'] if len(commits) > 1 else []  # ratios hold within one commit
    body = [
        [*_cells(row), *(_or_dash(row.get(field), form) for field, _, form in power), row['git']]
        for row in rows
    ]
    text = table(head, [cells[: len(head)] for cells in body], rule='---')
    return f'{_caption(rows, commits)}\n\n{text}'


def _caption(rows: list[Row], commits: list[str]) -> str:
    """Returns device, versions, commits, and the rates that MFU and bandwidth refer to."""
    versions = dict(pair for row in rows for pair in row['versions'].items())
    parts = [f'{name} {version}' for name, version in versions.items() if name in ('jax', 'torch')]
    parts += [f'driver {row["driver"]}' for row in rows[:1] if row['driver']]
    parts += ['commit ' + ', '.join(commits)]
    rates = []
    for precision in dict.fromkeys(row['precision'] for row in rows):
        those = [row for row in rows if row['precision'] == precision]
        rates.append(f'{precision} matrix product {_range(those, "matmul_flops", 1e12)} TFLOP/s')
    rates.append(f'copy {_range(rows, "copy_bytes_per_s", 1e9)} GB/s')
    return (
        f'{rows[0]["device"]}; {"; ".join(parts)}. Measured rates of the device: '
        f'{"; ".join(rates)}.'
    )


def _range(rows: list[Row], field: str, unit: float) -> str:
    """Returns the value of a field; with several runs, its smallest and largest value."""
    values = [f'{row[field] / unit:.4g}' for row in sorted(rows, key=lambda row: row[field])]
    return values[0] if values[0] == values[-1] else f'{values[0]} to {values[-1]}'


def _variant(row: Row) -> str:
    """Returns a row's steps per call and concurrent kernels as text; '' if they are the default."""
    steps = row.get('steps_per_call') or 1
    text = f', {steps} per call' if steps > 1 else ''
    return text + (', concurrent kernels' if row.get('concurrent_kernels') else '')


def _share(row: Row) -> str:
    """Returns the network's share of the time in a row of `sample` as text; '' for other rows."""
    share = row.get('share_of_network')
    return '' if share is None else f', {share:.0%} of the network alone'


def _cells(row: Row) -> list[str]:
    start = [
        row['config'],
        f'{row["precision"]}, {row["batch_size"]}',
        row['direction'] + _variant(row) + _share(row),
        row['backend'],
    ]
    if row.get('error') is not None:
        return [
            *start,
            'error: ' + ' '.join(row['error'].split()).replace('|', '\\|')[:160],
            *[''] * 6,
        ]
    low, high = row['quartiles_ms']
    return [
        *start,
        f'{row["median_ms"]:.4g} ({low:.4g} to {high:.4g})',
        _or_dash(row.get('ratio'), '{:.2f}'),
        f'{row["images_per_second"]:.4g}'
        if row['images_per_second'] < 1000
        else f'{row["images_per_second"]:,.0f}',
        f'{row["mfu"]:.1%}',
        _or_dash(row.get('bandwidth_share'), '{:.0%}'),
        _or_dash(row.get('peak_bytes'), '{:.2f}', 2**30),
        f'{row["compile_s"]:.1f}',
    ]


def _or_dash(value: float | None, form: str, unit: float = 1) -> str:
    return '–' if value is None else form.format(value / unit)
