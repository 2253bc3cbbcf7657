"""The rows of a sweep: their statuses, and the fields that a report needs."""

from __future__ import annotations

import pathlib

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.rows import Row
from jaxunet.runtime.untrusted import NUMBER, check_fields, is_pair, shown

# Status of a point; `runtime.subprocesses` has further ones, for processes that fail.
OK, ERROR, IMPOSSIBLE = 'ok', 'error', 'impossible'
ADVICE = 'remove the line; the sweep measures the point again'
EVERY = {
    'key': str,
    'status': str,
    'point': dict,
    'device': str,
    'devices': int,
    'versions': dict,
    'batch': int,
    'lower_s?': NUMBER,
    'peak_bytes?': int,
    'log?': str,
}
WITHOUT_RESULT = {'reason': str}
TIMED = {'images_per_s': NUMBER, 'step_ms': {'median': NUMBER}, 'compile_s': NUMBER}
TRACED = {
    'phase_ms': {'*': NUMBER},
    'busy_ms': NUMBER,
    'idle_share': NUMBER,
    'launches': NUMBER,
    'profile': str,
}


def check_row(row: Row, source: str) -> None:
    """Checks the fields of a row that has a key.

    Args:
      source: file and line of the row; error messages begin with it.

    Raises:
      UserError: a field is missing, of another type, or an impossible number.
    """
    if 'key' not in row:
        return
    done = row.get('status') == OK
    fields = TIMED | (TRACED if 'profile' in row else {}) if done else WITHOUT_RESULT
    check_fields(row, EVERY | fields, source, advice=ADVICE)
    if not done:
        return
    if not row['images_per_s'] > 0 or (row.get('peak_bytes') or 0) < 0:
        raise UserError(f'{source}: expected images_per_s above 0 and peak_bytes of 0; {ADVICE}')
    for pair in (row['step_ms'].get('quartiles', [0, 0]), row.get('images_per_s_range', [0, 0])):
        if not is_pair(pair):
            raise UserError(
                f'{source}: expected a list of two numbers, found {shown(pair)}; {ADVICE}'
            )
    profile = pathlib.PurePath(row.get('profile', ''))
    if profile.is_absolute() or '..' in profile.parts:
        raise UserError(
            f"{source}: profile: expected a file in the sweep's folder, "
            f'found {shown(row["profile"])}; {ADVICE}'
        )
