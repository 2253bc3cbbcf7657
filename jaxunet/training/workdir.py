"""Makes the folder of a run, and locks it against a second run."""

from __future__ import annotations

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

import jax
from absl import logging

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.file_errors import check_regular
from jaxunet.runtime.whole_files import remove_left


@contextlib.contextmanager
def opened(workdir: pathlib.Path, flag: str = '--workdir') -> Iterator[None]:
    """Makes the workdir and locks it for process 0 of this run; the lock ends with the process.

    Removes what a killed run has left half-written in it.

    Args:
      flag: the flag that gave the folder; begins the messages.

    Raises:
      UserError: another run holds the lock, or the folder cannot be made or written.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f'{flag}: {workdir}: cannot be made: {error.strerror or error}; choose another'
        ) from None
    if jax.process_index() != 0:
        yield
        return
    check_regular(workdir / '.lock')
    try:
        file = (workdir / '.lock').open('w')
    except OSError as error:
        raise UserError(
            f'{flag}: {workdir}: cannot be written: {error.strerror or error}; choose another'
        ) from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(
                f'{flag}: another run is training in {workdir}; wait until it ends, or choose '
                'another folder'
            ) from None
        except OSError as error:  # a file system without locks
            logging.warning(
                '%s: %s cannot be locked (%s): nothing keeps a second run out of it',
                flag,
                workdir,
                error.strerror or error,
            )
        for folder in (workdir, workdir / 'samples'):
            remove_left(folder)
        yield
