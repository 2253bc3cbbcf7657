"""What a comparison gave: compare.csv, quality.png and report.md, from the rows of its runs."""

from __future__ import annotations

import csv
import io
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxunet.compare.runner import COSTS, Spec
from jaxunet.compare.worker import finished
from jaxunet.metrics.table import general_label
from jaxunet.profile.report import check_plots
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError

__all__ = ['check_plots', 'markdown', 'write']

HIGHER_IS_BETTER = ('precision', 'recall', 'inception_score')
# fmt: off
COLUMNS = (
    'method', 'seed', 'status', 'milestone', 'training_seconds', 'step', 'metric', 'value', 'std', 'num_samples', 'sampler', 'evaluations',
    'reference', 'features', 'resize', 'reason',
)
# fmt: on


@dataclass(frozen=True)
class Curve:
    """A metric of one run: by milestone, NaN where it was not measured."""

    seed: int
    seconds: np.ndarray
    steps: np.ndarray
    values: np.ndarray


def collect(spec: Spec, directory: pathlib.Path) -> list[rows.Row]:
    """All rows in the order of the methods, seeds, milestones; of a milestone that was measured twice, the later ones.

    Raises:
      UserError: rows that were measured in different ways, and so do not compare.
    """
    found: dict[tuple[Any, ...], rows.Row] = {}
    for method, seeds in spec.seeds.items():
        for seed in range(seeds):
            for row in finished(directory / 'runs' / f'{method}_seed{seed}'):
                found[method, seed, row['milestone'], row['name']] = row
    for field in ('features', 'reference', 'num_samples', 'sampler', 'evaluations'):
        if len(ways := {str(row[field]): row for row in found.values()}) > 1:
            told = ', '.join(
                f'{way} ({row["method"]}_seed{row["seed"]})' for way, row in ways.items()
            )
            raise UserError(
                f'{directory}: runs that were measured with different {field} do not compare: {told}; remove some of them'
            )
    order = list(spec.methods)
    return sorted(
        found.values(), key=lambda row: (order.index(row['method']), row['seed'], row['milestone'])
    )


def curves(spec: Spec, all_rows: Sequence[rows.Row], name: str) -> dict[str, list[Curve]]:
    """Those of one metric, by method."""
    by_method: dict[str, list[Curve]] = {method: [] for method in spec.methods}
    for method, seeds in spec.seeds.items():
        for seed in range(seeds):
            own = {
                r['milestone']: r
                for r in all_rows
                if (r['method'], r['seed'], r['name']) == (method, seed, name)
            }
            if own:
                columns = [
                    [own[i][key] if i in own else math.nan for i in range(spec.evaluations[method])]
                    for key in ('training_seconds', 'step', 'value')
                ]
                by_method[method].append(
                    Curve(seed, *(np.array(column, float) for column in columns))
                )
    return by_method


def time_to(target: float, seconds: np.ndarray, values: np.ndarray, *, higher: bool) -> float:
    """When a curve first is as good as `target`, in straight lines between its points; infinity if never.

    A curve that is so from its first point on gives the time of that point: an upper bound.
    """
    good = values >= target if higher else values <= target
    if not good.any():
        return math.inf
    i = int(np.argmax(good))
    if i == 0 or not np.isfinite(values[i - 1]):
        return float(seconds[i])
    share = (target - values[i - 1]) / (values[i] - values[i - 1])
    return float(seconds[i - 1] + share * (seconds[i] - seconds[i - 1]))


def mean_curve(found: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and values, means over the seeds, of the milestones that were measured for all of them."""
    known = np.isfinite([c.values for c in found]).all(axis=0)
    return np.mean([c.seconds[known] for c in found], axis=0), np.mean(
        [c.values[known] for c in found], axis=0
    )


def markdown(spec: Spec, directory: pathlib.Path, failures: Mapping[str, str]) -> str:
    """The report: protocol, the table, and what failed."""
    all_rows = collect(spec, directory)
    metrics = spec.config['evaluation']['metrics']
    main = metrics[0]
    baseline = next(iter(spec.methods))
    by_method = curves(spec, all_rows, main)
    labels = {row['name']: row['metric'] for row in all_rows}
    lines = [
        '# Methods at equal training wall-clock',
        '',
        f'`{spec.command}`',
        '',
        protocol(spec, all_rows),
        '',
    ]
    costs = step_costs(directory)
    higher = main in HIGHER_IS_BETTER
    base = by_method[baseline]
    whole = bool(base) and all(math.isfinite(c.values[-1]) for c in base)
    if whole:
        base_seconds, base_values = mean_curve(base)
        target, base_time = float(base_values[-1]), float(base_seconds[-1])
        lines.append(
            f'Baseline quality: {labels[main]} of {baseline} at {base_time:.0f} s, {target:.4g} (mean of {len(base)} seeds).'
        )
        lines.append('')
    apart = (
        len(set(spec.seconds.values())) > 1
    )  # then some ends are compared with the baseline's value at that time
    titles = ['method', 'seeds', *(['s', f'{baseline} by then'] if apart else [])]
    titles += [
        *(f'{labels.get(name, general_label(name))} at the end' for name in metrics),
        's to baseline quality',
    ]
    titles += ['times faster', 'steps', 'ms a step / baseline (own runs)']
    titles += ['ms a step / baseline (turns, quartiles)'] if costs else []
    lines += [f'| {" | ".join(titles)} |', '|' + '---|' * len(titles)]
    for method, found in by_method.items():
        cells = [method, str(len(found))]
        if apart:
            own_time = spec.seconds[method]
            cells += [
                f'{own_time:g}',
                _by_then(base, own_time) if own_time < spec.seconds[baseline] else '',
            ]
        cells += [
            _final([c.values[-1] for c in curves(spec, all_rows, name)[method]]) for name in metrics
        ]
        seconds, values = mean_curve(found) if found else (np.empty(0), np.empty(0))
        if whole and len(seconds):
            when = time_to(target, seconds, values, higher=higher)
            bound = '≤ ' if when == seconds[0] and method != baseline else ''
            least = '≥ ' if bound else ''
            cells += (
                [f'{bound}{when:.0f}', f'{least}{base_time / when:.2f}']
                if math.isfinite(when)
                else ['not reached', f'< {base_time / seconds[-1]:.2f}']
            )
        else:
            cells += ['', '']
        steps = np.mean([c.steps[-1] for c in found]) if found else math.nan
        cells += [f'{steps:,.0f}' if np.isfinite(steps) else '', _ratio(found, base)]
        if costs:
            own = costs['costs'].get(method)
            cells.append(
                f'{own["ratio"]:.3f} ({own["quartiles"][0]:.3f} to {own["quartiles"][1]:.3f})'
                if own
                else ''
            )
        lines.append(f'| {" | ".join(cells)} |')
    lines += [
        '',
        'Curves are means over seeds, with straight lines between the measured times; ± is half the range over seeds.',
    ]
    if costs:
        lines.append(
            f'Turns: {costs["rounds"]} of {costs["steps"]} steps each, batch {costs["batch"]}, one {costs["device"]}.'
        )
    lines += [f'Failed: {name}: {reason}' for name, reason in failures.items()]
    fields = {
        name: {k: v for k, v in own.items() if v != spec.methods[baseline].get(k)}
        for name, own in spec.methods.items()
    }
    lines += [
        '',
        'Methods beside the baseline: '
        + ('; '.join(f'{n}: {_fields(f)}' for n, f in fields.items() if f) or 'none')
        + '.',
    ]
    return '\n'.join(lines) + '\n'


def protocol(spec: Spec, all_rows: Sequence[rows.Row]) -> str:
    """How the numbers were come by."""
    e, c = spec.config['evaluation'], spec.config
    text = (
        f'Each run trains for {_each(spec.seconds)} s of wall-clock (training steps alone: not compiling, not measuring), batch '
        f'{c["data"]["batch_size"]}, {c["precision"]}, {c["data"]["path"]}, constant learning rate; runs of a seed share their start and '
        f'order of the images. At {_each(spec.evaluations)} equally spaced times the average of the weights (EMA {c["ema"]["rates"][0]}) '
        'draws '
    )
    if not all_rows:
        return text + f'{e["samples"]} samples. Nothing is measured yet.'
    row = all_rows[0]
    return text + (
        f'{row["num_samples"]} samples by {row["sampler"]} with {row["evaluations"]} evaluations of the network, compared with '
        f'{row["reference"]}{_details(all_rows)}; features {row["features"]} ({row["resize"]}). {origins(all_rows)}'
    )


def _details(all_rows: Sequence[rows.Row]) -> str:
    """What rows since this was kept tell besides: how many images the reference has, each metric's own settings, whose seed."""
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
    """The most frequent one, and which methods have others."""
    counts = list(numbers.values())
    usual = max(counts, key=counts.count)
    others = ', '.join(f'{name} {number:g}' for name, number in numbers.items() if number != usual)
    return f'{usual:g}' + (f' ({others})' if others else '')


def origins(all_rows: Sequence[rows.Row]) -> str:
    """Devices, versions and commits of the runs, as a sentence."""
    devices = dict.fromkeys(
        f'{row["device"]} (driver {row["driver"]})' if row['driver'] else str(row['device'])
        for row in all_rows
    )
    versions = dict.fromkeys(f'jax {row["versions"]["jax"]}' for row in all_rows)
    commits = dict.fromkeys(str(row['git']) for row in all_rows)
    return f'Runs on {", ".join(devices)}; {", ".join(versions)}; commit {", ".join(commits)}.'


def step_costs(directory: pathlib.Path) -> dict[str, Any]:
    """The latest measurement of step costs, or {}."""
    path = directory / COSTS
    return rows.read(path)[-1] if path.exists() else {}


def _final(values: Sequence[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ''
    return f'{np.mean(known):.4g}' + (
        f' ± {(max(known) - min(known)) / 2:.2g}' if len(known) > 1 else ''
    )


def _by_then(base: Sequence[Curve], seconds: float) -> str:
    """The baseline's value after this time, on its mean curve; '' before its first point."""
    times, values = mean_curve(base) if base else (np.empty(0), np.empty(0))
    known = len(times) and times[0] <= seconds + 1  # a milestone is met by the first step after it
    return f'{np.interp(seconds, times, values):.4g}' if known else ''


def _ratio(found: Sequence[Curve], base: Sequence[Curve]) -> str:
    """Milliseconds a step against the baseline's, from the runs' own steps."""
    ms = [
        np.mean([c.seconds[-1] / c.steps[-1] for c in some]) if some else math.nan
        for some in (found, base)
    ]
    return f'{ms[0] / ms[1]:.3f}' if np.isfinite(ms).all() else ''


def _fields(values: Mapping[str, Any]) -> str:
    return ', '.join(f'{path}={value}' for path, value in values.items())


def write(
    spec: Spec, directory: pathlib.Path, failures: Mapping[str, str], *, plot: bool
) -> list[pathlib.Path]:
    """Writes the files, and returns their paths. Raises UserError: matplotlib is missing."""
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
    paths[1].write_text(markdown(spec, directory, failures), encoding='utf-8')
    if plot and all_rows:
        paths.append(directory / 'quality.png')
        _plot(spec, all_rows, paths[-1])
    return paths


def _plot(spec: Spec, all_rows: Sequence[rows.Row], path: pathlib.Path) -> None:
    """A panel a metric: the mean over seeds against the time of training, and the range over seeds as a band."""
    check_plots()
    from matplotlib.figure import Figure  # an extra  # noqa: PLC0415

    metrics = spec.config['evaluation']['metrics']
    across = len(metrics) if len(metrics) < 4 else 2
    down = -(-len(metrics) // across)
    figure = Figure(figsize=(max(6.5, 5.2 * across), 4.4 * down), layout='constrained')
    panels: Any = figure.subplots(down, across, squeeze=False).ravel()
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
        panel.set_ylabel(next(row['metric'] for row in all_rows if row['name'] == name))
        panel.grid(alpha=0.3, which='both')
    panels[0].legend(fontsize='small')
    figure.savefig(path, dpi=110)
