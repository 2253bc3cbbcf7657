"""Tells in one line what cannot be done with a file that the user named."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from jaxunet.runtime.errors import UserError, printable

KINDS = {
    stat.S_IFIFO: 'a FIFO',
    stat.S_IFSOCK: 'a socket',
    stat.S_IFCHR: 'a device',
    stat.S_IFBLK: 'a device',
}
WITHOUT_FILE = (errno.EMFILE, errno.ENFILE)  # also for pipes and sockets
# Other errors, such as a missing file, have messages where they arise, or are mistakes of jaxunet.
REFUSALS = frozenset(
    (
        errno.ENAMETOOLONG,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.ESTALE,
        *WITHOUT_FILE,
    )
)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns an OSError of the block that names a file, and is one of `REFUSALS`, into a UserError.

    The same holds for too many open files, for relative paths after the current folder was removed,
    and for a path with the character NUL, for which Python raises a ValueError.

    Raises:
      UserError: names the file and the system's reason.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and _is_relative(error.filename) and _is_removed():
            raise UserError(
                'the current folder was removed; change to another one (cd), and repeat the '
                'command there, or name files and folders by absolute paths'
            ) from None
        named = isinstance(error.filename, str | bytes)
        if error.errno not in REFUSALS or not (named or error.errno in WITHOUT_FILE):
            raise
        what = printable(os.fsdecode(error.filename)) if named else 'this process'
        raise UserError(f'{what}: {error.strerror}') from None
    except ValueError as error:
        if 'embedded null' not in str(error):
            raise
        raise UserError(
            'a path has the character NUL (\\0) in it, which no name of a file can have; check the '
            'paths that were given'
        ) from None


def check_regular(path: str | os.PathLike[str], flag: str = '') -> None:
    """Raises an error for a FIFO, a device or a socket.

    A FIFO makes a program that opens it wait for another one, perhaps for ever; a rename puts a
    file in place of a device for the whole system.

    Args:
      flag: the flag that gave the path; begins the message.

    Raises:
      UserError: the path is one of them.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # whoever opens it gets the same error
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = KINDS.get(stat.S_IFMT(mode), 'something else')
        begin = f'{flag}: ' if flag else ''
        raise UserError(f'{begin}{path}: expected a regular file, found {kind}; name another')


def _is_relative(filename: object) -> bool:
    """Returns True also for an error without a name, as of asking for the current folder itself."""
    return not isinstance(filename, str | bytes) or not os.path.isabs(filename)


def _is_removed() -> bool:
    """Returns True if the current folder of this process exists no longer."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False
