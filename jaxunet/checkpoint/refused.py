"""Tells a checkpoint that the system refuses to read from one that is damaged."""

from __future__ import annotations

import errno
import os
import pathlib
import re

from jaxunet.runtime.errors import ERROR, UserError

# What reading a damaged checkpoint may give, too: it may name other files, or lack some.
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG)
# A checksum or the format of a file was wrong. No other kind of error proves damage.
FORMAT = (
    UserError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    StopIteration,  # within a JSONDecodeError
    FileNotFoundError,  # orbax raises it without a number
    NotADirectoryError,
)
IN_TEXT = re.compile(r"os_error_code='(\d+)'")  # in TensorStore's messages
# TensorStore raises ValueError for everything, and names the kind first.
STATUS = re.compile(
    '(ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAVAILABLE'
    '|UNKNOWN):'
)


class RefusedError(UserError):
    """The system refused to read a checkpoint, which may be whole."""

    exit_code = ERROR  # so that --restarts tries again


def raise_if_whole(folder: pathlib.Path, error: BaseException) -> None:
    """Raises an error of reading a checkpoint that does not prove that its content is damaged.

    Args:
      folder: of the checkpoint.

    Raises:
      MemoryError: it is the error, or its cause.
      RefusedError: the system refused to read, as for lack of permission or of threads, an error of
        the disk, or too many open files.
    """
    reason, cause = '', error
    seen: BaseException | None = error
    while seen is not None and not reason:
        cause, reason = seen, _refusal(seen)
        seen = seen.__cause__ or seen.__context__
    if isinstance(cause, MemoryError):
        raise cause
    if reason:
        raise RefusedError(
            f'{folder}: cannot be read: {reason}. The checkpoint may be whole; repeat the command '
            'once it can be read, or move this folder away to go on from the checkpoint before'
        ) from cause


def _refusal(error: BaseException) -> str:
    """Returns why the system refused to read; '' if the error proves damage."""
    number = error.errno if isinstance(error, OSError) else None
    if match := IN_TEXT.search(str(error)):
        number = int(match[1])
    if number is not None:
        return '' if number in DAMAGE else os.strerror(number)
    if isinstance(error, FORMAT) and not STATUS.match(str(error)):
        return ''
    return (str(error).splitlines() or [''])[0] or type(error).__name__
