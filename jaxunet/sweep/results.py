"""The results of a sweep: its rows, the best point, and the effect of each option."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from jaxunet.runtime.rows import Row
from jaxunet.sweep.points import DEVICES, Axis, show
from jaxunet.sweep.row import OK


@dataclass(frozen=True)
class Sweep:
    """A sweep with its results so far.

    Fields:
      axes: the axes of the grid.
      rows: results in the order of the grid, without points that have not run yet.
      missing: number of points that have not run yet.
      notes: changes and omissions (`points.expand`).
      command: the part of the command line that all points share: `--config ...` and overrides.
      title: title of the report.
    """

    axes: list[Axis]
    rows: list[Row]
    missing: int
    notes: list[str]
    command: str
    title: str

    @property
    def done(self) -> list[Row]:
        """The rows that have numbers."""
        return [row for row in self.rows if row['status'] == OK]

    @property
    def best(self) -> Row | None:
        """The row with the most images per second; None without any."""
        return max(self.done, key=lambda row: row['images_per_s'], default=None)


@dataclass(frozen=True)
class Effect:
    """The effect of an option: a comparison with the first value of its axis, all else equal.

    Fields:
      axis: the axis.
      value: the option, one of its values.
      ratios: ratios of images/s, one for each setting of the other axes with which both ran.
      memory: ratios of peak memory; empty on devices that do not count it.
    """

    axis: Axis
    value: object
    ratios: list[float]
    memory: list[float]

    @property
    def ratio(self) -> float:
        """Geometric mean of the ratios; NaN without any."""
        return statistics.geometric_mean(self.ratios) if self.ratios else math.nan

    @property
    def efficiency(self) -> float | None:
        """The ratio of images/s divided by that of the numbers of devices; None for other axes."""
        first, devices = self.axis.values[0], self.value
        if self.axis.name != DEVICES or not isinstance(first, int) or not isinstance(devices, int):
            return None
        return self.ratio * first / devices if first and devices else None


def counts_memory(row: Row) -> bool:
    """Returns True if a row has the peak memory of its devices.

    The peak of a process does not count: it includes the compiler, unless the step was cached.
    """
    return bool(row.get('peak_bytes')) and row.get('peak_source') == 'device'


def effects(sweep: Sweep) -> list[Effect]:
    """Returns the effect of every value of every axis, except the first value of each."""
    every = []
    by_point = {_cell(row, sweep.axes): row for row in sweep.done}
    for place, axis in enumerate(sweep.axes):
        for value in axis.values[1:]:
            pairs = []
            for cell, row in by_point.items():
                first = by_point.get((*cell[:place], show(axis.values[0]), *cell[place + 1 :]))
                if cell[place] == show(value) and first is not None:
                    pairs.append((row, first))
            rates = [a['images_per_s'] / b['images_per_s'] for a, b in pairs]
            memory = [
                a['peak_bytes'] / b['peak_bytes']
                for a, b in pairs
                if counts_memory(a) and counts_memory(b)
            ]
            every.append(Effect(axis, value, rates, memory))
    return every


def _cell(row: Row, axes: Sequence[Axis]) -> tuple[str, ...]:
    return tuple(show(row['point'][axis.name]) for axis in axes)
