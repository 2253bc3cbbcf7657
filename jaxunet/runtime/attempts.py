"""Lets a run continue while writes fail, for example on a full or read-only disk."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator

from absl import logging

from jaxunet.runtime.errors import UserError

LIMIT = 1 << 24  # most bytes that are kept in memory until they can be written


class Attempts:
    """Attempts that may fail; each kind warns once, and again only after it has worked."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    @contextlib.contextmanager
    def attempt(self, kind: str) -> Iterator[None]:
        """Catches an error in the block that the disk can cause, and warns.

        Args:
          kind: what the block writes; the warning begins with it.
        """
        try:
            yield
        except (OSError, UserError) as error:
            if kind not in self._failing:
                self._failing.add(kind)
                logging.warning(
                    '%s: cannot be written (%s); the run goes on, and tries again', kind, error
                )
        else:
            if kind in self._failing:
                self._failing.remove(kind)
                logging.info('%s: is written again', kind)


class PatientFile:
    """A file that only grows, and whose writes may fail for a while.

    Data that cannot be written are kept, up to `LIMIT` bytes, and written together with later data.
    A write that fails half-way is undone. The file and its folder may be removed between writes.

    Args:
      start: beginning of a new file, such as the header of a table.
      content: replaces the whole file, `start` included; None appends to it.
    """

    def __init__(
        self, path: pathlib.Path, *, start: bytes = b'', content: bytes | None = None
    ) -> None:
        self.path, self._start, self._content = path, start, content
        self._pending = b''
        self._attempts = Attempts()

    def write(self, data: bytes = b'') -> None:
        """Appends the data that earlier writes could not append, then this data."""
        self._pending += data
        with self._attempts.attempt(str(self.path)):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._content is None:
                self._append()
            else:
                self._replace(self._content)
            self._content, self._pending = None, b''
        if len(self._pending) > LIMIT:
            lost, self._pending = len(self._pending), b''
            logging.warning('%s: %d bytes that could not be written are lost', self.path, lost)

    def close(self) -> None:
        """Tries once more to write what could not be written; otherwise touches nothing."""
        if self._pending or self._content is not None:
            self.write()

    def _append(self) -> None:
        with self.path.open('ab', buffering=0) as file:
            size = file.tell()
            try:
                _write(file.fileno(), self._pending if size else self._start + self._pending)
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise

    def _replace(self, content: bytes) -> None:
        temporary = self.path.with_name(f'{self.path.name}.tmp')
        try:
            with temporary.open('wb', buffering=0) as file:
                _write(file.fileno(), content + self._pending)
            os.replace(temporary, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _write(descriptor: int, data: bytes) -> None:
    """Writes all of the data; a full disk may take a part of it before it fails."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def quietly(what: str, close: Callable[[], object]) -> None:
    """Calls `close` at the end of a block; its exception becomes a warning.

    Otherwise it would replace the error that ended the block.
    """
    try:
        close()
    except Exception as error:
        logging.warning('%s: closing failed (%s: %s)', what, type(error).__name__, error)
