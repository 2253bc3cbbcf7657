"""The results of a queue's processes: rows of measurements, and stretches of work on jobs.

A row (rows.jsonl) is the measurement of a checkpoint with one sampler. A stretch (stretches.jsonl)
is a piece of work on a job: how it ended, and the seconds of each activity. A later row replaces an
earlier one of the same measurement. Stretches are never replaced, so that repeated work counts.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jaxunet.compare.jobs import Job
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.rows import Row
from jaxunet.runtime.untrusted import NUMBER, check_fields
from jaxunet.runtime.whole_files import written

ROWS, STRETCHES = 'rows.jsonl', 'stretches.jsonl'
# Outcomes of a stretch: a checkpoint was measured, the job's training ended, it was stopped before
# that, or it failed.
MEASURED, TRAINED, STOPPED, FAILED = 'measured', 'trained', 'stopped', 'failed'
# Fields that identify a measurement, and those that reports need.
KEY = {'data': str, 'case': str, 'seed': int, 'seconds': NUMBER, 'sampler': str}
FIELDS = {
    **KEY,
    'training_seconds': NUMBER,
    'step': int,
    'batch_size': int,
    'num_samples': int,
    'values': {'*': {'*': NUMBER}},
    'device': str,
    'versions': {'jax': str},
    'step_ms?': NUMBER,
    'losses?': {'held_out_loss': NUMBER},
}
STRETCH_FIELDS = {
    'data': str,
    'case': str,
    'seed': int,
    'outcome': str,
    'reason': str,
    'wall': {'*': NUMBER},
    'shared_by': int,
    'devices': int,
    'ended': str,
}
ADVICE = 'remove the line'


def stretch(
    job: Job, outcome: str, reason: str, seconds: Mapping[str, float], shared_by: int
) -> Row:
    """Returns a stretch that ends now, without the fields of its origin.

    Args:
      seconds: those of each activity.
      shared_by: processes that share the device.
    """
    return {
        'data': job.data,
        'case': job.case,
        'seed': job.seed,
        'outcome': outcome,
        'reason': reason,
        'wall': {name: round(s, 3) for name, s in seconds.items()},
        'shared_by': shared_by,
        'ended': datetime.datetime.now(datetime.UTC).isoformat(),
    }


def key_of(row: Row) -> tuple[object, ...]:
    """Returns what a row measures: the values of `KEY`."""
    return tuple(row[name] for name in KEY)


def measured_keys(paths: Iterable[Path]) -> set[tuple[object, ...]]:
    """Returns the keys of the rows of those files that exist.

    Raises:
      UserError: a row does not say what it measures.
    """

    def check(row: Row, source: str) -> None:
        check_fields(row, KEY, source, advice=ADVICE)

    return {*rows.latest(paths, key_of, check)}


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Returns the rows of those files that exist, in the order of their keys.

    A later row replaces an earlier one of the same measurement.

    Raises:
      UserError: a line is not a row of measurements; or the rows do not compare, because they have
        different features, or different step times for one method.
    """

    known: dict[str, tuple[object, str]] = {}

    def check(row: Row, source: str) -> None:
        check_fields(row, FIELDS, source, advice=ADVICE)
        step_ms = row.get('step_ms')
        for name, value in (
            ('features', row.get('features')),
            ('training time', 'measured' if step_ms is None else 'counted by steps'),
            (f'step_ms of {row["case"]}', step_ms),
        ):
            expected, where = known.setdefault(name, (value, source))
            if value != expected:
                raise UserError(
                    f'{source}: {name}: expected {expected}, as in {where}, found {value}: such '
                    'rows do not compare; leave one of them out'
                )

    every = rows.latest(paths, key_of, check)
    return [every[key] for key in sorted(every)]


def read_stretches(paths: Iterable[Path]) -> list[Row]:
    """Returns the stretches of those files that exist, without repeats, in the order of their ends.

    Raises:
      UserError: a line is not a stretch.
    """

    def check(row: Row, source: str) -> None:
        check_fields(row, STRETCH_FIELDS, source, advice=ADVICE)
        for name in ('shared_by', 'devices'):
            if row[name] < 1:
                raise UserError(f'{source}: {name}: expected 1 or more; {ADVICE}')

    by_text = rows.latest(paths, lambda row: json.dumps(row, sort_keys=True), check)
    return sorted(by_text.values(), key=lambda row: row['ended'])


def write(path: Path, lines: Sequence[Row]) -> None:
    """Writes rows as JSON lines; if that fails, the file stays as it was.

    Raises:
      UserError: it cannot be written.
    """
    with written(path) as partial:
        partial.write_text(
            ''.join(f'{json.dumps(row, ensure_ascii=False)}\n' for row in lines), encoding='utf-8'
        )


def device_seconds(stretches: Iterable[Row]) -> dict[str, float]:
    """Returns the device seconds of each activity.

    If n processes share a device, each counts 1/n of its time; a process with several devices
    counts the time of each.
    """
    spent: dict[str, float] = {}
    for row in stretches:
        for activity, seconds in row['wall'].items():
            spent[activity] = spent.get(activity, 0.0) + seconds * row['devices'] / row['shared_by']
    return spent
