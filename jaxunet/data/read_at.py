"""Reads parts of a file by their offsets, from any thread or process."""

from __future__ import annotations

import collections
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from jaxunet.runtime.errors import UserError

MOST_OPEN = 64  # files that a `ReadMany` keeps open
_OPENING, _CHOOSING = threading.Lock(), threading.Lock()


class ReadAt:
    """A function that reads a file by offset; the threads of a process share one descriptor.

    Unlike a memory map, it survives a file that is truncated while it is read.

    Args:
      path: a regular file.
      shown: its name in messages.
    """

    def __init__(self, path: Path, shown: str) -> None:
        self._path, self._shown = path, shown
        self._descriptor: int | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, '_descriptor': None}  # each process opens its own

    def _open(self) -> int:
        with _OPENING:
            if self._descriptor is None:
                try:
                    self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise UserError(f'{self._shown}: cannot be opened: {error.strerror}') from None
                weakref.finalize(self, os.close, self._descriptor)
            return self._descriptor

    def __call__(self, offset: int, size: int) -> bytes:
        """Returns `size` bytes from `offset`, or fewer at the end of the file.

        Raises:
          UserError: the system refuses it.
        """
        descriptor = self._open()
        parts = []
        while size > 0:
            try:
                part = os.pread(descriptor, size, offset)
            except OSError as error:
                raise UserError(
                    f'{self._shown}: cannot be read at byte {offset}: {error.strerror}'
                ) from None
            if not part:
                break
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b''.join(parts)


class ReadMany:
    """A function that reads several files by offset, of which few are open at a time.

    Args:
      paths: regular files.
      shown: their names in messages.
    """

    def __init__(self, paths: Sequence[Path], shown: Sequence[str]) -> None:
        self._paths, self._shown = paths, shown
        self._open = collections.OrderedDict[int, ReadAt]()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, '_open': collections.OrderedDict()}

    def __call__(self, file: int, offset: int, size: int) -> bytes:
        """Returns `size` bytes from `offset` of a file, given by its number; see `ReadAt`."""
        with _CHOOSING:
            reader = self._open.pop(file, None) or ReadAt(self._paths[file], self._shown[file])
            self._open[file] = reader
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)  # closes once no thread reads it
        return reader(offset, size)
