"""Writes the logs of a run: metrics.csv and TensorBoard."""

from __future__ import annotations

import csv
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from absl import logging
from tensorboardX import SummaryWriter

from jaxunet.training import held_out

COLUMNS = (
    'step',
    'loss',
    'learning_rate',
    'grad_norm',
    'images_per_second',
    'step_ms',
    'loss_scale',
    'skipped_steps',
    'training_seconds',
)
ALL_COLUMNS = (*COLUMNS, *held_out.COLUMNS)


class Logs:
    """Appends to `WORKDIR/metrics.csv` and `WORKDIR/tensorboard`.

    Args:
      start_step: the step that the run starts from. Rows of later steps are dropped: a run that was
        killed after its last checkpoint has logged steps that it will run again.
      held_out_losses: the table has columns for them (`train.holdout_every`).
    """

    def __init__(
        self, workdir: pathlib.Path, start_step: int, *, held_out_losses: bool = False
    ) -> None:
        path = workdir / 'metrics.csv'
        # A resumed run keeps the losses that it measured before, even if it measures no more.
        known = path.exists() and held_out.COLUMNS[0] in _header(path)
        columns = ALL_COLUMNS if held_out_losses or known else COLUMNS
        self._table = StepTable(path, columns, start_step)
        self._board = SummaryWriter(
            str(workdir / 'tensorboard'), purge_step=start_step + 1 if start_step else None
        )

    def row(self, values: Mapping[str, float]) -> None:
        """Adds one logged step, with a value for each column; the held-out ones may lack."""
        self._table.add([values])
        for name, value in values.items():
            if name != 'step':
                group = 'held_out' if name in held_out.COLUMNS else 'train'
                self._board.add_scalar(f'{group}/{name}', value, values['step'])

    def scalar(self, name: str, value: float, step: int) -> None:
        """Adds a point to a curve of TensorBoard."""
        self._board.add_scalar(name, value, step)

    def image(self, step: int, picture: np.ndarray) -> None:
        """Adds a sample grid to TensorBoard: uint8 (height, width, 1 or 3)."""
        self._board.add_image(
            'samples', np.broadcast_to(picture, (*picture.shape[:2], 3)), step, dataformats='HWC'
        )

    def close(self) -> None:
        """Writes what is buffered."""
        self._board.close()


def _header(path: pathlib.Path) -> Sequence[str]:
    with path.open(newline='') as file:
        return csv.DictReader(file).fieldnames or ()


class StepTable:
    """A CSV file of rows that have a step; rows after `start_step` are dropped on opening."""

    def __init__(self, path: pathlib.Path, columns: tuple[str, ...], start_step: int) -> None:
        self.path, self._columns = path, columns
        rows = (
            [row for row in read_rows(path, columns) if int(row['step']) <= start_step]
            if path.exists()
            else []
        )
        temporary = path.with_suffix('.tmp')
        with temporary.open('w', newline='') as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, path)

    def add(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Appends rows in one write, so that a process that dies leaves whole lines."""
        with self.path.open('a', newline='') as file:
            csv.DictWriter(file, self._columns).writerows(
                {
                    name: f'{value:.9g}' if isinstance(value, float) else value
                    for name, value in row.items()
                }
                for row in rows
            )


def read_rows(path: pathlib.Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """Reads the rows of a `StepTable`.

    Columns that an older version did not have are empty. Rows that were cut short are left out.
    """
    with path.open(newline='') as file:
        rows = list(csv.DictReader(file))
    whole = [
        row
        for row in rows
        if set(row) <= set(columns) and None not in row.values() and row.get('step', '').isdigit()
    ]
    if len(whole) < len(rows):
        logging.warning(
            '%s: dropped %d rows that are cut short or of another version',
            path,
            len(rows) - len(whole),
        )
    return [dict.fromkeys(columns, '') | row for row in whole]


def read_metrics(path: pathlib.Path) -> list[dict[str, str]]:
    """Reads the rows of a metrics.csv."""
    return read_rows(path, ALL_COLUMNS)
