"""The files that the flags of `jaxunet.evaluate` name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from absl import flags

from jaxunet.evaluate.flags import OUTPUT
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.rows import Row
from jaxunet.runtime.whole_files import check_file


def check_outputs(outputs: Sequence[flags.FlagHolder[str | None]]) -> None:
    """Checks that the files of these flags can be written, before anything is computed.

    Raises:
      UserError: the path is a folder, or cannot be written.
    """
    for flag in outputs:
        if flag.value:
            check_file(flag.value, f'--{flag.name}')


def append(rows: Iterable[Row]) -> None:
    """Appends rows to the file of --output, if the flag is given.

    Raises:
      UserError: a number is not finite, or the file cannot be written.
    """
    if not OUTPUT.value:
        return
    target = Path(OUTPUT.value)
    try:
        lines = ''.join(f'{json.dumps(row, allow_nan=False)}\n' for row in rows)
    except ValueError:
        raise UserError(
            f'--output: {target}: expected finite results, found NaN or infinity, which JSON does '
            'not have; the weights are damaged or training had diverged'
        ) from None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open('a') as file:
            file.write(lines)
    except OSError as error:
        raise UserError(
            f'--output: {target}: cannot be written: {error.strerror or error}; '
            'check the folder and the free space'
        ) from None
