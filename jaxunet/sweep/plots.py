"""Draws the plots of a sweep: speed and peak memory over each axis, or operations of profiles."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxunet.profile.report import Chart, read_csv
from jaxunet.profile.report import plot as plot_operations
from jaxunet.runtime.plots import check_plots
from jaxunet.runtime.rows import Row
from jaxunet.runtime.whole_files import written
from jaxunet.sweep.points import Axis, label, show
from jaxunet.sweep.results import Sweep, counts_memory

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes

TOP = 10  # number of operations shown of a profile
LEGEND = 12  # most lines with which a legend is readable; it is left out with more


def plot(sweep: Sweep, directory: pathlib.Path) -> list[pathlib.Path]:
    """Draws the plots of a sweep with results and returns their paths.

    Profiles get one picture of their operations. Timed steps get one picture per axis: images/s,
    with the range over the parts of the run, and peak memory where the devices count it, in one
    colour for each setting of the other axes.

    Raises:
      UserError: matplotlib is missing, or a file cannot be written.
    """
    check_plots()
    profiles = [row for row in sweep.done if 'profile' in row]
    if profiles:
        charts = [
            Chart(
                label=_label(row, sweep.axes),
                busy_ms=row['busy_ms'],
                launches=row['launches'],
                phase_ms=row['phase_ms'],
                rows=read_csv(directory / row['profile']),
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
    return label({axis.name: row['point'][axis.name] for axis in axes})


def _plot_axis(sweep: Sweep, axis: Axis, path: pathlib.Path) -> None:
    """Draws images/s and peak memory over one axis."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    others = [other for other in sweep.axes if other is not axis]
    groups: dict[str, list[Row]] = {}
    for row in sweep.done:
        groups.setdefault(_label(row, others), []).append(row)
    titles = ['images/s']
    if any(map(counts_memory, sweep.done)):
        titles.append('peak memory, GiB')
    figure = Figure(figsize=(11 if len(titles) > 1 else 6, 4.2), layout='constrained')
    panels = list(figure.subplots(1, len(titles), squeeze=False)[0])
    _draw_groups(panels, axis, groups)
    texts = [show(value) for value in axis.values]
    for panel, title in zip(panels, titles, strict=True):
        panel.set_xticks(range(len(texts)), texts)
        panel.set_xlabel(axis.name)
        panel.set_ylabel(title)
        panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    if others and len(groups) <= LEGEND:
        panels[-1].legend(fontsize='small')
    with written(path, '--output') as partial:
        figure.savefig(partial, format='png', dpi=110)


def _draw_groups(panels: Sequence[Axes], axis: Axis, groups: Mapping[str, list[Row]]) -> None:
    """Draws images/s (and, on a second panel, peak memory): lines over numbers, bars over names."""
    texts = [show(value) for value in axis.values]
    numbers = all(isinstance(value, int | float) for value in axis.values)
    width = 0.8 / len(groups)
    for i, (name, rows) in enumerate(groups.items()):
        rows.sort(key=lambda row: texts.index(show(row['point'][axis.name])))
        x = [float(texts.index(show(row['point'][axis.name]))) for row in rows]
        if not numbers:
            x = [place + (i - (len(groups) - 1) / 2) * width for place in x]
        rate = [row['images_per_s'] for row in rows]
        ends = [row.get('images_per_s_range', (r, r)) for row, r in zip(rows, rate, strict=True)]
        spread = [
            [max(r - low, 0) for r, (low, _) in zip(rate, ends, strict=True)],
            [max(high - r, 0) for r, (_, high) in zip(rate, ends, strict=True)],
        ]
        memory = [row['peak_bytes'] / 2**30 if counts_memory(row) else math.nan for row in rows]
        if numbers:
            panels[0].errorbar(x, rate, yerr=spread, marker='o', capsize=3, label=name)
        else:
            panels[0].bar(x, rate, 0.9 * width, yerr=spread, capsize=3, label=name)
        if len(panels) > 1 and numbers:
            panels[1].plot(x, memory, marker='o', label=name)
        elif len(panels) > 1:
            panels[1].bar(x, memory, 0.9 * width, label=name)
