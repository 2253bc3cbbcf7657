"""Tells a checkpoint that the system refuses to read from one that is damaged."""

from __future__ import annotations

import errno
import os
import pathlib
import re

from jaxunet.runtime.distributed import ERROR
from jaxunet.runtime.errors import UserError

# What reading a damaged checkpoint may give, too: it may name other files, or lack some.
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG)
IN_TEXT = re.compile(r"os_error_code='(\d+)'")  # in TensorStore's messages


class RefusedError(UserError):
    """The system refused to read a checkpoint, which may be whole."""

    exit_code = ERROR  # so that --restarts tries again


def raise_if_whole(folder: pathlib.Path, error: Exception) -> None:
    """Raises an error of reading a checkpoint that says nothing about its content.

    Args:
      folder: of the checkpoint.

    Raises:
      MemoryError: it is the error.
      RefusedError: the file system refused to read, as for lack of permission, an error of the
        disk, or too many open files.
    """
    if isinstance(error, MemoryError):
        raise error
    number = error.errno if isinstance(error, OSError) else None
    if found := IN_TEXT.search(str(error)):
        number = int(found[1])
    if number is None or number in DAMAGE:
        return
    raise RefusedError(
        f'{folder}: cannot be read: {os.strerror(number)}. The checkpoint may be whole; repeat the '
        'command once it can be read, or move this folder away to go on from the checkpoint before'
    ) from error
