"""Finds the loggers that `train.loggers` names.

A logger of another package is a Python entry point of the group `jaxunet.loggers` that names a
subclass of `Logger`:

    [project.entry-points."jaxunet.loggers"]
    mine = "my_package:MyLogger"
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from importlib.metadata import EntryPoint

from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.untrusted import one_line
from jaxunet.training.loggers.interface import Logger

GROUP = 'jaxunet.loggers'
HERE = 'jaxunet.training.loggers'
# Known without an installation, too, as of a checkout that is only on the path.
SHIPPED = {
    'csv': f'{HERE}.metrics_csv:MetricsCsv',
    'tensorboard': f'{HERE}.tensorboard:TensorBoard',
    'wandb': f'{HERE}.wandb_run:WandbRun',
    'mlflow': f'{HERE}.mlflow_run:MlflowRun',
}


def make_loggers(names: Sequence[str]) -> dict[str, Logger]:
    """Returns the loggers of these names.

    Raises:
      UserError: a logger is unknown, not installed or not usable here.
    """
    points = {name: EntryPoint(name, value, GROUP) for name, value in SHIPPED.items()}
    for point in importlib.metadata.entry_points(group=GROUP):
        points.setdefault(point.name, point)
    return {name: _made(name, points) for name in names}


def _made(name: str, points: dict[str, EntryPoint]) -> Logger:
    if name not in points:
        raise UserError(
            f'train.loggers: expected some of {", ".join(points)}, '
            f'found {name!r}{near_misses(name, points)}'
        )
    try:
        logger = points[name].load()()
    except UserError as error:
        raise UserError(f'train.loggers: {name}: {error}') from None
    except (Exception, SystemExit) as error:
        raise UserError(
            f'train.loggers: {name}: {points[name].value}: {type(error).__name__}: '
            f'{one_line(error)}; mend or update its package, or leave it out'
        ) from error
    if not isinstance(logger, Logger):
        raise UserError(
            f'train.loggers: {name}: {points[name].value}: expected a subclass of '
            f'{Logger.__module__}.Logger, found {one_line(repr(type(logger)))}'
        )
    return logger
