"""Logs to Weights & Biases (the extra `wandb`), as its environment variables say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
from absl import logging

from jaxunet.runtime.errors import UserError
from jaxunet.training.loggers.interface import Logger, RunStart, imported

FILE = 'wandb_id.txt'  # in the workdir


class WandbRun(Logger):
    """A run of Weights & Biases.

    A run that resumes continues it. The steps that it repeats are logged again: the x axis is the
    value `step`, as wandb's own counter would refuse to go back.

    Raises:
      UserError: wandb is not installed, or not logged in.
    """

    def __init__(self) -> None:
        self._wandb = imported('wandb')
        online = self._wandb.setup().settings.mode == 'online'
        if online and not self._wandb.login(prompt=False, verify=False):
            raise UserError(
                'no API key; run "wandb login", set WANDB_API_KEY, or log to files with '
                'WANDB_MODE=offline'
            )

    def start(self, run: RunStart) -> None:
        """Begins the run, or continues the one whose id the workdir holds."""
        known = run.kept_name(FILE)
        self._run = self._wandb.init(
            project=os.environ.get('WANDB_PROJECT') or 'jaxunet',
            dir=run.workdir,
            id=known or os.environ.get('WANDB_RUN_ID'),
            name=os.environ.get('WANDB_NAME') or run.workdir.resolve().name,
            config=run.fields,
            allow_val_change=True,
            resume='allow',
            reinit='create_new',
            settings=self._wandb.Settings(console='off', silent=True),
        )
        if not known:
            run.keep_name(FILE, self._run.id)
        self._run.define_metric('step')
        self._run.define_metric('*', step_metric='step')
        logging.info('wandb: %s', self._run.dir if self._run.offline else self._run.url)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({'step': step, **values})

    def image(self, step: int, name: str, picture: np.ndarray) -> None:
        self._run.log({'step': step, name: self._wandb.Image(picture)})

    def table(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        columns = list(rows[0])
        data = [[row[column] for column in columns] for row in rows]
        table = self._wandb.Table(columns=columns, data=data, allow_mixed_types=True)
        self._run.log({name: table})

    def close(self) -> None:
        """Waits until everything is sent, or in offline mode written."""
        self._run.finish()
