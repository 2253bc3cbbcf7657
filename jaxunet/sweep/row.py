"""The rows of a sweep: their statuses, and the fields that a report needs."""

from __future__ import annotations

import pathlib

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.rows import Row
from jaxunet.runtime.untrusted import NUMBER, check_fields, shown

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
}
FAILED = {'reason': str}
MEASURED = {'images_per_s': NUMBER, 'step_ms': {'median': NUMBER}, 'compile_s': NUMBER}
TRACED = {
    'phase_ms': dict,
    'busy_ms': NUMBER,
    'idle_share': NUMBER,
    'launches': NUMBER,
    'profile': str,
}
# Fields that are null or missing where they were not measured.
OPTIONAL = {'lower_s': NUMBER, 'peak_bytes': int, 'log': str}


def check_row(row: Row, source: str) -> None:
    """Checks the fields of a row that has a key.

    Args:
      source: file and line of the row; error messages begin with it.

    Raises:
      UserError: a field is missing, of another type, or an impossible number.
    """
    if 'key' not in row:
        return
    fields = EVERY | {name: kind for name, kind in OPTIONAL.items() if row.get(name) is not None}
    if row.get('status') == OK:
        fields |= MEASURED | (TRACED if 'profile' in row else {})
    else:
        fields |= FAILED
    check_fields(row, fields, source, advice=ADVICE)
    if row['status'] != OK:
        return
    if not row['images_per_s'] > 0 or (row.get('peak_bytes') or 0) < 0:
        raise UserError(f'{source}: expected images_per_s above 0 and peak_bytes of 0; {ADVICE}')
    pairs = (row['step_ms'].get('quartiles', [0, 0]), row.get('images_per_s_range', [0, 0]))
    for pair in pairs:
        if not isinstance(pair, list) or [type(v) in (int, float) for v in pair] != [True, True]:
            raise UserError(
                f'{source}: expected a list of two numbers, found {shown(pair)}; {ADVICE}'
            )
    if 'profile' in row:
        check_fields(row['phase_ms'], dict.fromkeys(row['phase_ms'], NUMBER), source, advice=ADVICE)
        profile = pathlib.PurePath(row['profile'])
        if profile.is_absolute() or '..' in profile.parts:
            raise UserError(
                f"{source}: profile: expected a file in the sweep's folder, "
                f'found {shown(row["profile"])}; {ADVICE}'
            )
