"""Files that a run, a sweep, a comparison or a benchmark writes, in small valid parts."""

from __future__ import annotations

import json
import os
import pathlib
import typing
import unittest.mock
from collections.abc import Callable

from jaxunet.checkpoint import meta
from jaxunet.config import OPS
from jaxunet.ops import choices
from jaxunet.profile import report as profile_report
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.partial_output import Parts
from jaxunet.sweep import folder as sweep_folder
from jaxunet.sweep import report as sweep_report

RESULTS = pathlib.Path(__file__).parents[2] / 'docs' / 'results'
Contents = dict[str, bytes]


def sweep_parts() -> Contents:
    spec = {
        'title': 't',
        'command': '--config=x',
        'axes': [{'name': 'jit', 'values': ['on', 'off']}],
        'keys': ['a', 'b'],
        'notes': [],
    }
    row = {'case': 'sweep', 'point': {'jit': 'on'}, 'batch': 4, 'device': 'cpu', 'devices': 1}
    row |= {'versions': {'jax': '0'}, 'git': None, 'driver': None, 'seconds': 1.0}
    ok = {'status': 'ok', 'images_per_s': 2.0, 'step_ms': {'median': 1.0, 'quartiles': [1, 2]}}
    ok |= {'compile_s': 1.0, 'compile_cached': False, 'lower_s': 1.0, 'peak_bytes': 5}
    failed = {'status': 'crash', 'reason': 'no', 'log': 'x'}
    return {
        'sweep.json': json.dumps(spec).encode(),
        'a.json': json.dumps({'key': 'a', **row, **ok}).encode(),
        'b.json': json.dumps({'key': 'b', **row, **failed}).encode(),
    }


def read_sweep(path: pathlib.Path) -> object:
    spec, _, lines = path.read_bytes().partition(b'\n')
    (path.parent / 'sweep.json').write_bytes(spec)
    (path.parent / 'results.jsonl').write_bytes(lines)
    sweep = sweep_folder.load(path.parent)
    return sweep_report.markdown(sweep, [], path.parent)


def comparison_file() -> Contents:
    text = (RESULTS / 'methods' / 'tiny.toml').read_text()
    for name in ('../../../configs', 'PROTOCOL.md'):
        text = text.replace(f'"{name}', f'"{(RESULTS / "methods" / name).resolve()}')
    return {'comparison.toml': text.encode()}


def read_metadata(path: pathlib.Path) -> object:
    (path.parent / meta.FILE).parent.mkdir(exist_ok=True)
    (path.parent / meta.FILE).write_bytes(path.read_bytes())
    try:
        return meta.read_meta(path.parent)
    except ValueError as error:
        raise UserError(str(error)) from None


def read_choices(path: pathlib.Path) -> object:
    """Reads choices as `backend=auto` does; a damaged file is ignored with a warning."""
    choices.ignore.cache_clear()
    with unittest.mock.patch.dict(os.environ, {choices.VARIABLE: str(path)}):
        return choices.read('H200', 'float32') or choices._entries(path)


def choices_parts() -> Contents:
    entry = {'device': 'H200', 'precision': 'float32', 'versions': choices.versions()}
    entry['ops'] = dict.fromkeys(OPS, 'xla')
    return {'choices.json': json.dumps({'choices': [entry, entry]}).encode()}


def read_parts(path: pathlib.Path) -> object:
    folder = path.parent / 'x.png.partial'
    folder.mkdir(exist_ok=True)
    (folder / 'run.json').write_bytes(path.read_bytes())
    return Parts(path.parent / 'x.png', {'a': 1, 'b': [1.5, 'x']})


def read_finished(path: pathlib.Path) -> object:
    folder = path.parent / 'y.png.partial'
    folder.mkdir(exist_ok=True)
    (folder / 'run.json').write_text('{}')
    (folder / '000000-000002.npz').write_bytes(path.read_bytes())
    return Parts(path.parent / 'y.png', {}).load(2)


def results(path: str) -> Callable[[], Contents]:
    """Returns a function that returns the first and last row of committed measurements."""
    measured = (RESULTS / path).read_bytes().splitlines()
    return lambda: {'first': measured[0], 'last': measured[-1]}


def profile_csv() -> Contents:
    values = {'int': '3', 'float': '1.5', 'str': 'a'}
    kinds = typing.get_type_hints(profile_report.Row)
    row = ','.join(values[kinds[name].__name__] for name in profile_report.COLUMNS)
    return {'head': ','.join(profile_report.COLUMNS).encode(), 'row': row.encode()}
