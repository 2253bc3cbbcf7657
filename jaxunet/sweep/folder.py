"""The folder of a sweep: `sweep.json` holds the grid, `results.jsonl` the results of its points."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import check_fields, read_json, shown
from jaxunet.runtime.whole_files import written
from jaxunet.sweep import runner
from jaxunet.sweep.points import Axis
from jaxunet.sweep.results import Sweep

ADVICE = 'run the sweep again without --plot_only: its results are kept'


def config_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns `--config FILE` and the config overrides among the arguments of a command line."""
    kept: list[str] = []
    takes_next = False  # the last argument may have its value in the next one
    for argument in arguments:
        names_config = argument == '--config' or argument.startswith(
            ('--config=', '--config.', '--noconfig.')
        )
        if names_config or (takes_next and not argument.startswith('--')):
            kept.append(argument)
        takes_next = names_config and '=' not in argument
    return kept


def save(directory: pathlib.Path, spec: Mapping[str, object]) -> None:
    """Writes the description of a sweep, which `load` reads.

    Args:
      directory: folder of the sweep; created if needed.
      spec: `title`, `command`, `axes` (name and values), `keys` of the points, `notes`.

    Raises:
      UserError: the file cannot be written.
    """
    with written(directory / 'sweep.json', '--output') as partial:
        partial.write_text(json.dumps(spec, indent=1) + '\n', encoding='utf-8')


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
    spec = read_json(path, advice=ADVICE)
    fields = {'axes': list, 'keys': list, 'notes': list, 'command': str, 'title': str}
    check_fields(spec, fields, str(path), advice=ADVICE)
    axes = []
    for axis in spec['axes']:
        if not isinstance(axis, dict) or not axis.get('values'):
            raise UserError(
                f'{path}: axes: expected names with values, found {shown(axis)}; {ADVICE}'
            )
        check_fields(axis, {'name': str, 'values': list}, f'{path}: axes', advice=ADVICE)
        axes.append(Axis(axis['name'], tuple(axis['values'])))
    if not all(isinstance(text, str) for text in (*spec['keys'], *spec['notes'])):
        raise UserError(f'{path}: expected keys and notes as texts, found others; {ADVICE}')
    known = runner.latest_rows(directory)
    done = [known[key] for key in spec['keys'] if key in known]
    for row in done:
        if {axis.name for axis in axes} - row['point'].keys():
            raise UserError(
                f'{directory / "results.jsonl"}: the row {shown(row["key"])} has no values of all '
                f'axes of {path}; remove it, and run the sweep again'
            )
    missing = len(spec['keys']) - len(done)
    return Sweep(axes, done, missing, spec['notes'], spec['command'], spec['title'])
