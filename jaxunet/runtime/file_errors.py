"""Tells in one line what the system refuses to do with a file that the user named."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from jaxunet.runtime.errors import UserError, printable

# Other errors, such as a missing file, have messages where they arise, or are mistakes of jaxunet.
REFUSALS = frozenset(
    (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EROFS, errno.ENOSPC)
)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns an OSError of the block that names a file, and is one of `REFUSALS`, into a UserError.

    Raises:
      UserError: names the file and the system's reason.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS or not isinstance(error.filename, str | bytes):
            raise
        raise UserError(f'{printable(os.fsdecode(error.filename))}: {error.strerror}') from None
