"""Measurements as JSON lines, one object per row with its provenance; rows are only appended."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxunet.runtime import device
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.file_errors import check_regular
from jaxunet.runtime.untrusted import parse_json, read_limited

Row = dict[str, Any]
ROOT = pathlib.Path(__file__).parents[2]
MAX_BYTES = 2**28  # largest file of rows
PACKAGES = ('jax', 'jaxlib', 'flax', 'torch', 'tokamax', 'nvidia-cudnn-cu13')


def provenance() -> Row:
    """Returns the fields that describe a row's origin. Initializes JAX's devices.

    `git`: the commit, with -dirty if files differ from it, or the value of JAXUNET_GIT_SHA; null
    outside a checkout. `device`: `jaxunet.runtime.device.label`. `devices`: number of devices.
    `driver`: version of the NVIDIA driver, or null. `versions`: versions of Python and `PACKAGES`.
    """
    return {
        'git': os.environ.get('JAXUNET_GIT_SHA') or git_sha(),
        'device': device.label(),
        'devices': len(jax.devices()),
        'driver': driver(),
        'versions': versions(),
    }


def origin(kind: str, command: str) -> Row:
    """Returns what begins a row of this kind that a command measures now on one device."""
    return {
        'kind': kind,
        'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        **provenance(),
        'devices': 1,
        'command': command,
    }


def git_sha() -> str | None:
    """Returns the commit of this checkout, with -dirty if files differ; None outside a checkout.

    Rows in docs/results do not count as differing, because measurements append to them.
    """
    git = ('git', '-C', str(ROOT))
    commit = _output(*git, 'rev-parse', '--short=7', 'HEAD')
    kept = ':(top,exclude,glob)docs/results/**/*.jsonl'
    changed = _output(*git, 'status', '--porcelain', '--untracked-files=no', '--', ':/', kept)
    return f'{commit}-dirty' if commit and changed else commit


def driver() -> str | None:
    """Returns the version of the NVIDIA driver; None without one."""
    lines = _output('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader')
    return lines.splitlines()[0] if lines else None


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed ones of `PACKAGES`."""
    by_package = {'python': platform.python_version()}
    for name in PACKAGES:
        try:
            by_package[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return by_package


def append(path: str | os.PathLike[str], row: Row) -> None:
    """Appends the row as one line; creates the file and its folder if necessary.

    The line is one write, so that a process that dies leaves no partial line.

    Raises:
      UserError: the file cannot be written.
      ValueError: the row is not valid JSON (NaN and infinities are not).
    """
    check_regular(path)
    line = json.dumps(row, allow_nan=False) + '\n'
    try:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, 'a', encoding='utf-8') as file:
            file.write(line)
    except OSError as error:
        raise UserError(f'{path}: cannot be written: {error.strerror or error}') from None


def read(
    path: str | os.PathLike[str], check: Callable[[Row, str], object] | None = None
) -> list[Row]:
    """Returns all rows of a file, oldest first; empty lines are skipped.

    Args:
      check: raises UserError for a row that lacks what the caller needs; its second argument names
        the line.

    Raises:
      UserError: the file cannot be read, a line is not a JSON object, or `check` refuses it.
    """
    data = read_limited(path, MAX_BYTES, advice='give a file of rows')
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f'{path}: cannot be read: {error}') from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = parse_json(line, f'{path}, line {number}', advice='remove the line')
        if check is not None:
            check(row, f'{path}, line {number}')
        rows.append(row)
    return rows


def latest(
    paths: Iterable[pathlib.Path],
    key: Callable[[Row], object],
    check: Callable[[Row, str], object],
) -> dict[Any, Row]:
    """Returns the rows of those files that exist, by their keys; a later row replaces earlier ones.

    Args:
      key: returns what a row measures; None = the row is left out.
      check: as for `read`.

    Raises:
      UserError: as `read` does.
    """
    every = [row for path in paths if path.exists() for row in read(path, check)]
    return {name: row for row in every if (name := key(row)) is not None}


def _output(program: str, *arguments: str) -> str | None:
    """Returns the program's output, stripped; None if the program is missing or fails."""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip() or None
