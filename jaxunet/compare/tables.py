"""The tables of a comparison, as Markdown, from its file and its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from jaxunet.compare.collected import (
    FAILED,
    STOPPED,
    device_seconds,
    read_rows,
    read_stretches,
)
from jaxunet.compare.comparison import Comparison, Metric
from jaxunet.compare.statistics import (
    Find,
    Mean,
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

    @cached_property
    def cells(self) -> dict[tuple[str, float], list[Row]]:
        """The rows of each method's best sampler, by method and seconds."""
        first = self.comparison.distances[0]
        return best_cells(self.rows, first.find, higher=first.higher_is_better)

    @property
    def methods(self) -> list[str]:
        """The measured methods, in the order of the file; others follow."""
        order = dict.fromkeys([*self.comparison.methods, *(name for name, _ in self.cells)])
        return [name for name in order if any(name == case for case, _ in self.cells)]

    @property
    def times(self) -> list[float]:
        """The measured times."""
        return sorted({time for _, time in self.cells})


def measured(
    comparison: Comparison, rows: Iterable[Path], stretches: Iterable[Path] = ()
) -> Results:
    """Returns a comparison with the rows and stretches of files; missing files are left out.

    Raises:
      UserError: a file is damaged, or its rows do not compare.
    """
    costs = (
        comparison.path.with_name(COSTS) if comparison.step_ms == '0' else Path(comparison.step_ms)
    )
    return Results(
        comparison,
        read_rows(rows),
        read_stretches(stretches),
        combined_costs(costs) if costs.is_file() else {},
    )


def quality(results: Results) -> str:
    """Returns all distances by method and time: mean over seeds ± standard error."""
    return _by_time(
        results, lambda name, time, metric: _mean(results.cells.get((name, time), []), metric.find)
    )


def against_baseline(results: Results) -> str:
    """Returns the differences to the baseline by method and time, with p-values.

    At times at which the baseline is never measured, its curve is linear between those before and
    after.
    """
    base = results.comparison.baseline

    def cell(name: str, time: float, metric: Metric) -> str:
        theirs = _numbers(results, base, time, metric)
        if time not in results.comparison.seconds_of(base):
            theirs = interpolated(results.cells, base, time, metric.find)
        return _difference(_numbers(results, name, time, metric), theirs, metric)

    return _by_time(results, cell, skip=base)


def against_best(results: Results) -> str:
    """Returns the differences to the best other method by method and time, with p-values."""

    def cell(name: str, time: float, metric: Metric) -> str:
        other = rival(results.cells, name, time, metric.find, higher=metric.higher_is_better)
        if other is None or (name, time) not in results.cells:
            return ''
        mine, theirs = (_numbers(results, one, time, metric) for one in (name, other))
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
            higher = metric.higher_is_better
            found = times_to_final(results.cells, name, base, metric.find, higher=higher)
            shown = [_seconds(when, seed in found.bounds) for seed, when in found.seconds.items()]
            mean, bound = found.mean, '≤ ' if found.bounds else ''
            body.append(
                (
                    name,
                    metric.title,
                    ', '.join(shown),
                    bound + _plus_minus(mean) if mean else '',
                    bound + _plus_minus(_scaled(mean, 1 / last)) if mean else '',
                )
            )
    return table(('method', 'distance', 's by seed', 'mean, s', f'as a share of {last:g} s'), body)


def at_the_end(results: Results) -> str:
    """Returns a table of all other measurements, at the last time of each method."""
    if not results.cells:
        return NOTHING
    distances = results.comparison.distances
    others = [metric for metric in results.comparison.metrics if metric not in distances]
    ends = {name: results.comparison.seconds_of(name)[-1] for name in results.methods}
    apart = len(set(ends.values())) > 1
    averages, losses = (any(key in row for row in results.rows) for key in ('average', 'losses'))
    head = [
        'method',
        'seeds',
        *(['s'] if apart else []),
        'sampler',
        *(['averages'] if averages else []),
        *(metric.title for metric in others),
        *(['held-out loss'] if losses else []),
        'steps',
        'ms per step',
    ]
    body = []
    for name in results.methods:
        last = max((time for time in results.times if time <= ends[name]), default=0.0)
        rows = results.cells.get((name, last), [])
        if not rows:
            continue
        ms = sum(1e3 * row['training_seconds'] / row['step'] for row in rows) / len(rows)
        cells = [
            name,
            ', '.join(str(row['seed']) for row in rows),
            *([f'{last:g}'] if apart else []),
            rows[0]['sampler'].replace(':', ' '),
            *([', '.join(str(row.get('average', '')) for row in rows)] if averages else []),
            *(_mean(rows, metric.find) for metric in others),
            *([_mean(rows, _held_out_loss)] if losses else []),
            f'{sum(row["step"] for row in rows) / len(rows):,.0f}',
            f'{ms:.2f}',
        ]
        body.append(cells)
    return table(head, body)


def missing(results: Results) -> str:
    """Returns the list of cells of the file that lack a row, and of runs that failed."""
    drawn: dict[tuple[str, int, float], set[str]] = {}
    for row in results.rows:
        drawn.setdefault((row['case'], row['seed'], row['seconds']), set()).add(row['sampler'])
    gaps: dict[str, dict[int, list[float]]] = {}
    for name, seed in results.comparison.cells:
        wanted = set(results.comparison.samplers_of(name))
        found = {
            time: drawn.get((name, seed, time), set())
            for time in results.comparison.seconds_of(name)
        }
        times = [time for time, samplers in found.items() if not (samplers and wanted <= samplers)]
        if times:
            gaps.setdefault(name, {})[seed] = times
    every = {
        name: sum(cell[0] == name for cell in results.comparison.cells)
        for name in results.comparison.methods
    }
    whole, lines = [], []
    for name, by_seed in gaps.items():
        every_time = len(results.comparison.seconds_of(name))
        full = [seed for seed, times in by_seed.items() if len(times) == every_time]
        if len(full) == every[name]:
            whole.append(f'`{name}`')
            continue
        shown = [
            f'seed {seed}' + ('' if seed in full else f' at {", ".join(f"{t:g}" for t in times)} s')
            for seed, times in sorted(by_seed.items())
        ]
        lines.append(f'- `{name}`: {"; ".join(shown)}')
    if whole:
        lines.append(f'- all of {", ".join(whole)}')
    lines += [f'- failed: {text}' for text in _failures(results, gaps)]
    return '\n'.join(lines) or 'None.'


def _failures(results: Results, gaps: dict[str, dict[int, list[float]]]) -> list[str]:
    """Returns why cells that are missing failed when they were last tried."""
    # After a measurement that failed, the run goes on; its later successes do not undo the failure.
    ended = [row for row in results.stretches if row['outcome'] in (FAILED, STOPPED)]
    last = {(row['case'], row['seed']): row for row in ended}
    reasons = {run: row['reason'] for run, row in last.items() if row['outcome'] == FAILED}
    return [
        f'`{name}`, seed {seed}: ' + ' '.join(reasons[name, seed].split())
        for name, by_seed in gaps.items()
        for seed in sorted(by_seed)
        if (name, seed) in reasons
    ]


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
        found = dict.fromkeys(str(find(row)) for row in results.rows)
        return ', '.join(text for text in found if text != 'None')

    def version(name: str) -> str:
        found = each(lambda row: row['versions'].get(name))
        return f', {name} {found}' if found else ''

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
    kind = (
        'CPU'
        if {row.get('device') for row in results.stretches if row['wall']} == {'cpu'}
        else 'GPU'
    )
    return (
        f'{sum(spent.values()) / 60:.1f} {kind} minutes, repeated work included: {parts}. The '
        f'{len(runs)} runs in the tables have {sum(runs.values()) / 60:.1f} minutes of training.'
    )


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ['---'] * len(head), *body]
    return '\n'.join(f'| {" | ".join(cells)} |' for cells in lines)


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


def _numbers(results: Results, name: str, time: float, metric: Metric) -> dict[int, float]:
    """Returns the metric of a method at a time, by seed."""
    return numbers_of(results.cells.get((name, time), []), metric.find)


def _mean(rows: Sequence[Row], find: Find) -> str:
    numbers = list(numbers_of(rows, find).values())
    return _plus_minus(mean_over(numbers)) if numbers else ''


def _scaled(mean: Mean, factor: float) -> Mean:
    return Mean(mean.value * factor, mean.error * factor, mean.seeds)


def _plus_minus(mean: Mean, sign: str = '') -> str:
    """Returns a mean with its standard error, and the number of seeds where it is unusual."""
    text = f'{mean.value:{sign}.4g}'
    if mean.seeds > 1:
        text += f' ± {float(f"{mean.error:.2g}"):g}'  # 100, where .2g alone writes 1e+02
    return text if mean.seeds == SEEDS else f'{text} ({mean.seeds})'


def _difference(first: Mapping[int, float], second: Mapping[int, float], metric: Metric) -> str:
    """Returns a difference with its p-value; bold if the first is ahead (`Paired.ahead`)."""
    found = paired(first, second, higher=metric.higher_is_better)
    if found is None:
        return ''
    text = _plus_minus(found.difference, '+').replace('-', '−')
    if not math.isnan(found.p):
        text += f', p {found.p:.2g}'
    return f'**{text}**' if found.ahead else text


def _seconds(when: float, bound: bool) -> str:
    """Returns a time as text; with ≤ if it is an upper bound."""
    if not math.isfinite(when):
        return 'not reached'
    shown = f'{when:.0f}' if when >= 100 else f'{when:.3g}'
    return f'{"≤ " if bound else ""}{shown}'
