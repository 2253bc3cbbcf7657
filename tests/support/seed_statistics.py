"""Means, standard errors and paired tests over seeds, of rows of `jaxunet.compare.queue`."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from jaxunet.compare.results import time_to
from jaxunet.runtime.rows import Row

KEYS = ('data', 'case', 'seed', 'seconds', 'sampler')  # identify a measurement
LEVEL = 0.05  # below which the p of a difference makes one ahead of the other
Find = Callable[[Row], float]
Cells = dict[tuple[str, float], list[Row]]


class Mean(NamedTuple):
    """A mean over seeds.

    Attributes:
      error: standard error, s/√n; NaN with one seed.
      count: number of seeds.
    """

    value: float
    error: float
    count: int


class Paired(NamedTuple):
    """The difference of two methods over the seeds that both have.

    Attributes:
      difference: the mean of the differences; below 0 if the first is smaller.
      p: two-sided, of the paired t-test; NaN with one seed.
      apart: the means' error bars do not overlap.
    """

    difference: Mean
    p: float
    apart: bool

    @property
    def ahead(self) -> bool:
        """True if the first is smaller by the test and by its error bar."""
        return self.difference.value < 0 and self.p < LEVEL and self.apart


def read(paths: Iterable[pathlib.Path]) -> list[Row]:
    """The rows of files, of which a later one replaces an earlier one of the same measurement.

    Raises:
      ValueError: rows of several features, several step times of one case, or a row without:
        they do not compare.
    """
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    found = {tuple(row[key] for key in KEYS): row for row in map(json.loads, lines)}
    features = {row.get('features') for row in found.values()}
    if len(features) > 1:
        raise ValueError(f'rows of several features do not compare: {sorted(map(str, features))}')
    times: dict[str, float] = {}
    for row in found.values():
        if 'step_ms' not in row:
            raise ValueError(f'{row["case"]}: a row whose time was measured, not counted by steps')
        if times.setdefault(row['case'], row['step_ms']) != row['step_ms']:
            raise ValueError(
                f'{row["case"]}: a step counts {times[row["case"]]} ms in one row and '
                f'{row["step_ms"]} ms in another: they do not compare'
            )
    return list(found.values())


def value(metric: str, reference: str = 'train') -> Find:
    """Reads a metric of a row; NaN where it was not measured."""
    return lambda row: row['values'].get(reference, {}).get(metric, math.nan)


def cells(rows: Iterable[Row]) -> Cells:
    """The rows of the best sampler by (method, seconds), in the order of their seeds.

    It has the smallest mean Fréchet distance among the samplers that have most seeds.
    """
    by_sampler: dict[tuple[str, float], dict[str, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: row['seed']):
        cell = by_sampler.setdefault((row['case'], row['seconds']), {})
        cell.setdefault(row['sampler'], []).append(row)
    find = value('fid')
    found = {}
    for key, samplers in by_sampler.items():
        most = max(map(len, samplers.values()))
        full = [group for group in samplers.values() if len(group) == most]
        found[key] = min(full, key=lambda group: float(np.mean([find(row) for row in group])))
    return found


def mean_over(values: Sequence[float]) -> Mean:
    """The mean of one or more values with its standard error."""
    count = len(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return Mean(float(np.mean(values)), error, count)


def paired(mine: Sequence[Row], other: Sequence[Row], find: Find) -> Paired | None:
    """Compares two cells over the seeds that both have; None without any."""
    first, second = ({row['seed']: find(row) for row in rows} for rows in (mine, other))
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    ours, theirs = (mean_over([values[seed] for seed in seeds]) for values in (first, second))
    difference = mean_over([first[seed] - second[seed] for seed in seeds])
    if len(seeds) == 1:
        return Paired(difference, math.nan, False)
    if difference.error == 0:
        p = 0.0 if difference.value else 1.0
    else:
        t = abs(difference.value) / difference.error
        p = float(2 * stats.t.sf(t, len(seeds) - 1))
    return Paired(difference, p, abs(difference.value) > ours.error + theirs.error)


def rival(found: Cells, case: str, seconds: float, find: Find) -> str | None:
    """The method with the smallest mean at this time, other than `case`; None without any."""
    means = {
        name: float(np.mean([find(row) for row in rows]))
        for (name, time), rows in found.items()
        if time == seconds and name != case
    }
    return min(means, key=lambda name: means[name], default=None)


def times_to_final(found: Cells, case: str, baseline: str, find: Find) -> dict[int, float]:
    """Seconds by seed until `case` is as good as the baseline with that seed at its last time.

    Between the measured times the curves are straight; infinity if never.
    """
    last = max((time for name, time in found if name == baseline), default=0.0)
    targets = {row['seed']: find(row) for row in found.get((baseline, last), [])}
    curves: Mapping[int, list[tuple[float, float]]] = {seed: [] for seed in targets}
    for name, time in sorted(found):
        for row in found[name, time] if name == case else []:
            if row['seed'] in curves:
                curves[row['seed']].append((time, find(row)))
    return {
        seed: time_to(targets[seed], *np.array(curve).T, higher=False)
        for seed, curve in curves.items()
        if curve
    }
