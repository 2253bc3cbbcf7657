"""Several benchmarks on one GPU: they compile beside each other, and each measures alone."""

from __future__ import annotations

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from jaxunet.runtime.errors import UserError


def compiling(lock: str) -> AbstractContextManager[None]:
    """Waits until no benchmark with this lock file measures, and lets none begin to measure.

    Args:
      lock: a file, made if there is none; '' if the GPU is not shared.
    """
    return _held(lock, fcntl.LOCK_SH)


def measuring(lock: str) -> AbstractContextManager[None]:
    """Waits until no other benchmark with this lock file compiles or measures, and keeps them off.

    Args:
      lock: as for `compiling`.
    """
    return _held(lock, fcntl.LOCK_EX)


@contextlib.contextmanager
def _held(lock: str, operation: int) -> Iterator[None]:
    if not lock:
        yield
        return
    path = pathlib.Path(lock)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('a') as file:
        try:
            fcntl.flock(file, operation)  # closing the file releases it
        except OSError as error:
            raise UserError(
                f'--lock: {lock}: cannot be locked: {error.strerror}; name a file on a disk of '
                'this machine'
            ) from None
        yield
