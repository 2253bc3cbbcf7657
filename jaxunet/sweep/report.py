"""What a sweep found: a CSV of all points, a plot an axis, and a Markdown report with the best point and what each option is worth."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import math
import pathlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxunet.profile.report import Chart, read_csv, side_by_side
from jaxunet.profile.report import plot as plot_operations
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.subprocesses import Row
from jaxunet.sweep.points import DEVICES, JIT, OWN_AXES, Axis, show
from jaxunet.sweep.runner import IMPOSSIBLE, OK

COLUMNS = (
    *(
        'status',
        'images_per_s',
        'speed_of_best',
        'step_ms',
        'step_ms_q1',
        'step_ms_q3',
        'lower_s',
        'compile_s',
        'compile_cached',
    ),
    *('peak_gib', 'peak_source', 'batch', 'loss', 'steps', 'seconds', 'reason', 'key'),
)
TOP = 10  # operations of a profile that are shown
LEGEND = 12  # more lines than this and a plot is no longer told apart by its legend


@dataclass(frozen=True)
class Sweep:
    """Everything that is reported."""

    axes: list[Axis]
    rows: list[Row]  # in the order of the grid; points that have not run yet are missing
    missing: int  # how many those are
    notes: list[str]
    command: str  # `--config ...` and overrides that all points share
    title: str

    @property
    def done(self) -> list[Row]:
        """The points with numbers."""
        return [row for row in self.rows if row['status'] == OK]

    @property
    def best(self) -> Row | None:
        return max(self.done, key=lambda row: row['images_per_s'], default=None)


@dataclass(frozen=True)
class Worth:
    """An option against the first value of its axis, all else equal."""

    axis: Axis
    value: Any
    ratios: list[float]  # of images/s, one for every setting of the other axes in which both ran
    memory: list[float]  # of peak memory

    @property
    def ratio(self) -> float:
        """Geometric mean; NaN without any pair."""
        return geometric_mean(self.ratios)

    @property
    def efficiency(self) -> float | None:
        """Of more devices: the ratio over that of the devices."""
        first = self.axis.values[0]
        return (
            self.ratio * first / self.value
            if self.axis.name == DEVICES and first and self.value
            else None
        )


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def worth(sweep: Sweep) -> list[Worth]:
    """What every option of every axis gives."""
    found = []
    by_point = {_cell(row, sweep.axes): row for row in sweep.done}
    for place, axis in enumerate(sweep.axes):
        for value in axis.values[1:]:
            pairs = []
            for cell, row in by_point.items():
                first = by_point.get((*cell[:place], show(axis.values[0]), *cell[place + 1 :]))
                if cell[place] == show(value) and first is not None:
                    pairs.append((row, first))
            memory = [
                a['peak_bytes'] / b['peak_bytes']
                for a, b in pairs
                if a.get('peak_bytes') and b.get('peak_bytes')
            ]
            found.append(
                Worth(
                    axis, value, [a['images_per_s'] / b['images_per_s'] for a, b in pairs], memory
                )
            )
    return found


def _cell(row: Row, axes: Sequence[Axis]) -> tuple[str, ...]:
    return tuple(show(row['point'][axis.name]) for axis in axes)


def write(sweep: Sweep, directory: pathlib.Path, *, plot: bool) -> list[pathlib.Path]:
    """Writes results.csv, AXIS.png (of profiles operations.png) and report.md; returns their paths.

    Raises:
      UserError: matplotlib is missing, or a file cannot be written.
    """
    try:
        _write_csv(sweep, directory / 'results.csv')
        pictures = _plot(sweep, directory) if plot and sweep.done else []
        (directory / 'report.md').write_text(
            markdown(sweep, [p.name for p in pictures], directory), encoding='utf-8'
        )
    except OSError as error:
        raise UserError(
            f'--output: {error.filename or directory} cannot be written: {error.strerror or error}'
        ) from None
    return [directory / 'results.csv', *pictures, directory / 'report.md']


def flat(row: Row, best: Row | None) -> dict[str, Any]:
    """A row as the columns of the CSV; what was not measured is None."""
    step = row.get('step_ms', {})
    low, high = step.get('quartiles', (None, None))
    peak, rate = row.get('peak_bytes'), row.get('images_per_s')
    values = {name: row.get(name) for name in COLUMNS}
    values |= {
        'step_ms': step.get('median'),
        'step_ms_q1': low,
        'step_ms_q3': high,
        'peak_gib': peak / 2**30 if peak else None,
    }
    return values | {'speed_of_best': rate / best['images_per_s'] if rate and best else None}


def _write_csv(sweep: Sweep, path: pathlib.Path) -> None:
    with path.open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, [*(axis.name for axis in sweep.axes), *COLUMNS])
        writer.writeheader()
        for row in sweep.rows:
            values = flat(row, sweep.best)
            cells = {k: f'{v:.6g}' if isinstance(v, float) else v for k, v in values.items()}
            writer.writerow(
                {axis.name: show(row['point'][axis.name]) for axis in sweep.axes} | cells
            )


def markdown(sweep: Sweep, pictures: Sequence[str], directory: pathlib.Path) -> str:
    """The report."""
    lines = [
        f'# {sweep.title}',
        '',
        *_origin(sweep),
        *_best(sweep),
        *_worth(sweep),
        *_table(sweep),
        *_failures(sweep),
    ]
    lines += [line for name in pictures for line in (f'![{name.removesuffix(".png")}]({name})', '')]
    return '\n'.join([*lines, *_profiles(sweep, directory)]).rstrip() + '\n'


def _origin(sweep: Sweep) -> list[str]:
    machines = {
        f'{r["devices"]} x {r["device"]}, {", ".join(f"{k} {v}" for k, v in r["versions"].items())}, commit {r["git"]}': None
        for r in sweep.rows
    }
    lines = [
        f'`{sweep.command}`',
        '',
        f'{len(sweep.done)} points measured. ' + '; '.join(machines),
        '',
    ]
    if sweep.missing:
        lines += [f'**{sweep.missing} points have not run yet;** the same command goes on.', '']
    for note in sweep.notes:
        lines += [f'Note: {note}.', '']
    return lines


def _best(sweep: Sweep) -> list[str]:
    best = sweep.best
    if best is None:
        return ['## Best', '', 'No point ran to its end.', '']
    rate, slowest = best['images_per_s'], min(row['images_per_s'] for row in sweep.done)
    chosen = ', '.join(f'{name}={show(value)}' for name, value in best['point'].items())
    lines = [
        '## Best',
        '',
        f'**{chosen}**: {rate:,.1f} images/s, {best["step_ms"]["median"]:.2f} ms a step',
    ]
    lines[-1] += f', {rate / slowest:.2f}× the slowest.' if len(sweep.done) > 1 else '.'
    fields = {name: value for name, value in best['point'].items() if name not in OWN_AXES}
    if 'batch_per_device' in best['point']:
        fields['data.batch_size'] = best['batch']
    overrides = shlex.join(f'--config.{name}={show(value)}' for name, value in fields.items())
    if best['point'].get(JIT) != 'off':  # which training cannot do
        given = [
            a
            for a in shlex.split(sweep.command)
            if not a.startswith(tuple(f'--config.{name}=' for name in fields))
        ]
        lines += ['', f'    python -m jaxunet.train {f"{shlex.join(given)} {overrides}".strip()}']
    return [*lines, '']


def _worth(sweep: Sweep) -> list[str]:
    found = worth(sweep)
    if not found:
        return []
    lines = [
        '## What each option is worth',
        '',
        'Ratio of images/s to the first value, all else equal; geometric mean over the other axes.',
        '',
    ]
    scaling = any(w.efficiency is not None for w in found)
    lines += [
        f'| option | against | images/s | range | pairs | peak memory |{" efficiency |" if scaling else ""}'
    ]
    lines += ['|---|---|---|---|---|---|' + ('---|' if scaling else '')]
    for w in found:
        cells = [f'{w.axis.name}={show(w.value)}', show(w.axis.values[0])]
        if w.ratios:
            cells += [
                f'×{w.ratio:.3g}',
                f'×{min(w.ratios):.3g} to ×{max(w.ratios):.3g}',
                str(len(w.ratios)),
            ]
        else:
            cells += ['not comparable', '', '0']
        cells += [f'×{geometric_mean(w.memory):.3g}' if w.memory else '']
        if scaling:
            cells += [f'{w.efficiency:.1%}' if w.efficiency is not None and w.ratios else '']
        lines.append(f'| {" | ".join(cells)} |')
    return [*lines, '']


def _table(sweep: Sweep) -> list[str]:
    titles = [axis.name for axis in sweep.axes]
    heads = [
        *titles,
        'images/s',
        'of best',
        'step ms, median (quartiles)',
        'lower + compile s',
        'peak GiB',
    ]
    lines = ['## Points', '', f'| {" | ".join(heads)} |', '|' + '---|' * len(heads)]
    for row in sweep.rows:
        values = flat(row, sweep.best)
        cells = [show(row['point'][name]) for name in titles]
        if row['status'] == OK:
            spread = (
                f' ({values["step_ms_q1"]:.2f} to {values["step_ms_q3"]:.2f})'
                if values['step_ms_q1'] is not None
                else ''
            )
            cells += [
                f'{values["images_per_s"]:,.1f}',
                f'{values["speed_of_best"]:.0%}',
                f'{values["step_ms"]:.2f}{spread}',
            ]
            lower = f'{values["lower_s"]:.1f} + ' if values['lower_s'] is not None else ''
            cells += [
                f'{lower}{values["compile_s"]:.1f}'
                + (' (cached)' if values['compile_cached'] else '')
            ]
            cells += [f'{values["peak_gib"]:.2f}' if values['peak_gib'] else '']
        else:
            cells += [row['status'], '', '', '', '']
        lines.append(f'| {" | ".join(cells)} |')
    if any(row.get('peak_source') == 'process' for row in sweep.done):
        lines += [
            '',
            'This backend does not count its memory: the peak is that of the whole process, compiler included.',
        ]
    return [*lines, '']


def _failures(sweep: Sweep) -> list[str]:
    failed = [row for row in sweep.rows if row['status'] != OK]
    if not failed:
        return []
    lines = ['## Points without a result', '']
    for row in failed:
        label = ', '.join(f'{name}={show(value)}' for name, value in row['point'].items())
        reason = ' '.join(row['reason'].split())
        lines.append(
            f'- {label}: {"" if row["status"] == IMPOSSIBLE else row["status"] + ": "}{reason}'
            + (f' ([log]({row["log"]}))' if 'log' in row else '')
        )
    return [*lines, '']


def _profiles(sweep: Sweep, directory: pathlib.Path, top: int = TOP) -> list[str]:
    """Phases and top operations of every point that was traced."""
    traced = [row for row in sweep.done if 'profile' in row]
    if not traced:
        return []
    labels = [
        ', '.join(f'{name}={show(value)}' for name, value in row['point'].items()) for row in traced
    ]
    phases = list(dict.fromkeys(itertools.chain.from_iterable(row['phase_ms'] for row in traced)))
    lines = [
        '## Phases',
        '',
        'Device milliseconds a step.',
        '',
        f'| point | {" | ".join(phases)} | idle | launches |',
        '|' + '---|' * (len(phases) + 3),
    ]
    for label, row in zip(labels, traced, strict=True):
        times = ' | '.join(f'{row["phase_ms"].get(phase, 0.0):.2f}' for phase in phases)
        lines.append(f'| {label} | {times} | {row["idle_share"]:.1%} | {row["launches"]:.0f} |')
    tables = [
        (label, read_csv(directory / row['profile']))
        for label, row in zip(labels, traced, strict=True)
    ]
    lines += [
        '',
        f'## Top {top} device operations',
        '',
        '```',
        side_by_side(tables, top),
        '```',
        '',
        'Whole tables and traces: ',
    ]
    lines[-1] += (
        ', '.join(
            f'[{label}]({pathlib.PurePath(row["profile"]).parent})'
            for label, row in zip(labels, traced, strict=True)
        )
        + '.'
    )
    return lines


def check_plots() -> None:
    """Raises UserError unless plots can be drawn."""
    if importlib.util.find_spec('matplotlib') is None:
        raise UserError(
            '--plot: needs matplotlib, which is not installed; pip install "jaxunet[plots]", or pass --noplot'
        )


def _plot(sweep: Sweep, directory: pathlib.Path) -> list[pathlib.Path]:
    """Of profiles a picture of their operations; of steps one an axis: images/s (with the range over the parts of the run) and peak memory,
    a colour per setting of the other axes. Returns their paths."""
    check_plots()
    profiles = [row for row in sweep.done if 'profile' in row]
    if profiles:
        charts = [
            Chart(
                _label(row, sweep.axes),
                row['busy_ms'],
                row['launches'],
                row['phase_ms'],
                read_csv(directory / row['profile']),
            )
            for row in profiles
        ]
        plot_operations(directory / 'operations.png', charts, TOP)
        return [directory / 'operations.png']
    axes = [axis for axis in sweep.axes if len(axis.values) > 1]
    for axis in axes:
        _plot_axis(sweep, axis, directory / f'{axis.name}.png')
    return [directory / f'{axis.name}.png' for axis in axes]


def _label(row: Row, axes: Sequence[Axis]) -> str:
    return ' '.join(f'{axis.title}={show(row["point"][axis.name])}' for axis in axes)


def _plot_axis(sweep: Sweep, axis: Axis, path: pathlib.Path) -> None:
    """Lines over numbers, bars over names."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    others = [other for other in sweep.axes if other is not axis]
    groups: dict[str, list[Row]] = {}
    for row in sweep.done:
        groups.setdefault(_label(row, others), []).append(row)
    with_memory = any(row.get('peak_bytes') for row in sweep.done)
    figure = Figure(figsize=(11 if with_memory else 6, 4.2), layout='constrained')
    panels: Any = figure.subplots(1, 2 if with_memory else 1, squeeze=False)[0]
    texts = [show(value) for value in axis.values]
    numbers = all(isinstance(value, int | float) for value in axis.values)
    for i, (label, found) in enumerate(groups.items()):
        found.sort(key=lambda row: texts.index(show(row['point'][axis.name])))
        x = [float(texts.index(show(row['point'][axis.name]))) for row in found]
        width = 0.8 / len(groups)
        if not numbers:
            x = [place + (i - (len(groups) - 1) / 2) * width for place in x]
        rate = [row['images_per_s'] for row in found]
        ends = [row.get('images_per_s_range', (r, r)) for row, r in zip(found, rate, strict=True)]
        spread = [
            [max(r - low, 0) for r, (low, _) in zip(rate, ends, strict=True)],
            [max(high - r, 0) for r, (_, high) in zip(rate, ends, strict=True)],
        ]
        memory = [row.get('peak_bytes', math.nan) / 2**30 for row in found]
        if numbers:
            panels[0].errorbar(x, rate, yerr=spread, marker='o', capsize=3, label=label)
        else:
            panels[0].bar(x, rate, 0.9 * width, yerr=spread, capsize=3, label=label)
        if with_memory and numbers:
            panels[1].plot(x, memory, marker='o', label=label)
        elif with_memory:
            panels[1].bar(x, memory, 0.9 * width, label=label)
    for panel, title in zip(panels, ('images/s', 'peak memory, GiB'), strict=False):
        panel.set_xticks(range(len(texts)), texts)
        panel.set_xlabel(axis.name)
        panel.set_ylabel(title)
        panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    if others and len(groups) <= LEGEND:
        panels[-1].legend(fontsize='small')
    figure.savefig(path, dpi=110)
