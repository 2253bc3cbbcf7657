"""The folder of a sweep: `sweep.json` holds the grid, `results.jsonl` the results of its points."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxunet.runtime.errors import UserError
from jaxunet.sweep import runner
from jaxunet.sweep.points import Axis
from jaxunet.sweep.results import Sweep


def config_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns `--config FILE` and the config overrides among the arguments of a command line."""
    found: list[str] = []
    for i, argument in enumerate(arguments):
        if argument == '--config' and i + 1 < len(arguments):
            found += [argument, arguments[i + 1]]
        elif argument.startswith(('--config=', '--config.', '--noconfig.')):
            found.append(argument)
    return found


def save(directory: pathlib.Path, spec: dict[str, Any]) -> None:
    """Writes the description of a sweep, which `load` reads.

    Args:
      directory: folder of the sweep; created if needed.
      spec: `title`, `command`, `axes` (name and values), `keys` of the points, `notes`.

    Raises:
      UserError: the file cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / 'sweep.json').write_text(json.dumps(spec, indent=1) + '\n', encoding='utf-8')
    except OSError as error:
        raise UserError(
            f'--output: {error.filename or directory} cannot be written: {error.strerror or error}'
        ) from None


def load(directory: pathlib.Path) -> Sweep:
    """Returns the last sweep of a folder with the results so far.

    Raises:
      UserError: the folder holds no sweep, or sweep.json is damaged.
    """
    path = directory / 'sweep.json'
    if not path.is_file():
        raise UserError(
            f'--output: {directory} holds no sweep (no sweep.json); give the folder of a sweep, or '
            'run without --plot_only'
        )
    try:
        spec = json.loads(path.read_text(encoding='utf-8'))
        axes = [Axis(axis['name'], tuple(axis['values'])) for axis in spec['axes']]
        keys, notes, command, title = (spec[name] for name in ('keys', 'notes', 'command', 'title'))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{path}: damaged ({error!r}); run the sweep again without --plot_only: its results '
            'are kept'
        ) from None
    known = runner.latest_rows(directory)
    done = [known[key] for key in keys if key in known]
    return Sweep(axes, done, len(keys) - len(done), notes, command, title)
