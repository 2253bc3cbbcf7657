"""Reads `.npz` files of numbers and text; nothing is unpickled."""

from __future__ import annotations

import errno
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from jaxunet.runtime import archives
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.file_errors import check_regular
from jaxunet.runtime.paths import why_missing
from jaxunet.runtime.untrusted import LFS_POINTER, check_fetched, one_line, plain, shown


class DamagedError(UserError):
    """The content of a file shows that it is damaged; other errors may be the system's."""


def read_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Returns arrays of an .npz by name.

    Args:
      names: names of the arrays to read; those that the file lacks are left out. None = all.

    Raises:
      DamagedError: it is not a readable .npz of plain numbers.
      UserError: there is no such file, the system refuses to read it, or it expands to more than
        `archives.expanded_limit`.
    """
    with _open(path) as archive:
        infos = {
            info.filename.removesuffix('.npy'): info
            for info in archive.infolist()
            if names is None or info.filename.removesuffix('.npy') in names
        }
        if cut := [name for name, info in infos.items() if _is_stored_in_part(info)]:
            raise _unreadable(path, f'{plain(cut[0])}: its two sizes differ')
        archives.check_expanded(infos.values(), str(path), path.stat().st_size)
        try:
            return {name: archives.read_npy(archive, info) for name, info in infos.items()}
        except (*archives.ERRORS, OSError) as error:
            raise _unreadable(path, error) from None


def array_names(path: Path) -> list[str]:
    """Returns the names of the arrays in an .npz without reading them.

    Raises:
      UserError: no such file, or not a readable .npz.
    """
    with _open(path) as archive:
        return [plain(name.removesuffix('.npy')) for name in archive.namelist()]


def text_of(path: Path, name: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Returns the text in an array of one element.

    Raises:
      UserError: there is no such array, or it holds something else.
    """
    value = arrays.get(name)
    if value is None or value.shape != () or value.dtype.kind != 'U':
        kind = 'nothing' if value is None else f'{value.dtype} of shape {shown(value.shape)}'
        raise UserError(f'{path}: {name}: expected one text, found {kind}; write the file again')
    return str(value)


def _open(path: Path) -> zipfile.ZipFile:
    try:
        check_regular(path)
        with path.open('rb') as file:
            check_fetched(file.read(len(LFS_POINTER)), path)
        return archives.open_zip(path, lambda error: _unreadable(path, error))
    except OSError as error:
        raise _unreadable(path, error) from None


def _is_stored_in_part(info: zipfile.ZipInfo) -> bool:
    """Returns True for an uncompressed entry whose sizes differ, which only damage can cause."""
    return info.compress_type == zipfile.ZIP_STORED and info.file_size != info.compress_size


def _unreadable(path: Path, error: object) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f'{path}: no such file{why_missing(path)}')
    if isinstance(error, OSError) and error.errno != errno.EINVAL:  # from damaged offsets, too
        return UserError(f'{path}: cannot be read: {error.strerror or error}')
    return DamagedError(
        f'{path}: not a readable .npz file of plain numbers: {one_line(error)}; '
        'copy or write it again'
    )
