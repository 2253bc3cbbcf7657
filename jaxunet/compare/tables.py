"""The tables of a comparison, as Markdown, from its file and its rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxunet.compare.collected import FAILED, STOPPED, device_seconds, read_rows, read_stretches
from jaxunet.compare.comparison import Comparison
from jaxunet.compare.statistics import (
    Mean,
    Metric,
    best_cells,
    end_of,
    interpolated,
    mean_over,
    numbers_of,
    paired,
    rival,
    times_to_final,
)
from jaxunet.compare.step_times import COSTS, combined_costs
from jaxunet.runtime.markdown import table
from jaxunet.runtime.rows import Row

NOTHING = 'Nothing is measured yet.'
SEEDS = 3  # a mean over another number shows it in brackets


@dataclass(frozen=True)
class Results:
    """A comparison and its measurements so far.

    Fields:
      rows: measurements, as `jaxunet.compare.collected` reads them.
      stretches: the pieces of work that made them.
      step_costs: method -> its step cost, measured in turns (`jaxunet.compare.step_times`).
    """

    comparison: Comparison
    rows: Sequence[Row]
    stretches: Sequence[Row] = ()
    step_costs: Mapping[str, Row] = field(default_factory=dict)

    @functools.cached_property
    def cells(self) -> dict[tuple[str, float], list[Row]]:
        """The rows of each method's best sampler, by method and seconds."""
        return best_cells(self.rows, self.comparison.distances[0])

    @property
    def methods(self) -> list[str]:
        """The measured methods, in the order of the file; others follow."""
        measured = dict.fromkeys(name for name, _ in self.cells)
        return [name for name in self.comparison.methods if name in measured] + [
            name for name in measured if name not in self.comparison.methods
        ]

    @property
    def times(self) -> list[float]:
        """The measured times."""
        return sorted({time for _, time in self.cells})

    def numbers(self, method: str, time: float, metric: Metric) -> dict[int, float]:
        """Returns the metric of a method at a time, by seed."""
        return numbers_of(self.cells.get((method, time), []), metric.find)


def measured(
    comparison: Comparison, rows: Iterable[Path], stretches: Iterable[Path] = ()
) -> Results:
    """Returns a comparison with the rows and stretches of files; missing files are left out.

    Raises:
      UserError: a file is damaged, or its rows do not compare.
    """
    beside = comparison.path.with_name(COSTS)
    costs = beside if comparison.step_ms == '0' else Path(comparison.step_ms)
    return Results(
        comparison,
        read_rows(rows),
        read_stretches(stretches),
        combined_costs(costs) if costs.is_file() else {},
    )


def quality(results: Results) -> str:
    """Returns all distances by method and time: mean over seeds ± standard error."""
    return _by_time(results, lambda *cell: _mean(results.numbers(*cell)))


def against_baseline(results: Results) -> str:
    """Returns the differences to the baseline by method and time, with p-values.

    At times at which the baseline is never measured, its curve is linear between those before and
    after.
    """
    base = results.comparison.baseline

    def cell(name: str, time: float, metric: Metric) -> str:
        theirs = results.numbers(base, time, metric)
        if time not in results.comparison.seconds_of(base):
            theirs = interpolated(results.cells, base, time, metric)
        return _difference(results.numbers(name, time, metric), theirs, metric)

    return _by_time(results, cell, skip=base)


def against_best(results: Results) -> str:
    """Returns the differences to the best other method by method and time, with p-values."""

    def cell(name: str, time: float, metric: Metric) -> str:
        other = rival(results.cells, name, time, metric)
        if other is None or (name, time) not in results.cells:
            return ''
        mine, theirs = (results.numbers(one, time, metric) for one in (name, other))
        return f'{other}: {_difference(mine, theirs, metric) or "no seed of both"}'

    return _by_time(results, cell)


def sooner(results: Results) -> str:
    """Returns the seconds until a method is as good as the baseline at its end, by seed."""
    base = results.comparison.baseline
    if base not in results.methods:
        return NOTHING
    last = end_of(results.cells, base)
    body = []
    for name in results.methods:
        for metric in results.comparison.distances:
            seconds, bounds, mean = times_to_final(results.cells, name, base, metric)
            by_seed = [_seconds(when, seed in bounds) for seed, when in seconds.items()]
            cells = [name, metric.title, ', '.join(by_seed)]
            for scale in (1, last):  # in seconds, and as a share
                scaled = Mean(mean.value / scale, mean.error / scale, mean.seeds) if mean else None
                cells.append(('≤ ' if bounds else '') + _plus_minus(scaled) if scaled else '')
            body.append(cells)
    return table(('method', 'distance', 's by seed', 'mean, s', f'as a share of {last:g} s'), body)


def at_the_end(results: Results) -> str:
    """Returns a table of all other measurements, at the last time of each method."""
    if not results.cells:
        return NOTHING
    comparison = results.comparison
    ends = {name: comparison.seconds_of(name)[-1] for name in results.methods}

    def has(key: str) -> bool:
        return any(key in row for row in results.rows)

    columns: list[tuple[str, Callable[[list[Row]], str]]] = [
        ('method', lambda rows: rows[0]['case']),
        ('seeds', lambda rows: ', '.join(str(row['seed']) for row in rows)),
    ]
    if len({*ends.values()}) > 1:
        columns.append(('s', lambda rows: f'{rows[0]["seconds"]:g}'))
    columns.append(('sampler', lambda rows: rows[0]['sampler'].replace(':', ' ')))
    if has('average'):
        columns.append(
            ('averages', lambda rows: ', '.join(str(row.get('average', '')) for row in rows))
        )
    others = [metric for metric in comparison.metrics if metric not in comparison.distances]
    others += [Metric('held-out loss', _held_out_loss)] if has('losses') else []
    columns += [(metric.title, functools.partial(_mean_of, metric)) for metric in others]
    columns += [
        ('steps', lambda rows: f'{np.mean([row["step"] for row in rows]):,.0f}'),
        (
            'ms per step',
            lambda rows: f'{np.mean([1e3 * r["training_seconds"] / r["step"] for r in rows]):.2f}',
        ),
    ]
    lasts = [
        (name, max((time for time in results.times if time <= end), default=0.0))
        for name, end in ends.items()
    ]
    body = [
        [cell(results.cells[last]) for _, cell in columns]
        for last in lasts
        if last in results.cells
    ]
    return table([title for title, _ in columns], body)


def missing(results: Results) -> str:
    """Returns the list of cells of the file that lack a row, and of runs that failed."""
    comparison = results.comparison
    done = {(row['case'], row['seed'], row['seconds'], row['sampler']) for row in results.rows}
    gaps: dict[str, dict[int, list[float]]] = {}
    for name, seed in comparison.cells:
        samplers = comparison.samplers_of(name)
        times = [
            time
            for time in comparison.seconds_of(name)
            if any((name, seed, time, sampler) not in done for sampler in samplers)
        ]
        if times:
            gaps.setdefault(name, {})[seed] = times
    whole, lines = [], []
    for name, by_seed in gaps.items():
        full = [s for s, times in by_seed.items() if len(times) == len(comparison.seconds_of(name))]
        if len(full) == sum(cell[0] == name for cell in comparison.cells):
            whole.append(f'`{name}`')
            continue
        seeds = [
            f'seed {seed}' + ('' if seed in full else f' at {", ".join(f"{t:g}" for t in times)} s')
            for seed, times in sorted(by_seed.items())
        ]
        lines.append(f'- `{name}`: {"; ".join(seeds)}')
    if whole:
        lines.append(f'- all of {", ".join(whole)}')
    # After a measurement that failed, the run goes on; its later successes do not undo the failure.
    ended = [row for row in results.stretches if row['outcome'] in (FAILED, STOPPED)]
    last = {(row['case'], row['seed']): row for row in ended}
    lines += [
        f'- failed: `{name}`, seed {seed}: {" ".join(row["reason"].split())}'
        for name, by_seed in gaps.items()
        for seed in sorted(by_seed)
        if (row := last.get((name, seed))) and row['outcome'] == FAILED
    ]
    return '\n'.join(lines) or 'None.'


def step_times(costs: Mapping[str, Row], case: str = 'method') -> str:
    """Returns the milliseconds of a step by method, measured in turns.

    Args:
      costs: method -> its step cost (`jaxunet.compare.step_times`).
      case: heading of the first column.
    """
    if not costs:
        return NOTHING
    body = (
        (
            name,
            f'{cost["ms"]:.2f}',
            '{:.3f} ({:.3f} to {:.3f})'.format(cost['ratio'], *cost['quartiles']),
        )
        for name, cost in costs.items()
    )
    return table((case, 'ms per step', f'of {next(iter(costs))} (quartiles)'), body)


def origin(results: Results) -> str:
    """Returns a sentence with what the rows were measured with: devices, versions, commits."""
    if not results.rows:
        return NOTHING

    def each(find: Callable[[Row], object]) -> str:
        texts = dict.fromkeys(str(find(row)) for row in results.rows)
        return ', '.join(text for text in texts if text != 'None')

    def version(name: str) -> str:
        number = each(lambda row: row['versions'].get(name))
        return f', {name} {number}' if number else ''

    driver = each(lambda row: row.get('driver'))
    features = each(lambda row: row.get('features'))
    return (
        each(lambda row: row['device'])
        + (f' (driver {driver})' if driver else '')
        + ''.join(version(name) for name in ('jax', 'jaxlib', 'python'))
        + f', commit {each(lambda row: row.get("git")) or "unknown"}; '
        + f'{each(lambda row: row["num_samples"])} samples, batches of '
        + f'{each(lambda row: row["batch_size"])}'
        + (f'; features {features}.' if features else '.')
    )


def cost(results: Results) -> str:
    """Returns a sentence with the device time that the comparison has taken."""
    runs: dict[tuple[str, int], float] = {}
    for row in results.rows:
        key = row['case'], row['seed']
        runs[key] = max(runs.get(key, 0.0), row['training_seconds'])
    if not results.stretches:
        known = f'{len(runs)} runs, {sum(runs.values()) / 60:.0f} minutes of training.'
        return f'{known} What they took in all is not recorded.' if runs else NOTHING
    spent = device_seconds(results.stretches)
    parts = ', '.join(f'{name} {seconds / 60:.1f}' for name, seconds in spent.items())
    devices = {row.get('device') for row in results.stretches if row['wall']}
    kind = 'CPU' if devices == {'cpu'} else 'GPU'
    return (
        f'{sum(spent.values()) / 60:.1f} {kind} minutes, repeated work included: {parts}. The '
        f'{len(runs)} runs in the tables have {sum(runs.values()) / 60:.1f} minutes of training.'
    )


def _by_time(results: Results, cell: Callable[[str, float, Metric], str], skip: str = '') -> str:
    """Returns a table with a row for each method and distance, and a column for each time."""
    names = [name for name in results.methods if name != skip]
    if not names:
        return NOTHING

    def line(name: str, metric: Metric) -> list[str]:
        return [name, metric.title, *(cell(name, time, metric) for time in results.times)]

    body = [line(name, metric) for metric in results.comparison.distances for name in names]
    return table(('method', 'distance', *(f'{time:g} s' for time in results.times)), body)


def _held_out_loss(row: Row) -> float:
    return float(row.get('losses', {}).get('held_out_loss', math.nan))


def _mean_of(metric: Metric, rows: Sequence[Row]) -> str:
    return _mean(numbers_of(rows, metric.find))


def _mean(numbers: Mapping[int, float]) -> str:
    """Returns the mean over seeds; '' without any."""
    return _plus_minus(mean_over([*numbers.values()])) if numbers else ''


def _plus_minus(mean: Mean, sign: str = '') -> str:
    """Returns a mean with its standard error, and the number of seeds where it is unusual."""
    text = f'{mean.value:{sign}.4g}'
    if mean.seeds > 1:
        text += f' ± {float(f"{mean.error:.2g}"):g}'  # 100, where .2g alone writes 1e+02
    return text if mean.seeds == SEEDS else f'{text} ({mean.seeds})'


def _difference(first: Mapping[int, float], second: Mapping[int, float], metric: Metric) -> str:
    """Returns a difference with its p-value; bold if the first is ahead (`Paired.ahead`)."""
    pair = paired(first, second, higher=metric.higher_is_better)
    if pair is None:
        return ''
    text = _plus_minus(pair.difference, '+').replace('-', '−')
    if not math.isnan(pair.p):
        text += f', p {pair.p:.2g}'
    return f'**{text}**' if pair.ahead else text


def _seconds(when: float, bound: bool) -> str:
    """Returns a time as text; with ≤ if it is an upper bound."""
    if not math.isfinite(when):
        return 'not reached'
    shown = f'{when:.0f}' if when >= 100 else f'{when:.3g}'
    return f'{"≤ " if bound else ""}{shown}'
