"""Writes the report of a comparison, compare.csv, quality.png and report.md, from its rows."""

from __future__ import annotations

import csv
import io
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxunet.compare.results import Curve, collect, curves, mean_curve, step_costs
from jaxunet.compare.runner import Spec, divided_cores
from jaxunet.compare.statistics import time_to
from jaxunet.config.relations import HIGHER_IS_BETTER
from jaxunet.metrics.table import general_label
from jaxunet.profile.report import check_plots
from jaxunet.runtime import rows

COLUMNS = (
    'method',
    'seed',
    'status',
    'milestone',
    'training_seconds',
    'step',
    'metric',
    'value',
    'std',
    'num_samples',
    'sampler',
    'evaluations',
    'reference',
    'features',
    'resize',
    'reason',
)


class Target(NamedTuple):
    """The quality that the baseline reaches at its end, and the seconds that this takes."""

    value: float
    seconds: float


class Written(NamedTuple):
    """A written report.

    Fields:
      text: the content of report.md.
      paths: all files.
    """

    text: str
    paths: list[pathlib.Path]


def markdown(spec: Spec, directory: pathlib.Path, failures: Mapping[str, str]) -> str:
    """Returns the report as Markdown: the protocol, the table of methods, and failures.

    Args:
      spec: the comparison.
      directory: its folder, with the rows of the runs.
      failures: reasons of failed runs, by folder of the run.

    Raises:
      UserError: the runs were measured in different ways.
    """
    all_rows, costs = collect(spec, directory), step_costs(directory)
    base = curves(spec, all_rows, spec.metrics[0])[spec.baseline]
    target = _target(base)
    lines = [
        '# Methods at equal training wall-clock',
        '',
        f'`{spec.command}`',
        '',
        protocol(spec, all_rows),
        '',
    ]
    if target:
        label = _label(all_rows, spec.metrics[0])
        mean = f'mean of {len(base)} seeds' if len(base) > 1 else 'one seed'
        lines += [
            f'Baseline quality: {label} of {spec.baseline} at {_short(target.seconds)} s, '
            f'{target.value:.4g} ({mean}).',
            '',
        ]
    lines += [
        *_table(spec, all_rows, target, costs),
        '',
        'Curves are means over seeds, with straight lines between the measured times'
        + ('; ± is half the range over seeds.' if max(spec.seeds.values()) > 1 else '.'),
    ]
    if costs:
        lines.append(
            f'Turns: {costs["rounds"]} of {costs["steps"]} steps each, batch {costs["batch"]}, '
            f'one {costs["device"]}.'
        )
    if spec.processes > 1 and any(row['device'] == 'cpu' for row in all_rows):
        lines += ['', f'Note: {divided_cores(spec.processes)}.']
    lines += [f'Failed: {name}: {reason}' for name, reason in failures.items()]
    return '\n'.join([*lines, '', _differences(spec)]) + '\n'


def _label(all_rows: Sequence[rows.Row], name: str) -> str:
    """Returns the full name of a metric; without that of the features if it is not measured."""
    labels = {row['name']: row['metric'] for row in all_rows}
    return labels.get(name, general_label(name))


def _target(base: Sequence[Curve]) -> Target | None:
    """Returns the target; None unless all runs of the baseline were measured at their end."""
    if not base or not all(math.isfinite(c.values[-1]) for c in base):
        return None
    seconds, values = mean_curve(base)
    return Target(float(values[-1]), float(seconds[-1]))


def _table(
    spec: Spec, all_rows: Sequence[rows.Row], target: Target | None, costs: rows.Row
) -> list[str]:
    """Returns the lines of the table: a row for each method."""
    by_metric = {name: curves(spec, all_rows, name) for name in spec.metrics}
    main = by_metric[spec.metrics[0]]
    base = main[spec.baseline]
    higher = spec.metrics[0] in HIGHER_IS_BETTER
    # Methods that train for less time are also compared with the baseline at their own end.
    apart = len(set(spec.seconds.values())) > 1
    heads = [
        'method',
        'seeds',
        *(['s', f'{spec.baseline} by then'] if apart else []),
        *(f'{_label(all_rows, name)} at the end' for name in spec.metrics),
        's to baseline quality',
        'times faster',
        'steps',
        'ms per step / baseline (own runs)',
        *(['ms per step / baseline (turns, quartiles)'] if costs else []),
    ]
    lines = [f'| {" | ".join(heads)} |', '|' + '---|' * len(heads)]
    for method, found in main.items():
        cells = [method, str(len(found))]
        if apart:
            own = spec.seconds[method]
            cells += [f'{own:g}', _by_then(base, own) if own < spec.seconds[spec.baseline] else '']
        cells += [_final([c.values[-1] for c in by_metric[name][method]]) for name in spec.metrics]
        cells += _speed_cells(found, target, higher=higher, bounded=method != spec.baseline)
        steps = np.mean([c.steps[-1] for c in found]) if found else math.nan
        cells += [f'{steps:,.0f}' if np.isfinite(steps) else '', _ratio(found, base)]
        if costs:
            cells.append(_cost(costs['costs'].get(method)))
        lines.append(f'| {" | ".join(cells)} |')
    return lines


def _speed_cells(
    found: Sequence[Curve], target: Target | None, *, higher: bool, bounded: bool
) -> list[str]:
    """Returns the seconds until the target is reached, and how many times faster that is.

    With `bounded`, a target that is reached at the first milestone gives bounds, because the run
    may have reached it earlier.
    """
    seconds, values = mean_curve(found)
    if target is None or not len(seconds):
        return ['', '']
    when = time_to(target.value, seconds, values, higher=higher)
    if not math.isfinite(when):
        return ['not reached', f'< {target.seconds / seconds[-1]:.2f}']
    at_most, at_least = ('≤ ', '≥ ') if bounded and when == seconds[0] else ('', '')
    return [f'{at_most}{_short(when)}', f'{at_least}{target.seconds / when:.2f}']


def _short(seconds: float) -> str:
    """Returns seconds in three digits or, from 1,000 on, in whole seconds."""
    return f'{seconds:.0f}' if seconds >= 1000 else f'{seconds:.3g}'


def _cost(cost: rows.Row | None) -> str:
    """Returns the ratio and quartiles of a method's step cost; '' if it was not timed."""
    if not cost:
        return ''
    low, high = cost['quartiles']
    return f'{cost["ratio"]:.3f} ({low:.3f} to {high:.3f})'


def _differences(spec: Spec) -> str:
    """Returns a sentence with the fields in which each method differs from the baseline."""
    base = spec.methods[spec.baseline]
    different = []
    for name, fields in spec.methods.items():
        own = {path: value for path, value in fields.items() if value != base.get(path)}
        if own:
            different.append(f'{name}: ' + ', '.join(f'{k}={v}' for k, v in own.items()))
    return f'Methods beside the baseline: {"; ".join(different) or "none"}.'


def protocol(spec: Spec, all_rows: Sequence[rows.Row]) -> str:
    """Returns the paragraph that says how the runs were trained and measured."""
    config = spec.config
    text = (
        f'Each run trains for {_each(spec.seconds)} s of wall-clock (training steps alone: not '
        f'compiling, not measuring), batch {config["data"]["batch_size"]}, {config["precision"]}, '
        f'{config["data"]["path"]}, learning rate constant after '
        f'{config["optimizer"]["warmup_steps"]:,} steps of warm-up; runs of a seed share their '
        f'start and order of the images. At {_each(spec.evaluations)} equally spaced times the '
        f'average of the weights (EMA {config["ema"]["rates"][0]}) draws '
    )
    if not all_rows:
        return text + f'{config["evaluation"]["samples"]} samples. Nothing is measured yet.'
    row = all_rows[0]
    return text + (
        f'{row["num_samples"]} samples by {row["sampler"]} with {row["evaluations"]} evaluations '
        f'of the network, compared with {row["reference"]}{_details(all_rows)}; features '
        f'{row["features"]} ({row["resize"]}). {origins(all_rows)}'
    )


def _details(all_rows: Sequence[rows.Row]) -> str:
    """Returns the size of the reference, the settings of the metrics and the seed.

    Returns '' for rows of older versions, which lack these fields.
    """
    count = all_rows[0].get('num_reference')
    if not count:
        return ''
    settings = {row['name']: row['settings'] for row in all_rows if row.get('settings')}
    return (
        f' ({count} images)'
        + ''.join(f'; {name}: {text}' for name, text in settings.items())
        + "; by the run's seed"
    )


def _each(numbers: Mapping[str, float]) -> str:
    """Returns the most frequent number, and the methods that have others."""
    counts = list(numbers.values())
    usual = max(counts, key=counts.count)
    others = ', '.join(f'{name} {number:g}' for name, number in numbers.items() if number != usual)
    return f'{usual:g}' + (f' ({others})' if others else '')


def origins(all_rows: Sequence[rows.Row]) -> str:
    """Returns a sentence with the devices, versions and commits of the runs."""
    devices = dict.fromkeys(
        f'{row["device"]} (driver {row["driver"]})' if row['driver'] else str(row['device'])
        for row in all_rows
    )
    versions = dict.fromkeys(f'jax {row["versions"]["jax"]}' for row in all_rows)
    commits = dict.fromkeys(str(row['git'] or 'unknown') for row in all_rows)
    return f'Runs on {", ".join(devices)}; {", ".join(versions)}; commit {", ".join(commits)}.'


def _final(values: Sequence[float]) -> str:
    """Returns the mean of the values and half their range; NaNs are left out."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ''
    return f'{np.mean(known):.4g}' + (
        f' ± {(max(known) - min(known)) / 2:.2g}' if len(known) > 1 else ''
    )


def _by_then(base: Sequence[Curve], seconds: float) -> str:
    """Returns the value of the baseline's mean curve at this time; '' before its first point."""
    times, values = mean_curve(base)
    # A run is measured at the first step after a milestone, hence the tolerance of one second.
    known = len(times) and times[0] <= seconds + 1
    return f'{np.interp(seconds, times, values):.4g}' if known else ''


def _ratio(found: Sequence[Curve], base: Sequence[Curve]) -> str:
    """Returns the time per step relative to the baseline's, from the steps of the runs."""
    ms = [
        np.mean([c.seconds[-1] / c.steps[-1] for c in some]) if some else math.nan
        for some in (found, base)
    ]
    return f'{ms[0] / ms[1]:.3f}' if np.isfinite(ms).all() else ''


def write(
    spec: Spec, directory: pathlib.Path, failures: Mapping[str, str], *, plot: bool
) -> Written:
    """Writes compare.csv, report.md and quality.png.

    Args:
      spec: the comparison.
      directory: its folder, with the rows of the runs.
      failures: reasons of failed runs, by folder of the run.
      plot: draw quality.png if there are rows.

    Raises:
      UserError: the runs were measured in different ways, or matplotlib is missing.
    """
    all_rows = collect(spec, directory)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction='ignore')
    writer.writeheader()
    writer.writerows({'status': 'ok', **row} for row in all_rows)
    for folder, reason in failures.items():
        method, _, seed = folder.rpartition('_seed')
        writer.writerow(
            {
                'method': method or folder,
                'seed': seed if method else '',
                'status': 'failed',
                'reason': reason,
            }
        )
    paths = [directory / 'compare.csv', directory / 'report.md']
    paths[0].write_text(text.getvalue(), encoding='utf-8')
    report = markdown(spec, directory, failures)
    paths[1].write_text(report, encoding='utf-8')
    if plot and all_rows:
        paths.append(directory / 'quality.png')
        _plot(spec, all_rows, paths[-1])
    return Written(report, paths)


def _plot(spec: Spec, all_rows: Sequence[rows.Row], path: pathlib.Path) -> None:
    """Draws a panel for each metric: its mean over seeds against seconds of training.

    A band shows the range over seeds.
    """
    check_plots()
    from matplotlib.figure import Figure  # noqa: PLC0415

    metrics = spec.metrics
    across = len(metrics) if len(metrics) < 4 else 2
    down = -(-len(metrics) // across)
    figure = Figure(figsize=(max(6.5, 5.2 * across), 4.4 * down), layout='constrained')
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for empty in panels[len(metrics) :]:
        empty.set_axis_off()
    for panel, name in zip(panels, metrics, strict=False):
        smallest = math.inf
        for method, found in curves(spec, all_rows, name).items():
            if not found:
                continue
            seconds, values = mean_curve(found)
            (line,) = panel.plot(seconds, values, marker='o', markersize=3, label=method)
            every = np.array([c.values for c in found])
            every = every[:, np.isfinite(every).all(axis=0)]
            if len(found) > 1:
                panel.fill_between(
                    seconds,
                    every.min(axis=0),
                    every.max(axis=0),
                    color=line.get_color(),
                    alpha=0.2,
                    linewidth=0,
                )
            smallest = min(smallest, every.min(initial=math.inf))
        if name == 'fid' and smallest > 0:
            panel.set_yscale('log')
        panel.set_xlabel('training, s')
        panel.set_ylabel(_label(all_rows, name))
        panel.grid(alpha=0.3, which='both')
    panels[0].legend(fontsize='small')
    figure.savefig(path, dpi=110)
