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
from jaxunet.runtime.download import cache_dir
from jaxunet.runtime.rows import Row
from jaxunet.runtime.whole_files import written

VARIABLE = 'JAXUNET_CHOICES'
COMMAND = 'python -m jaxunet.benchmark --choose'


def path() -> pathlib.Path:
    """Returns the path of the file, which need not exist."""
    return pathlib.Path(os.environ.get(VARIABLE) or cache_dir() / 'choices.json')


def versions() -> dict[str, str]:
    """Returns the versions that a measurement depends on."""
    return {
        'jax': jax.__version__,
        'jaxlib': jaxlib.__version__,
        'jaxunet': jaxunet.__version__,
    }


def read(device: str, precision: str) -> dict[str, str] | None:
    """Returns the fastest backend of every op on this kind of device; None if unknown."""
    file = path()
    try:
        text = file.read_text(encoding='utf-8')
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        ignore(file, str(error))
        return None
    try:
        entry = _entries(text).get((device, precision))
    except ValueError as error:
        ignore(file, f'is damaged ({error})')
        return None
    if entry is None:
        return None
    found = entry.get('versions')
    if found != versions():
        ignore(file, f'was measured with {_listed(found)}; these are {_listed(versions())}')
        return None
    ops = entry.get('ops')
    if not isinstance(ops, dict) or set(ops) != set(OPS):
        ignore(file, f'its ops are not {", ".join(OPS)}')
        return None
    return {op: str(ops[op]) for op in OPS}


def write(file: pathlib.Path, entry: Row) -> None:
    """Writes an entry, in place of an earlier one of its device and precision.

    Raises:
      UserError: the file cannot be written.
    """
    try:
        entries = _entries(file.read_text(encoding='utf-8'))
    except (OSError, ValueError):  # missing, or damaged and so of no use
        entries = {}
    entries[entry['device'], entry['precision']] = entry
    text = json.dumps({'choices': list(entries.values())}, indent=1) + '\n'
    with written(file) as partial:
        partial.write_text(text, encoding='utf-8')
    ignore.cache_clear()


@functools.cache
def ignore(file: pathlib.Path, why: str) -> None:
    """Logs, once, that a file of choices is not used."""
    logging.warning('%s: %s; backend=auto ignores it; measure again with %s', file, why, COMMAND)


def _entries(text: str) -> dict[tuple[str, str], Row]:
    """Returns the entries of a file by device and precision.

    Raises:
      ValueError: it is not such a file.
    """
    found = json.loads(text)
    entries = found.get('choices') if isinstance(found, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError('expected an object with a list "choices"')
    return {(str(e.get('device')), str(e.get('precision'))): e for e in entries}


def _listed(found: object) -> str:
    if not isinstance(found, Mapping):
        return 'unknown versions'
    return ', '.join(f'{name} {version}' for name, version in found.items())
