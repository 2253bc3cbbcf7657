"""Logs to MLflow (the extra `mlflow`), as its environment variables say."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

import numpy as np
from absl import logging

from jaxunet.training.loggers.interface import Logger, RunStart, imported

FILE = 'mlflow_id.txt'  # in the workdir
MAX_PARAM = 500  # characters of a parameter that every store takes


class MlflowRun(Logger):
    """A run of MLflow.

    A run that resumes continues it. MLflow's parameters cannot change, so they are the config that
    the run began with; its artifact config.json is the newest.

    Raises:
      UserError: mlflow is not installed.
    """

    def __init__(self) -> None:
        self._mlflow = imported('mlflow')

    def start(self, run: RunStart) -> None:
        """Begins the run, or continues the one whose id the workdir holds."""
        known = run.kept_name(FILE)
        active = self._mlflow.start_run(
            run_id=known or None, run_name=None if known else run.workdir.resolve().name
        )
        if not known:
            run.keep_name(FILE, active.info.run_id)
            texts = {name: str(value)[:MAX_PARAM] for name, value in run.fields.items()}
            self._mlflow.log_params(texts)
        self._mlflow.log_dict(run.fields, 'config.json')
        logging.info('mlflow: run %s in %s', active.info.run_id, self._mlflow.get_tracking_uri())

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name: float(x) for name, x in values.items()}, step=step)

    def image(self, step: int, name: str, picture: np.ndarray) -> None:
        self._mlflow.log_image(picture, key=name, step=step, synchronous=True)

    def table(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Writes a table, as the artifact NAME.csv."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        self._mlflow.log_text(text.getvalue(), f'{name}.csv')

    def close(self) -> None:
        """Ends the run, or this part of it."""
        self._mlflow.end_run()
