"""Hands what a run logs to each of its loggers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jaxunet.training.loggers.beside_steps import BesideSteps
from jaxunet.training.loggers.installed import make_loggers
from jaxunet.training.loggers.interface import RunStart
from jaxunet.training.loggers.metrics_csv import MetricsCsv


class Logs:
    """The loggers of a run.

    Args:
      measured: columns of values on held-out and on training images, which have a group of their
        own; the others are of the training steps.

    Attributes:
      earlier: the rows of metrics.csv up to the start; [] if it is not one of the loggers.

    Raises:
      UserError: as `make_loggers`, or the system refuses to read metrics.csv.
    """

    def __init__(self, run: RunStart, measured: Collection[str]) -> None:
        self._measured = measured
        self.earlier: list[dict[str, str]] = []
        made = make_loggers(run.config.train.loggers)
        loggers = [
            logger if logger.in_loop else BesideSteps(name, logger) for name, logger in made.items()
        ]
        # A table that cannot be read ends the run, before others begin their logs.
        self._loggers = sorted(loggers, key=lambda logger: isinstance(logger, BesideSteps))
        for logger in self._loggers:
            logger.start(run)
            if isinstance(logger, MetricsCsv):
                self.earlier = logger.earlier

    def row(self, values: Mapping[str, float]) -> None:
        """Adds one logged step, a value per column; optional columns may be missing."""
        curves = {
            f'{"held_out" if name in self._measured else "train"}/{name}': value
            for name, value in values.items()
            if name != 'step'
        }
        self.metrics(int(values['step']), curves)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point to each curve: a value by the name of the curve."""
        for logger in self._loggers:
            logger.metrics(step, values)

    def image(self, step: int, picture: np.ndarray) -> None:
        """Adds a grid of samples: uint8 (height, width, channels)."""
        for logger in self._loggers:
            logger.image(step, 'samples', picture)

    def close(self, evaluations: Sequence[Mapping[str, object]] = ()) -> None:
        """Ends the logs.

        Args:
          evaluations: all rows of evaluation.csv.
        """
        rows = [{name: _number(value) for name, value in row.items()} for row in evaluations]
        for logger in self._loggers:
            if rows:
                logger.table('evaluation', rows)
            logger.close()


def _number(cell: object) -> object:
    """Returns the number that a cell of a table holds, None for an empty one, or its text."""
    try:
        return float(cell) if cell not in ('', None) else None  # type: ignore[arg-type]
    except ValueError:
        return cell
