"""Makes the folder of a run, and locks it against a second run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import TextIO

import jax
from absl import logging

from jaxunet.checkpoint.snapshots import FOLDER as SNAPSHOTS
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.file_errors import check_regular
from jaxunet.runtime.paths import check_local, file_above, why_missing
from jaxunet.runtime.plain_path import DESCRIPTORS, removed
from jaxunet.runtime.whole_files import remove_left

FILE = '.lock'


class Lock:
    """Lock of process 0 on the folder of its run; the other processes have none.

    Args:
      flag: the flag that gave the folder; begins the messages.

    Raises:
      UserError: another run holds the lock, or the folder cannot be written.
    """

    def __init__(self, workdir: pathlib.Path, flag: str) -> None:
        self._workdir, self._flag = workdir, flag
        self._file = _locked(workdir, flag) if jax.process_index() == 0 else None

    def close(self) -> None:
        """Gives the lock up."""
        if self._file is not None:
            self._file.close()

    def why_lost(self) -> str:
        """Returns '', or why the path of the folder no longer leads to the folder that is locked.

        A folder that was removed is made and locked anew.
        """
        if self._file is None:
            return ''
        held = os.fstat(self._file.fileno())
        try:
            there = os.stat(self._workdir / FILE)
            if (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino):
                return ''
        except (FileNotFoundError, NotADirectoryError):
            if removed(self._file.fileno()):
                return self._lock_anew()
        except OSError as error:  # it cannot be told, and writing will fail or not
            logging.warning('%s: %s: %s', self._flag, self._workdir, error.strerror or error)
            return ''
        lost = f'{self._flag}: {self._workdir} is no longer the folder of this run'
        if (moved := self.moved_to()) is None:
            return f'{lost}: it was removed, and another is there now; nothing is written to that'
        return (
            f'{lost}, which was moved to {moved}; the run ends, and is saved there: go on with '
            f'{self._flag} {moved}'
        )

    def check(self) -> None:
        """Raises a UserError with `why_lost`."""
        if lost := self.why_lost():
            raise UserError(lost)

    def moved_to(self) -> pathlib.Path | None:
        """Returns where the locked folder is; None if it was removed, or that cannot be told."""
        if self._file is None or removed(self._file.fileno()):
            return None
        try:
            return pathlib.Path(os.readlink(DESCRIPTORS / str(self._file.fileno()))).parent
        except OSError:  # no /proc
            return None

    def _lock_anew(self) -> str:
        try:
            self._workdir.mkdir(parents=True, exist_ok=True)
            anew = _locked(self._workdir, self._flag)
        except OSError as error:
            return f'{self._flag}: {self._workdir}: cannot be made: {error.strerror or error}'
        except UserError as error:
            return str(error)
        self.close()
        self._file = anew
        return ''


@contextlib.contextmanager
def opened(workdir: pathlib.Path, flag: str = '--workdir') -> Iterator[Lock]:
    """Makes the workdir and locks it for process 0 of this run; the lock ends with the block.

    Removes what a killed run has left half-written in it.

    Args:
      flag: the flag that gave the folder; begins the messages.

    Raises:
      UserError: another run holds the lock, or the folder cannot be made or written.
    """
    check_local(workdir, flag)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unmade(workdir, flag, error) from None
    with contextlib.closing(Lock(workdir, flag)) as lock:
        if jax.process_index() == 0:
            for folder in (workdir, workdir / 'samples', workdir / SNAPSHOTS):
                remove_left(folder)
        yield lock


def check_makeable(workdir: pathlib.Path, flag: str = '--workdir') -> None:
    """Checks that `opened` could make the workdir and write to it; changes nothing.

    Another run may hold the lock.

    Raises:
      UserError: as `opened`.
    """
    check_local(workdir, flag)
    nearest = workdir
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    there = nearest == workdir
    if not nearest.is_dir():
        raise _unmade(workdir, flag, _error(errno.EEXIST if there else errno.ENOTDIR))
    if not os.access(nearest, os.W_OK | os.X_OK):
        refused = _unwritable if there else _unmade
        raise refused(workdir, flag, _error(errno.EACCES))


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def _unmade(workdir: pathlib.Path, flag: str, error: OSError) -> UserError:
    why = why_missing(workdir) or file_above(workdir) or f': {error.strerror or error}'
    return UserError(f'{flag}: {workdir}: cannot be made{why}; choose another')


def _unwritable(workdir: pathlib.Path, flag: str, error: OSError) -> UserError:
    why = error.strerror or error
    return UserError(f'{flag}: {workdir}: cannot be written: {why}; choose another')


def _locked(workdir: pathlib.Path, flag: str) -> TextIO:
    """Returns the lock file, open and locked.

    Raises:
      UserError: another run holds the lock, or the file cannot be written.
    """
    check_regular(workdir / FILE)
    try:
        file = (workdir / FILE).open('w')
    except OSError as error:
        raise _unwritable(workdir, flag, error) from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise UserError(
            f'{flag}: another run is training in {workdir}; wait until it ends, or choose another '
            'folder'
        ) from None
    except OSError as error:  # a file system without locks
        logging.warning(
            '%s: %s cannot be locked (%s): nothing keeps a second run out of it',
            flag,
            workdir,
            error.strerror or error,
        )
    return file
