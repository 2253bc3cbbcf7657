"""Reads `.npz` files of plain numbers; nothing is unpickled."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np

from jaxunet.runtime.errors import UserError

DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError)


def read_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Returns arrays of an .npz by name.

    Args:
      names: those to read, as far as the file has them; None = all.

    Raises:
      UserError: no such file, or not a readable .npz of plain numbers.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays if names is None or name in names}
    except DAMAGED as error:
        raise _unreadable(path, error) from None


def array_names(path: Path) -> list[str]:
    """Returns the names of the arrays in an .npz without reading them.

    Raises:
      UserError: no such file, or not a readable .npz.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix('.npy') for name in archive.namelist()]
    except DAMAGED as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: BaseException) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f'{path}: no such file')
    return UserError(f'{path}: not a readable .npz file of plain numbers: {error}')
