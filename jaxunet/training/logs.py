"""The tables of a run, with a row for each logged step; metrics.csv is one."""

from __future__ import annotations

import csv
import io
import math
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging

from jaxunet.checkpoint.damaged import FOLDER as DAMAGED
from jaxunet.checkpoint.damaged import set_aside
from jaxunet.checkpoint.refused import RefusedError
from jaxunet.runtime.attempts import PatientFile
from jaxunet.runtime.file_errors import check_regular
from jaxunet.training import held_out

FILE = 'metrics.csv'
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
SPIKES = ('spikes',)  # with train.spike_sigmas
ROLLBACKS = ('rollbacks',)  # with train.rollbacks
DEVICES = ('devices',)  # of all processes, once the run was restarted
OPTIONAL = (*DEVICES, *SPIKES, *ROLLBACKS, *held_out.COLUMNS)
ALL_COLUMNS = (*COLUMNS, *OPTIONAL)
MAX_DIGITS = 18  # of a step


def mean_loss(metrics: Mapping[str, Any]) -> float:
    """Returns the mean loss of the steps since the last log; nan if all of them were skipped.

    Args:
      metrics: of the last of these steps.
    """
    loss = float(metrics['loss'])
    # Without a single loss the sum is exactly 0, as no mean of losses is.
    return math.nan if int(metrics['bad_steps']) and loss == 0.0 else loss


def step_row(step: int, metrics: Mapping[str, Any], seconds_per_step: float) -> dict[str, float]:
    """Returns the values that every run logs after a step, by their columns."""
    return {
        'step': step,
        'loss': mean_loss(metrics),
        'learning_rate': float(metrics['learning_rate']),
        'grad_norm': float(metrics['grad_norm']),
        'step_ms': seconds_per_step * 1e3,
        'skipped_steps': int(metrics['skipped']),
    }


class StepTable:
    """A CSV file of rows that have a step. An error of writing is only a warning.

    Opening removes the rows after `start_step`. A file with damaged rows is moved to
    `WORKDIR/damaged`, and a new one starts with its other rows.

    Raises `RefusedError` if the system refuses to read the file.

    Args:
      columns: the columns that every such file has.
      texts: the columns of text; the others are numbers.
      optional: further columns that the file may have.

    Attributes:
      earlier: the rows up to `start_step`.
    """

    def __init__(
        self,
        path: pathlib.Path,
        columns: Sequence[str],
        start_step: int,
        *,
        texts: Collection[str] = (),
        optional: Sequence[str] = (),
    ) -> None:
        self.path = path
        try:
            earlier = _read(path, (*columns, *optional), texts)
        except FileNotFoundError:
            earlier = _FileRows((), [], '')
        except IsADirectoryError as error:
            earlier = _FileRows((), [], f'cannot be read ({error.strerror})')
        except OSError as error:
            raise RefusedError(
                f'{path}: cannot be read: {error.strerror or error}. It may be whole; repeat the '
                'command once it can be read, or move it away to start another one'
            ) from None
        kept = [name for name in optional if name in earlier.columns]
        self._columns = tuple(dict.fromkeys((*columns, *kept)))
        self.earlier = [row for row in earlier.rows if int(row['step']) <= start_step]
        if earlier.problem:
            logging.warning(
                '%s: %s; it is moved to %s', path, earlier.problem, path.parent / DAMAGED
            )
            set_aside(path.parent, path)
        self._file = PatientFile(
            path,
            start=self._lines([], header=True),
            content=self._lines(self.earlier, header=True),
        )
        self._file.write()

    def add(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Appends rows in one write, so that a process that dies leaves whole lines."""
        self._file.write(self._lines(rows))

    def close(self) -> None:
        """Tries once more to write the rows that could not be written."""
        self._file.close()

    def _lines(self, rows: Sequence[Mapping[str, object]], *, header: bool = False) -> bytes:
        text = io.StringIO(newline='')
        writer = csv.DictWriter(text, self._columns, extrasaction='ignore')
        if header:
            writer.writeheader()
        writer.writerows(
            {
                name: f'{value:.9g}' if isinstance(value, float) else value
                for name, value in row.items()
            }
            for row in rows
        )
        return text.getvalue().encode()


class _FileRows(NamedTuple):
    """The content of a table.

    Attributes:
      columns: those of the file.
      rows: those that can be read.
      problem: describes damaged content; empty if there is none. A last row that was cut short does
        not count.
    """

    columns: Sequence[str]
    rows: list[dict[str, str]]
    problem: str


def _read(path: pathlib.Path, known: Sequence[str], texts: Collection[str]) -> _FileRows:
    check_regular(path)
    data = path.read_bytes()
    head, *lines = data.decode('utf-8', 'replace').rstrip('\r\n').split('\n')
    columns = _cells(head)
    if not set(columns) <= set(known) or 'step' not in columns:
        problem = f'has the columns {", ".join(columns)[:200]!r}' if data else ''
        return _FileRows((), [], problem)
    rows = [_row(columns, line, texts) for line in lines]
    damaged = sum(row is None for row in rows)
    if rows and rows[-1] is None and not data.endswith(b'\n'):
        damaged -= 1  # cut short: the process was killed while it wrote
    return _FileRows(
        columns,
        [dict.fromkeys(known, '') | row for row in rows if row],
        f'{damaged} rows are damaged' if damaged else '',
    )


def _row(names: Sequence[str], line: str, texts: Collection[str]) -> dict[str, str] | None:
    """Returns the cells of a line by column; None if it is damaged."""
    cells = _cells(line)
    if len(cells) != len(names) or '\ufffd' in line:
        return None
    row = dict(zip(names, cells, strict=True))
    step = row['step']
    if not (step.isascii() and step.isdigit() and len(step) <= MAX_DIGITS):
        return None
    return row if all(n in texts or _is_number(cell) for n, cell in row.items()) else None


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line.rstrip('\r')]), [])
    except csv.Error:
        return []


def _is_number(cell: str) -> bool:
    try:
        float(cell or 0)
    except ValueError:
        return False
    return True


def read_rows(
    path: pathlib.Path, columns: Sequence[str], texts: Collection[str] = ()
) -> list[dict[str, str]]:
    """Reads the rows of a `StepTable`.

    Columns that an older version did not have are empty. Rows that are damaged or were cut short
    are left out; a file with other columns has none.
    """
    earlier = _read(path, columns, texts)
    if earlier.problem:
        logging.warning('%s: %s', path, earlier.problem)
    return earlier.rows


def read_metrics(path: pathlib.Path) -> list[dict[str, str]]:
    """Reads the rows of a metrics.csv."""
    return read_rows(path, ALL_COLUMNS)
