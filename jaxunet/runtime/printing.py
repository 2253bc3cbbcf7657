"""Lets a command go on with its work when nobody can read what it prints.

stdout and stderr may be a pipe whose reader has ended (`| head`), a closed terminal, a file on a
full disk, or closed from the start.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

STREAMS = ('stdout', 'stderr')


class _Unfailing:
    """A text stream whose writes may fail. The first failure of stdout is told on stderr.

    A pipe whose reader has ended is no reason to tell anything: `| head` wants no more.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes the text, or drops it."""
        with self._attempt():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes the buffer, or keeps it if that fails."""
        with self._attempt():
            self._stream.flush()

    def settle(self) -> None:
        """Writes the buffer, or drops it: Python would try again at exit, and change the code."""
        self.flush()
        try:
            self._stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if self is sys.stdout and not (self._told or isinstance(error, BrokenPipeError)):
                self._told = True
                reason = error.strerror if isinstance(error, OSError) else error
                text = f'stdout: cannot be written ({reason}); what is printed there is lost'
                print(text, file=sys.stderr, flush=True)


def let_printing_fail() -> None:
    """Makes printing to stdout and stderr never raise, for the rest of the process.

    What the encoding of stdout lacks is printed as an escape.
    """
    if isinstance(sys.stdout, _Unfailing):
        return
    _reserve_descriptors()
    for name in STREAMS:
        stream = getattr(sys, name)
        if stream is None:  # it was closed before Python started
            stream = open(os.devnull, 'w', encoding='utf-8')  # noqa: SIM115
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # it has a buffer that cannot be written
                stream.reconfigure(errors='backslashreplace')
        setattr(sys, name, _Unfailing(stream))
    atexit.register(_settle)


def _reserve_descriptors() -> None:
    """Opens /dev/null in place of closed standard streams.

    Otherwise the next file that is opened would get the number, and with it everything that a
    library prints.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number


def _settle() -> None:
    for name in STREAMS:
        stream = getattr(sys, name)
        if isinstance(stream, _Unfailing):
            stream.settle()
