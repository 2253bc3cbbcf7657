"""Formats the rows of a step's budget as Markdown tables."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from jaxunet.benchmark.roofline.run import KIND, STEP
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.markdown import table
from jaxunet.runtime.rows import Row
from jaxunet.runtime.untrusted import NUMBER, check_fields

HEAD = (
    'class', 'level', 'launches', 'GFLOP', 'GB', 'floor ms', 'ms', 'above floor ms', 'TFLOP/s', 'GB/s',  # noqa: E501
)  # fmt: skip
# A later run that agrees in these fields replaces an earlier one.
SAME = ('device', 'config', 'precision', 'batch_size', 'ops')
NEEDED = {
    **dict.fromkeys((*SAME, 'time', 'class'), str),
    'batch_size': int,
    'git': object,
    'driver': object,
    'versions': dict,
    **dict.fromkeys(('matmul_flops', 'copy_bytes_per_s', 'launches', 'flops', 'bytes'), NUMBER),
    **dict.fromkeys(('floor_ms', 'ms', 'above_ms'), NUMBER),
    'level?': str,  # null for a class as a whole
}
OF_STEP = {**dict.fromkeys(('busy_ms', 'step_ms', 'gaps_ms', 'unplaced'), NUMBER), 'unknown': list}


def markdown(rows: Iterable[Row]) -> str:
    """Returns a table for each step; rows of other kinds are skipped.

    The classes with the most time above their floor come first, and so do levels in their class.

    Raises:
      UserError: there is no row of this kind, a field is missing or has another type, or a step's
        last row is missing.
    """
    runs: dict[tuple[object, ...], dict[str, list[Row]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for row in rows:
        if row.get('kind') != KIND:
            continue
        fields = NEEDED | (OF_STEP if row.get('class') == STEP else {})
        check_fields(row, fields, f'a row of kind {KIND}', advice='remove its line')
        runs[tuple(row[name] for name in SAME)][row['time']].append(row)
    if not runs:
        raise UserError(
            f'no budget of a step: expected rows of kind {KIND}; python -m '
            'jaxunet.benchmark.kernels --roofline --config FILE writes them'
        )
    return '\n\n'.join(_step(times[max(times)]) for times in runs.values())


def _step(rows: Sequence[Row]) -> str:
    """Returns the table of one step with its caption."""
    totals = [row for row in rows if row['class'] == STEP]
    if not totals:
        raise UserError(
            f'the rows of {rows[0]["config"]}, batch {rows[0]["batch_size"]}, {rows[0]["time"]} '
            'have none of the whole step: the run was cut short; remove them and repeat it'
        )
    total = totals[0]
    order = sorted(rows, key=lambda row: -row['above_ms'])
    levels = [row for row in order if row.get('level')]
    body = []
    for row in order:
        if row.get('level') is None and row is not total:
            body.append(_cells(row, row['class'], 'all'))
            body += [
                _cells(one, '', one['level']) for one in levels if one['class'] == row['class']
            ]
    body.append(_cells(total, '**all kernels**', ''))
    return '\n\n'.join([_caption(total), table(HEAD, body), '\n'.join(_summary(total))])


def _caption(row: Row) -> str:
    return (
        f'{row["config"]}, {row["precision"]}, batch {row["batch_size"]}; {row["ops"]}; '
        f'{row["device"]}; jax {row["versions"].get("jax")}; driver {row["driver"]}; commit '
        f'{row["git"]}. Floors are for its measured rates, matrix product '
        f'{row["matmul_flops"] / 1e12:.4g} TFLOP/s and copy {row["copy_bytes_per_s"] / 1e9:.4g} '
        'GB/s.'
    )


def _summary(total: Row) -> list[str]:
    """Returns the sentences below the table."""
    lines = [
        f'Step {total["step_ms"]:.3f} ms: kernels busy {total["busy_ms"]:.3f} ms, gaps between '
        f'them {total["gaps_ms"]:.3f} ms; floor {total["floor_ms"]:.3f} ms.'
    ]
    if total['unplaced']:
        lines.append(
            f'{total["unplaced"]:g} kernels per step could not be matched with the call that '
            'launched them: they count in their class but in no level. '
            'XLA_FLAGS=--xla_gpu_enable_command_buffer= makes the trace name all of them.'
        )
    if total['unknown']:
        lines.append(f'Kernels without a class: {", ".join(map(str, total["unknown"]))}.')
    return lines


def _cells(row: Row, name: str, level: str) -> list[str]:
    ms = row['ms']
    shown = row['launches'] > 0
    return [
        name,
        level,
        f'{row["launches"]:.4g}',
        _or_dash(row['flops'] / 1e9, '{:.1f}'),
        _or_dash(row['bytes'] / 1e9, '{:.3f}'),
        f'{row["floor_ms"]:.3f}',
        f'{ms:.3f}' if shown else '–',
        f'{row["above_ms"]:.3f}' if shown else '–',
        _or_dash(row['flops'] / ms / 1e9 if ms else 0, '{:.0f}'),
        _or_dash(row['bytes'] / ms / 1e6 if ms else 0, '{:.0f}'),
    ]


def _or_dash(value: float, form: str) -> str:
    return form.format(value) if value else '–'
