"""Writes files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from jaxunet.runtime.errors import UserError


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a temporary path, which is renamed to `path` when the block has ended.

    The block writes a file or a folder there. An error removes it and leaves an earlier `path` as
    it was. The folder of `path` is created.

    Raises:
      OSError: the folder cannot be created, or the name cannot be taken.
    """
    target = pathlib.Path(path)
    partial = target.with_name(f'.{target.name}.{os.getpid()}.partial')
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        os.replace(partial, target)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                partial.unlink()


def check_writable(path: str | os.PathLike[str], flag: str) -> None:
    """Checks that a file or folder can be written, before the work that it is for; creates nothing.

    Args:
      flag: the flag that gave the path; begins the message.

    Raises:
      UserError: permissions are missing, or a parent is a file.
    """
    target = pathlib.Path(path)
    nearest = target if target.exists() else target.parent
    while not nearest.exists():
        nearest = nearest.parent
    if (nearest != target and not nearest.is_dir()) or not os.access(nearest, os.W_OK):
        raise UserError(
            f'{flag}: {path}: cannot be written; check the name, and the permissions of {nearest}'
        )


@contextlib.contextmanager
def written(path: str | os.PathLike[str], flag: str = '') -> Iterator[pathlib.Path]:
    """Like `replacing`, for a path that the user gave.

    Args:
      flag: the flag that gave it; begins the message.

    Raises:
      UserError: the block or the renaming failed with an OSError, such as a full disk.
    """
    try:
        with replacing(path) as partial:
            yield partial
    except OSError as error:
        raise UserError(
            f'{f"{flag}: " if flag else ""}{path}: cannot be written: {error.strerror or error}; '
            'check the folder, its permissions and the free space'
        ) from None
