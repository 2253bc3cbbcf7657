"""Writes `WORKDIR/metrics.csv`."""

from __future__ import annotations

from collections.abc import Mapping

from jaxunet.training.loggers.interface import Logger, RunStart
from jaxunet.training.logs import FILE, StepTable

GROUPS = ('train', 'held_out')  # of the values that are its columns


class MetricsCsv(Logger):
    """A table with a row for each logged step; an error of writing is only a warning.

    Rows of steps after the start are dropped: a run that was killed after its last checkpoint has
    logged steps that it will run again.

    Attributes:
      earlier: the rows up to the start.
    """

    in_loop = True
    earlier: list[dict[str, str]]

    def start(self, run: RunStart) -> None:
        """Opens the table; raises `RefusedError` if the system refuses to read the file."""
        self._table = StepTable(
            run.workdir / FILE, ('step', *run.columns), run.step, optional=run.optional
        )
        self.earlier = self._table.earlier

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a row."""
        parts = {name.partition('/')[::2]: value for name, value in values.items()}
        row = {column: value for (group, column), value in parts.items() if group in GROUPS}
        if row:
            self._table.add([{'step': step, **row}])

    def close(self) -> None:
        """Tries once more to write the rows that could not be written."""
        self._table.close()
