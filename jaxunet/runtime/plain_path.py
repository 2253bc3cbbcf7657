"""Names an open folder by a path of plain characters.

Libraries put paths into patterns or URLs, in which `[`, `*`, `?` and other characters mean
something else. Such a path also stays right when the folder is moved.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
from collections.abc import Iterator

from jaxunet.runtime.errors import UserError

DESCRIPTORS = pathlib.Path('/proc/self/fd')  # Linux's links to the open files of a process


@contextlib.contextmanager
def opened_folder(folder: pathlib.Path) -> Iterator[int]:
    """Opens a folder; yields its file descriptor.

    Raises:
      OSError: it cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def plain_path(folder: pathlib.Path, descriptor: int) -> pathlib.Path:
    """Returns `/proc/self/fd/NUMBER` for an open folder, or `folder` where there is no /proc.

    Raises:
      UserError: there is no /proc, and the path has characters that mean something in a pattern.
    """
    if (link := DESCRIPTORS / str(descriptor)).is_dir():
        return link
    if glob.has_magic(str(folder)):
        raise UserError(
            f'{folder}: expected a path without * ? [, as there is no {DESCRIPTORS} here; rename '
            'the folder'
        )
    return folder


def removed(descriptor: int) -> bool:
    """Returns True if an open file or folder no longer has a name."""
    try:
        return os.fstat(descriptor).st_nlink == 0
    except OSError:  # NFS
        return True
