"""The results of a comparison: the rows of its runs, and the curves of quality over time."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxunet.compare.runner import COSTS, Spec
from jaxunet.compare.worker import ROW_FIELDS, finished
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import check_fields

Values = Float[np.ndarray, ' milestones']


@dataclass(frozen=True)
class Curve:
    """A metric of one run at its milestones; NaN where it was not measured.

    Fields:
      seed: seed of the run.
      seconds: seconds of training.
      steps: training steps.
      values: values of the metric.
    """

    seed: int
    seconds: Values
    steps: Values
    values: Values


def collect(spec: Spec, directory: pathlib.Path) -> list[rows.Row]:
    """Returns all rows by method, seed and milestone.

    Later rows replace earlier ones of the same milestone and metric.

    Raises:
      UserError: the runs were measured in different ways, so they do not compare.
    """
    found: dict[tuple[str, int, int, str], rows.Row] = {}
    for method, seeds in spec.seeds.items():
        for seed in range(seeds):
            for row in finished(directory / 'runs' / f'{method}_seed{seed}', ROW_FIELDS):
                found[method, seed, row['milestone'], row['name']] = row
    for field in ('features', 'reference', 'num_samples', 'sampler', 'evaluations'):
        if len(ways := {str(row[field]): row for row in found.values()}) > 1:
            listed = ', '.join(
                f'{way} ({row["method"]}_seed{row["seed"]})' for way, row in ways.items()
            )
            raise UserError(
                f'{directory}: runs that were measured with different {field} do not compare: '
                f'{listed}; remove some of them'
            )
    order = list(spec.methods)
    return sorted(
        found.values(), key=lambda row: (order.index(row['method']), row['seed'], row['milestone'])
    )


def curves(spec: Spec, all_rows: Sequence[rows.Row], name: str) -> dict[str, list[Curve]]:
    """Returns the curves of one metric, by method; runs without any row are left out."""
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


def mean_curve(found: Sequence[Curve]) -> tuple[Values, Values]:
    """Returns seconds and values, averaged over seeds, at the milestones that all runs have.

    Both arrays are empty without any curve.
    """
    if not found:
        return np.empty(0), np.empty(0)
    known = np.isfinite([c.values for c in found]).all(axis=0)
    seconds = np.mean([c.seconds[known] for c in found], axis=0)
    return seconds, np.mean([c.values[known] for c in found], axis=0)


def time_to(target: float, seconds: Values, values: Values, *, higher: bool) -> float:
    """Returns the seconds after which a curve is first as good as `target`; infinity if never.

    The curve is linear between its points. If it is good enough from its first point on, the
    result is the time of that point: an upper bound.

    Args:
      target: value to reach.
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


def step_costs(directory: pathlib.Path) -> rows.Row:
    """Returns the latest row of step costs (`jaxunet.compare.step_cost`); {} without any.

    Raises:
      UserError: the file cannot be read, or a line is not such a row.
    """
    path = directory / COSTS
    if not path.exists():
        return {}
    fields = {'costs': dict, 'rounds': int, 'steps': int, 'batch': int, 'device': str}

    def check(row: rows.Row, source: str) -> None:
        check_fields(row, fields, source, advice='remove the line')

    return (rows.read(path, check) or [{}])[-1]
