"""Statistics of a comparison over seeds: means, paired tests, and the time to a quality.

They read rows of `jaxunet.compare.queue`. A cell is a method at one time, with the rows of its
seeds. `docs/results/methods/PROTOCOL.md` says why these statistics were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import special

from jaxunet.runtime.rows import Row

LEVEL = 0.05  # significance level: the p-value of a difference must be below it
Cells = Mapping[tuple[str, float], list[Row]]  # (method, seconds) -> rows in the order of seeds
Points = Float[np.ndarray, ' points']


class Metric(NamedTuple):
    """A metric of samples.

    Attributes:
      title: its name in reports.
      find: reads it from a row; NaN if the row lacks it.
      higher_is_better: True if higher numbers are better.
    """

    title: str
    find: Callable[[Row], float]
    higher_is_better: bool = False


class Mean(NamedTuple):
    """A mean over seeds.

    Attributes:
      error: standard error, s/√n; NaN with one seed.
      seeds: number of seeds.
    """

    value: float
    error: float
    seeds: int


class Paired(NamedTuple):
    """The difference of two methods over the seeds that both have.

    Attributes:
      difference: the mean of the differences; below 0 if the first is smaller.
      p: two-sided p-value of the paired t-test; NaN with one seed.
      apart: True if the error bars of the two means do not overlap.
      better: True if the mean of the first is better.
    """

    difference: Mean
    p: float
    apart: bool
    better: bool

    @property
    def ahead(self) -> bool:
        """True if the first is better, `p` is below `LEVEL`, and the error bars are apart."""
        return self.better and self.p < LEVEL and self.apart


class Reached(NamedTuple):
    """The times at which a method is as good as the baseline at the baseline's end.

    Attributes:
      seconds: time by seed; infinity if the seed never gets there.
      bounds: seeds whose curve is good enough from its first point on, so that their time is an
        upper bound.
      mean: mean over seeds; None if a seed does not reach the quality, or there are no seeds.
    """

    seconds: Mapping[int, float]
    bounds: frozenset[int]
    mean: Mean | None


def best_cells(rows: Iterable[Row], metric: Metric) -> dict[tuple[str, float], list[Row]]:
    """Returns the rows of the best sampler by (method, seconds), in the order of their seeds.

    The best sampler has the best mean among the samplers with the most seeds.
    """
    by_sampler: dict[tuple[str, float], dict[str, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: row['seed']):
        cell = by_sampler.setdefault((row['case'], row['seconds']), {})
        cell.setdefault(row['sampler'], []).append(row)

    def order(rows: list[Row]) -> float:
        mean = _mean(rows, metric) * (-1 if metric.higher_is_better else 1)
        return math.inf if math.isnan(mean) else mean

    def best(samplers: dict[str, list[Row]]) -> list[Row]:
        most = max(map(len, samplers.values()))
        return min((rows for rows in samplers.values() if len(rows) == most), key=order)

    return {key: best(samplers) for key, samplers in by_sampler.items()}


def mean_over(values: Sequence[float]) -> Mean:
    """Returns the mean of one or more values with its standard error."""
    count = len(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return Mean(float(np.mean(values)), error, count)


def numbers_of(rows: Iterable[Row], find: Callable[[Row], float]) -> dict[int, float]:
    """Returns the number of each row by its seed; rows without the number are left out."""
    numbers = {row['seed']: find(row) for row in rows}
    return {seed: number for seed, number in numbers.items() if not math.isnan(number)}


def paired(
    first: Mapping[int, float], second: Mapping[int, float], *, higher: bool = False
) -> Paired | None:
    """Compares numbers of two methods, by seed, over the seeds that both have.

    Args:
      higher: True if higher numbers are better.

    Returns:
      None if they have no seed in common.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    ours, theirs = (mean_over([values[seed] for seed in seeds]) for values in (first, second))
    difference = mean_over([first[seed] - second[seed] for seed in seeds])
    better = difference.value > 0 if higher else difference.value < 0
    if len(seeds) == 1:
        return Paired(difference, math.nan, False, better)
    if difference.error == 0:
        p = 0.0 if difference.value else 1.0
    else:
        t = abs(difference.value) / difference.error
        p = float(2 * special.stdtr(len(seeds) - 1, -t))
    return Paired(difference, p, abs(difference.value) > ours.error + theirs.error, better)


def rival(cells: Cells, case: str, seconds: float, metric: Metric) -> str | None:
    """Returns the method other than `case` with the best mean at this time; None if alone."""
    means = {
        name: mean
        for (name, time), rows in cells.items()
        if time == seconds and name != case and not math.isnan(mean := _mean(rows, metric))
    }
    best = max if metric.higher_is_better else min
    return best(means, key=lambda name: means[name], default=None)


def _mean(rows: Sequence[Row], metric: Metric) -> float:
    return float(np.mean([metric.find(row) for row in rows]))


def time_to(target: float, seconds: Points, values: Points, *, higher: bool) -> float:
    """Returns the seconds after which a curve is first as good as `target`; infinity if never.

    The curve is linear between its points. If it is good enough from its first point on, the
    result is the time of that point: an upper bound.

    Args:
      seconds: times of the points, increasing.
      values: values of the points.
      higher: True if higher values are better.
    """
    good = values >= target if higher else values <= target
    if not good.any():
        return math.inf
    i = int(np.argmax(good))
    if i == 0 or not np.isfinite(values[i - 1]):
        return float(seconds[i])
    share = (target - values[i - 1]) / (values[i] - values[i - 1])
    return float(seconds[i - 1] + share * (seconds[i] - seconds[i - 1]))


def end_of(cells: Cells, case: str) -> float:
    """Returns the last time in seconds at which a method was measured; 0 if there is none."""
    return max((time for name, time in cells if name == case), default=0.0)


def interpolated(cells: Cells, case: str, seconds: float, metric: Metric) -> dict[int, float]:
    """Returns the metric of a method at a time by seed, on curves that are linear between times.

    Seeds whose curves begin later or end before are left out.
    """
    return {
        seed: float(np.interp(seconds, *np.array(curve).T))
        for seed, curve in _curves(cells, case, metric).items()
        if curve[0][0] <= seconds <= curve[-1][0]
    }


def _curves(cells: Cells, case: str, metric: Metric) -> dict[int, list[tuple[float, float]]]:
    """Returns the points (seconds, number) of a method by seed."""
    curves: dict[int, list[tuple[float, float]]] = {}
    for name, time in sorted(cells):
        rows = cells[name, time] if name == case else []
        for seed, number in numbers_of(rows, metric.find).items():
            curves.setdefault(seed, []).append((time, number))
    return curves


def times_to_final(cells: Cells, case: str, baseline: str, metric: Metric) -> Reached:
    """Returns when `case` gets as good as the baseline with the same seed is at its end.

    Curves are linear between the measured times.
    """
    targets = numbers_of(cells.get((baseline, end_of(cells, baseline)), []), metric.find)
    times, bounds = {}, set()
    for seed, curve in sorted(_curves(cells, case, metric).items()):
        if seed in targets:
            higher = metric.higher_is_better
            times[seed] = time_to(targets[seed], *np.array(curve).T, higher=higher)
            if times[seed] == curve[0][0] and case != baseline:
                bounds.add(seed)
    known = bool(times) and all(map(math.isfinite, times.values()))
    return Reached(times, frozenset(bounds), mean_over([*times.values()]) if known else None)
