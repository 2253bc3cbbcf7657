"""Reads and writes the result of `jaxunet.benchmark --choose`: the fastest backend of each op.

The file is JSON: `{"choices": [...]}`, one entry per kind of device and precision, with

    device, precision   such as NVIDIA H200 and bfloat16
    versions            of jax, jaxlib and jaxunet; they must equal the installed ones
    ops                 the backend of every op of `jaxunet.config.OPS`
    measured            backend strings and their milliseconds per step
    config, batch_size  what was measured

It is `choices.json` in the cache folder, unless JAXUNET_CHOICES names another path. A file or entry
that cannot be used is ignored; one log line says why.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
from collections.abc import Mapping

import jax
import jaxlib
from absl import logging

import jaxunet
from jaxunet.config import OPS
from jaxunet.runtime.errors import UserError, listed
from jaxunet.runtime.paths import cache_dir, expanded
from jaxunet.runtime.rows import Row
from jaxunet.runtime.untrusted import check_fields, plain, read_json, shown
from jaxunet.runtime.whole_files import written

VARIABLE = 'JAXUNET_CHOICES'
COMMAND = 'python -m jaxunet.benchmark --choose'


def path() -> pathlib.Path:
    """Returns the path of the file, which need not exist.

    Raises:
      UserError: JAXUNET_CHOICES is not set, and there is no cache folder.
    """
    named = os.environ.get(VARIABLE)
    return pathlib.Path(expanded(named)) if named else cache_dir() / 'choices.json'


def versions() -> dict[str, str]:
    """Returns the versions that a measurement depends on."""
    return {
        'jax': jax.__version__,
        'jaxlib': jaxlib.__version__,
        'jaxunet': jaxunet.__version__,
    }


def read(device: str, precision: str) -> dict[str, str] | None:
    """Returns the fastest backend of every op on this kind of device; None if unknown."""
    try:
        file = path()
    except UserError:
        return None  # without a cache folder, nothing was measured
    try:
        entry = _entries(file).get((device, precision))
    except UserError as error:
        ignore(str(error))
        return None
    if entry is None:
        return None
    measured_with = entry.get('versions')
    if measured_with != versions():
        ignore(
            f'{file}: was measured with {_listed(measured_with)}; these are {_listed(versions())}'
        )
        return None
    ops = entry.get('ops')
    if not isinstance(ops, dict) or set(ops) != set(OPS):
        ignore(f'{file}: its ops are not {", ".join(OPS)}')
        return None
    return {op: str(ops[op]) for op in OPS}


def write(file: pathlib.Path, entry: Row) -> None:
    """Writes an entry, in place of an earlier one of its device and precision.

    Raises:
      UserError: the file cannot be written.
    """
    try:
        entries = _entries(file)
    except UserError as error:
        logging.warning('%s; it is replaced', error)
        entries = {}
    entries[entry['device'], entry['precision']] = entry
    text = json.dumps({'choices': list(entries.values())}, indent=1) + '\n'
    with written(file) as partial:
        partial.write_text(text, encoding='utf-8')
    ignore.cache_clear()


@functools.cache
def ignore(why: str) -> None:
    """Logs, once, that a file of choices is not used; `why` begins with its name."""
    logging.warning('%s; backend=auto ignores it; measure again with %s', why, COMMAND)


def _entries(file: pathlib.Path) -> dict[tuple[str, str], Row]:
    """Returns the entries of a file by device and precision; none if there is no file.

    Raises:
      UserError: it cannot be read, or is not such a file.
    """
    with contextlib.suppress(OSError):  # which reading reports
        if not file.exists():
            return {}
    advice = f'it holds no choices of {COMMAND}'
    content = read_json(file, advice=advice)
    check_fields(content, {'choices': list}, str(file), advice=advice)
    entries: dict[tuple[str, str], Row] = {}
    for number, entry in enumerate(content['choices'], 1):
        where = f'{file}: entry {number}'
        if not isinstance(entry, dict):
            raise UserError(f'{where}: expected a JSON object, found {shown(entry)}; {advice}')
        check_fields(entry, {'device': str, 'precision': str}, where, advice=advice)
        entries[entry['device'], entry['precision']] = entry
    return entries


def _listed(named: object) -> str:
    if not isinstance(named, Mapping):
        return 'unknown versions'
    return listed([plain(f'{name} {version}') for name, version in named.items()])
