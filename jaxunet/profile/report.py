"""Shows profiles as text, CSV files and bar charts."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxunet.profile.events import COPY
from jaxunet.profile.phases import PHASES
from jaxunet.profile.summary import DEVICE, HOST, Row, Summary
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.plots import check_plots
from jaxunet.runtime.whole_files import written

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes

COLUMNS = tuple(field.name for field in dataclasses.fields(Row))
COLOURS = dict(
    zip(PHASES, ('#7f7f7f', '#1f77b4', '#ff7f0e', '#d62728', '#2ca02c', '#bcbd22'), strict=True)
)
OVERLAP = 1.005  # a chart notes simultaneous operations if their times exceed the busy time by this
Table = Sequence[Sequence[str]]


def text(label: str, summary: Summary, *, step_ms: float, traced_step_ms: float, top: int) -> str:
    """Returns one profile as text: its numbers, its phases, its `top` device and host operations.

    Args:
      label: name of the profile.
      summary: numbers of the trace.
      step_ms: milliseconds per step without the tracer.
      traced_step_ms: milliseconds per step with the tracer.
      top: operations to show for each side.
    """
    total = sum(summary.phase_ms.values()) or 1.0
    phases = [
        ('phase', 'device ms', 'share'),
        *((p, f'{ms:.3f}', f'{ms / total:.1%}') for p, ms in summary.phase_ms.items()),
    ]
    device = [('device operation', 'phase', 'backend', 'a step', 'ms', 'share', 'mostly in')]
    device += [
        (shorten(r.operation, 60), r.phase, r.backend, *_numbers(r), shorten(r.place, 36))
        for r in summary.side(DEVICE)[:top]
    ]
    host = [('host operation (own time)', 'a step', 'ms', 'share')]
    host += [(shorten(r.operation, 60), *_numbers(r)) for r in summary.side(HOST)[:top]]
    head = _headline(label, summary, step_ms, traced_step_ms)
    return '\n'.join([*head, '', *padded(phases), '', *padded(device), '', *padded(host)])


def _headline(label: str, summary: Summary, step_ms: float, traced_step_ms: float) -> list[str]:
    """Returns the sentences above the tables."""
    unit = 'kernel launches' if summary.platform == 'gpu' else 'HLO operations'
    lines = [
        f'{label}: {step_ms:.2f} ms per step, device busy {summary.busy_ms:.2f} ms of it, '
        f'idle {untraced_idle(summary, step_ms):.1%}; '
        f'{summary.launches:.0f} {unit} and {summary.copies:.0f} copies per step',
        f'while traced: {traced_step_ms:.2f} ms per step, idle {summary.idle_share:.1%}',
    ]
    if summary.devices > 1:
        lines.append(f'a mean over {summary.devices} devices')
    if summary.in_graphs:
        launches = f'{summary.graph_launches:.0f} launches of CUDA graphs'
        lines.append(f'{summary.in_graphs:.0f} of these in {launches}')
    if summary.platform == 'cpu':
        lines.append("device = CPU: operations on XLA's threads of the host; their times add up")
    if summary.overlapped_share is not None:
        lines.append(
            f'collectives: {summary.collective_ms:.3f} ms per step, '
            f'{summary.overlapped_share:.1%} of it while the device computes'
        )
    return lines


def untraced_idle(summary: Summary, step_ms: float) -> float:
    """Returns the idle share of the device without the tracer, which slows the host down.

    It is the part of an untraced step (`step_ms`) in which no operation runs.
    """
    return max(0.0, 1 - summary.busy_ms / step_ms)


def side_by_side(columns: Sequence[tuple[str, Sequence[Row]]], top: int) -> str:
    """Returns the `top` device operations of several profiles, one column of text for each.

    Above each column stand its label, the time of its operations and its launches per step.

    Args:
      columns: (label, rows) of each profile.
      top: operations to show.
    """
    blocks = []
    for label, rows in columns:
        device = [r for r in rows if r.side == DEVICE]
        busy, launches = sum(r.ms for r in device), sum(r.count for r in device if r.kind != COPY)
        block = [
            (f'{label}: {busy:.2f} ms, {launches:.0f} launches', 'backend', 'a step', 'ms', 'share')
        ]
        block += [
            (shorten(f'{r.operation} ({r.phase})', 46), r.backend, *_numbers(r))
            for r in device[:top]
        ]
        aligned = padded(block)
        blocks.append(aligned + [' ' * len(aligned[0])] * (top + 1 - len(aligned)))
    return '\n'.join('  |  '.join(line).rstrip() for line in zip(*blocks, strict=True))


def _numbers(row: Row) -> tuple[str, str, str]:
    """Returns operations and milliseconds per step, and the share of the time, as text."""
    return f'{row.count:.4g}', f'{row.ms:.3f}', f'{row.share:.1%}'


def padded(rows: Table) -> list[str]:
    """Returns the rows as lines of equal length: text left-aligned, numbers right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    numeric = [all(cell[:1].isdigit() for cell in column[1:]) for column in zip(*rows, strict=True)]
    return [
        '  '.join(
            c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)
        )
        for row in rows
    ]


def shorten(name: str, width: int) -> str:
    """Cuts a name to `width` characters, in the middle: kernels often differ at their ends."""
    if len(name) <= width:
        return name
    return f'{name[: width // 2 - 1]}…{name[-(width - width // 2) :]}'


def write_csv(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes all rows under a header of their field names.

    Raises:
      UserError: the file cannot be written.
    """
    with (
        written(path, '--output') as partial,
        partial.open('w', newline='', encoding='utf-8') as file,
    ):
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def read_csv(path: pathlib.Path) -> list[Row]:
    """Reads a file of `write_csv`.

    Raises:
      UserError: the file cannot be read, or is not such a CSV.
    """
    types = typing.get_type_hints(Row)
    try:
        with path.open(newline='', encoding='utf-8') as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                expected = ', '.join(COLUMNS)
                raise UserError(
                    f'{path}: expected the columns {expected}, found {reader.fieldnames}; give a '
                    'CSV of jaxunet.profile'
                )
            rows = list(reader)
        if any(None in row for row in rows):  # csv's key for values beyond the columns
            raise ValueError(f'expected {len(COLUMNS)} values, found more')
        return [Row(**{name: types[name](value) for name, value in row.items()}) for row in rows]
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise UserError(f'{path}: cannot be read: {reason}') from None
    except (TypeError, ValueError, csv.Error) as error:
        raise UserError(f'{path}: a row is damaged ({error}); profile again') from None


class Chart(NamedTuple):
    """The numbers of a profile that `plot` draws; times are milliseconds per step."""

    label: str
    busy_ms: float
    launches: float
    phase_ms: Mapping[str, float]
    rows: Sequence[Row]


def plot(path: pathlib.Path, charts: Sequence[Chart], top: int) -> None:
    """Draws a PNG: for each profile, a bar of its phases above bars of its `top` operations.

    Raises:
      UserError: matplotlib is missing, or the file cannot be written.
    """
    check_plots()
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    figure = Figure(figsize=(10 * len(charts), 2.2 + 0.34 * top), layout='constrained')
    axes = figure.subplots(
        2, len(charts), squeeze=False, sharex='row', height_ratios=(1, max(top, 3))
    )
    for chart, phases, bars in zip(charts, *axes, strict=True):
        _draw(chart, phases, bars, top)
    figure.legend(
        handles=[Patch(color=colour, label=phase) for phase, colour in COLOURS.items()],
        loc='outside lower center',
        ncols=6,
    )
    with written(path, '--output') as partial:
        figure.savefig(partial, format='png', dpi=110)


def _draw(chart: Chart, phases: Axes, bars: Axes, top: int) -> None:
    """Draws one profile on two axes: its phases, and its `top` device operations."""
    phases.set_title(
        f'{chart.label}: device busy {chart.busy_ms:.2f} ms, {chart.launches:.0f} launches per step'
    )
    left = 0.0
    for phase, ms in chart.phase_ms.items():
        phases.barh(['phases'], [ms], left=[left], color=COLOURS[phase])
        left += ms
    if left > chart.busy_ms * OVERLAP:
        phases.set_xlabel(
            f'operations that run at the same time are added up: {left:.2f} ms of them in '
            f'{chart.busy_ms:.2f} ms'
        )
    rows = [row for row in chart.rows if row.side == DEVICE][:top]
    names = [f'{shorten(row.operation, 44)}  ×{row.count:.3g}' for row in rows]
    bars.barh(
        range(len(rows)), [row.ms for row in rows], color=[COLOURS[row.phase] for row in rows]
    )
    bars.set_yticks(range(len(rows)), names)
    for place, row in enumerate(rows):
        bars.annotate(
            f' {row.share:.1%} {row.backend}', (row.ms, place), va='center', fontsize='small'
        )
    bars.invert_yaxis()
    bars.margins(x=0.18)
    bars.set_xlabel('device time a step, ms')
