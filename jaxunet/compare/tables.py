"""The tables of a comparison, as Markdown, from its file and its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jaxunet.compare.collected import (
    FAILED,
    STOPPED,
    device_seconds,
    read_rows,
    read_stretches,
)
from jaxunet.compare.results import combined_costs
from jaxunet.compare.statistics import (
    Find,
    Mean,
    Paired,
    best_cells,
    end_of,
    mean_over,
    numbers_of,
    paired,
    rival,
    times_to_final,
)
from jaxunet.compare.study import Metric, Study
from jaxunet.runtime.rows import Row

NOTHING = 'Nothing is measured yet.'
SEEDS = 3  # a mean over another number shows it in brackets


@dataclass(frozen=True)
class Measured:
    """A comparison and its measurements so far.

    Fields:
      rows: measurements, as `jaxunet.compare.collected` reads them.
      stretches: the pieces of work that made them.
    """

    study: Study
    rows: Sequence[Row]
    stretches: Sequence[Row] = ()

    @cached_property
    def cells(self) -> dict[tuple[str, float], list[Row]]:
        """The rows of each method's best sampler, by method and seconds."""
        return best_cells(self.rows, self.study.distances[0].find)

    @property
    def methods(self) -> list[str]:
        """The measured methods, in the order of the file; others follow."""
        order = dict.fromkeys([*self.study.methods, *(name for name, _ in self.cells)])
        return [name for name in order if any(name == case for case, _ in self.cells)]

    @property
    def times(self) -> list[float]:
        """The measured times."""
        return sorted({time for _, time in self.cells})


def measured(study: Study, rows: Iterable[Path], stretches: Iterable[Path] = ()) -> Measured:
    """Returns a comparison with the rows and stretches of files; missing files are left out.

    Raises:
      UserError: a file is damaged, or its rows do not compare.
    """
    return Measured(study, read_rows(rows), read_stretches(stretches))


def quality(m: Measured) -> str:
    """Returns all distances by method and time: mean over seeds ± standard error."""
    return _by_time(m, lambda name, time, find: _mean(m.cells.get((name, time), []), find))


def against_baseline(m: Measured) -> str:
    """Returns the differences to the baseline by method and time, with p-values."""

    def cell(name: str, time: float, find: Find) -> str:
        mine, base = m.cells.get((name, time), []), m.cells.get((m.study.baseline, time), [])
        return _difference(paired(mine, base, find))

    return _by_time(m, cell, skip=m.study.baseline)


def against_best(m: Measured) -> str:
    """Returns the differences to the best other method by method and time, with p-values."""

    def cell(name: str, time: float, find: Find) -> str:
        other, mine = rival(m.cells, name, time, find), m.cells.get((name, time), [])
        if other is None or not mine:
            return ''
        shown = _difference(paired(mine, m.cells[other, time], find))
        return f'{other}: {shown}' if shown else f'{other}: no seed of both'

    return _by_time(m, cell)


def sooner(m: Measured) -> str:
    """Returns the seconds until a method is as good as the baseline at its end, by seed."""
    base = m.study.baseline
    if base not in m.methods:
        return NOTHING
    last = end_of(m.cells, base)
    body = []
    for name in m.methods:
        for metric in m.study.distances:
            found = times_to_final(m.cells, name, base, metric.find)
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


def at_the_end(m: Measured) -> str:
    """Returns a table of all other measurements, at the last time."""
    if not m.cells:
        return NOTHING
    last, distances = m.times[-1], m.study.distances
    others = [metric for metric in m.study.metrics if metric not in distances]
    losses = any('losses' in row for row in m.rows)
    body = []
    for name in m.methods:
        rows = m.cells.get((name, last), [])
        if not rows:
            continue
        cells = [
            name,
            ', '.join(str(row['seed']) for row in rows),
            rows[0]['sampler'].replace(':', ' '),
            ', '.join(str(row.get('average', '')) for row in rows),
            *(_mean(rows, metric.find) for metric in others),
        ]
        if losses:
            cells.append(_mean(rows, _held_out_loss))
        cells += [
            f'{sum(row["step"] for row in rows) / len(rows):,.0f}',
            f'{1e3 * sum(row["training_seconds"] / row["step"] for row in rows) / len(rows):.2f}',
        ]
        body.append(cells)
    head = ['method', 'seeds', 'sampler', 'averages', *(metric.title for metric in others)]
    return table([*head, *(['held-out loss'] if losses else []), 'steps', 'ms per step'], body)


def missing(m: Measured) -> str:
    """Returns the list of cells of the file that lack a row, and of runs that failed."""
    drawn: dict[tuple[str, int, float], set[str]] = {}
    for row in m.rows:
        drawn.setdefault((row['case'], row['seed'], row['seconds']), set()).add(row['sampler'])
    gaps: dict[str, dict[int, list[float]]] = {}
    for name, seed in m.study.cells:
        wanted = set(m.study.samplers_of(name))
        times = [t for t in m.study.seconds if not wanted <= drawn.get((name, seed, t), set())]
        if times:
            gaps.setdefault(name, {})[seed] = times
    every = {name: sum(cell[0] == name for cell in m.study.cells) for name in m.study.methods}
    whole, lines = [], []
    for name, by_seed in gaps.items():
        full = [seed for seed, times in by_seed.items() if len(times) == len(m.study.seconds)]
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
    lines += [f'- failed: {text}' for text in _failures(m, gaps)]
    return '\n'.join(lines) or 'None.'


def _failures(m: Measured, gaps: dict[str, dict[int, list[float]]]) -> list[str]:
    """Returns why cells that are missing failed when they were last tried."""
    # After a measurement that failed, the run goes on; its later successes do not undo the failure.
    ended = [row for row in m.stretches if row['outcome'] in (FAILED, STOPPED)]
    last = {(row['case'], row['seed']): row for row in ended}
    return [
        f'`{name}`, seed {seed}: ' + ' '.join(last[name, seed]['reason'].split())
        for name, by_seed in gaps.items()
        for seed in sorted(by_seed)
        if (name, seed) in last and last[name, seed]['outcome'] == FAILED
    ]


def step_times(path: Path, case: str = 'method') -> str:
    """Returns the milliseconds of a step by method, measured in turns.

    Args:
      path: rows of `jaxunet.compare.step_cost`; they may be missing.
      case: heading of the first column.
    """
    if not path.is_file():
        return NOTHING
    costs = combined_costs(path)
    body = (
        (
            name,
            f'{cost["ms"]:.2f}',
            '{:.3f} ({:.3f} to {:.3f})'.format(cost['ratio'], *cost['quartiles']),
        )
        for name, cost in costs.items()
    )
    return table((case, 'ms per step', f'of {next(iter(costs))} (quartiles)'), body)


def origin(m: Measured) -> str:
    """Returns a sentence with what the rows were measured with: devices, versions, commits."""
    if not m.rows:
        return NOTHING

    def each(find: Callable[[Row], object]) -> str:
        found = dict.fromkeys(str(find(row)) for row in m.rows)
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


def cost(m: Measured) -> str:
    """Returns a sentence with the device time that the comparison has taken."""
    runs: dict[tuple[str, int], float] = {}
    for row in m.rows:
        key = row['case'], row['seed']
        runs[key] = max(runs.get(key, 0.0), row['training_seconds'])
    if not m.stretches:
        known = f'{len(runs)} runs, {sum(runs.values()) / 60:.0f} minutes of training.'
        return f'{known} What they took in all is not recorded.' if runs else NOTHING
    spent = device_seconds(m.stretches)
    parts = ', '.join(f'{name} {seconds / 60:.1f}' for name, seconds in spent.items())
    kind = 'CPU' if {row.get('device') for row in m.stretches} == {'cpu'} else 'GPU'
    return (
        f'{sum(spent.values()) / 60:.1f} {kind} minutes, repeated work included: {parts}. The '
        f'{len(runs)} runs in the tables have {sum(runs.values()) / 60:.1f} minutes of training.'
    )


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ['---'] * len(head), *body]
    return '\n'.join(f'| {" | ".join(cells)} |' for cells in lines)


def _by_time(m: Measured, cell: Callable[[str, float, Find], str], skip: str = '') -> str:
    """Returns a table with a row for each method and distance, and a column for each time."""
    names = [name for name in m.methods if name != skip]
    if not names:
        return NOTHING

    def line(name: str, metric: Metric) -> list[str]:
        return [name, metric.title, *(cell(name, time, metric.find) for time in m.times)]

    body = [line(name, metric) for metric in m.study.distances for name in names]
    return table(('method', 'distance', *(f'{time:g} s' for time in m.times)), body)


def _held_out_loss(row: Row) -> float:
    return float(row.get('losses', {}).get('held_out_loss', math.nan))


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


def _difference(found: Paired | None) -> str:
    """Returns a difference with its p-value; bold if the first is ahead (`Paired.ahead`)."""
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
