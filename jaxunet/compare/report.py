"""Writes the report of a comparison: report.md and quality.png, from its rows."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxunet.compare import tables
from jaxunet.compare.comparison import Comparison
from jaxunet.compare.statistics import Metric, mean_over
from jaxunet.compare.tables import Results
from jaxunet.runtime.plots import check_plots
from jaxunet.runtime.whole_files import written

# Of comparisons whose files name no protocol.
PROTOCOL = (
    'Each run trains for the same time (training steps alone: not compiling, not measuring), with '
    'a constant learning rate after the warm-up; runs of a seed share their start and the order of '
    'the images. Comparison'
)
REPORT, PLOT = 'report.md', 'quality.png'
STYLES = ('-', '--', ':', '-.')  # line styles; each colour is used once with each style
COLOURS = 10
TICKS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)  # of a logarithmic axis, times powers of ten
TIMES = 8  # a time axis names at most so many of the measured times
FEW_TICKS = 3.0  # an axis whose ends have at most this ratio gets evenly spaced ticks instead


def about_file(comparison: Comparison, folder: Path, command: str) -> list[str]:
    """Returns the paragraphs that say how the runs of a comparison file are made.

    Args:
      folder: folder of the report, to which links are relative.
      command: the command line.
    """

    def link(path: Path) -> str:
        return f'[{path.name}]({os.path.relpath(path, folder)})'

    def times(seconds: Sequence[float]) -> str:
        return ', '.join(f'{time:g}' for time in seconds)

    own = ''.join(f'; {name}: {times(found)}' for name, found in comparison.own_seconds.items())
    options = ''.join(
        f' Samplers: {name}={value}.' for name, value in comparison.template.options.items()
    )
    made = f'Protocol: {link(comparison.protocol)}; comparison' if comparison.protocol else PROTOCOL
    return [
        f'`{comparison.command or command}`',
        *([comparison.note] if comparison.note else []),
        f'{made} file: {link(comparison.path)}. Seconds of training: '
        f'{times(comparison.seconds)}{own}.{options}',
    ]


def markdown(results: Results, about: Sequence[str], *, plot: bool) -> str:
    """Returns the report as Markdown.

    Args:
      about: paragraphs that say how the runs are made.
      plot: True if quality.png exists and is to be shown.
    """
    *above, last = about
    base = results.comparison.baseline
    parts = [
        f'# {results.comparison.title}',
        *above,
        f'{last} {tables.origin(results)}',
        f'Cost: {tables.cost(results)}',
        '± is a standard error over three seeds, or over the number in brackets. Each method '
        'counts with the sampler of the smaller mean. Bold is ahead: p of the paired t-test below '
        '0.05, and error bars apart.',
        tables.quality(results),
        *([f'![quality against seconds of training]({PLOT})'] if plot else []),
        f'## Differences to {base}, with the same seeds',
        tables.against_baseline(results),
    ]
    if len(results.comparison.methods) > 2:
        parts += ['## Differences to the best other method', tables.against_best(results)]
    parts += [
        f'## Seconds to the quality of {base} at its end',
        'Curves are straight between the measured times; ≤ is an upper bound, as the quality is '
        'reached at the first of them.',
        tables.sooner(results),
        '## At the last time',
        tables.at_the_end(results),
    ]
    if results.step_costs:
        parts += ['## Steps, measured in turns', tables.step_times(results.step_costs)]
    parts += ['## Missing cells', tables.missing(results)]
    return '\n\n'.join(parts) + '\n'


def write(
    results: Results, folder: Path, about: Sequence[str], *, plot: bool
) -> tuple[str, list[Path]]:
    """Writes report.md, and quality.png if `plot` and there are rows; returns text and paths.

    Args:
      about: paragraphs that say how the runs are made.

    Raises:
      UserError: matplotlib is missing, or a file cannot be written.
    """
    paths = [folder / REPORT]
    if plot and results.rows:
        paths.append(folder / PLOT)
        draw(results, paths[-1])
    text = markdown(results, about, plot=(folder / PLOT).exists())
    with written(paths[0], '--output') as partial:
        partial.write_text(text, encoding='utf-8')
    return text, paths


def draw(results: Results, path: Path) -> None:
    """Draws a panel for each metric of the first reference: means against seconds of training.

    A band is one standard error on either side.

    Raises:
      UserError: matplotlib is missing.
    """
    check_plots()
    from matplotlib.figure import Figure  # noqa: PLC0415

    metrics = results.comparison.metrics[: len(results.comparison.references[0].metrics)]
    across = len(metrics) if len(metrics) < 4 else 2
    down = -(-len(metrics) // across)
    figure = Figure(figsize=(5.4 * across + 2.2, 4.4 * down), layout='constrained')
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for empty in panels[len(metrics) :]:
        empty.set_axis_off()
    for panel, metric in zip(panels, metrics, strict=False):
        _draw_panel(results, metric, panel)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, fontsize='small', title='method (seeds)', loc='outside right upper'
    )
    with written(path, '--output') as partial:
        figure.savefig(partial, format='png', dpi=110)


def _draw_panel(results: Results, metric: Metric, panel: Any) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator  # noqa: PLC0415

    smallest = math.inf
    for number, name in enumerate(results.methods):
        times = sorted(time for case, time in results.cells if case == name)
        means = [
            mean_over([metric.find(row) for row in results.cells[name, time]]) for time in times
        ]
        values = np.array([mean.value for mean in means])
        errors = np.array([mean.error if mean.seeds > 1 else 0.0 for mean in means])
        (line,) = panel.plot(
            times,
            values,
            label=f'{name} ({max(mean.seeds for mean in means)})',
            linestyle=STYLES[number // COLOURS % len(STYLES)],
            marker='o',
            markersize=3,
        )
        panel.fill_between(
            times, values - errors, values + errors, color=line.get_color(), alpha=0.2, linewidth=0
        )
        smallest = min(smallest, float(np.nanmin([*(values - errors), math.inf])))
    panel.set_xscale('log')
    named = results.times[:: -max(1, -(-len(results.times) // TIMES))]  # from the last one
    panel.set_xticks(named, [f'{time:g}' for time in named])
    panel.xaxis.set_minor_locator(NullLocator())
    if 0 < smallest < math.inf:  # a kernel distance may be below 0
        panel.set_yscale('log')
        low, high = panel.get_ylim()
        many = high > FEW_TICKS * low
        panel.yaxis.set_major_locator(LogLocator(subs=TICKS) if many else MaxNLocator(6))
        panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter('{x:g}')  # 60, not 6 · 10¹
    panel.set_xlabel('training, s')
    panel.set_ylabel(metric.title)
    panel.grid(alpha=0.3)
