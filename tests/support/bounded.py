"""Bounds what reading a file may cost, and checks how a reader refuses it."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import time
from collections.abc import Callable, Iterator

from jaxunet.runtime.errors import UserError

SECONDS = 5.0  # processor time of this process
MEBIBYTES = 400  # growth of memory while the file is read
LONGEST = 3000  # most characters of a message


class TooLong(BaseException):
    """Raised when a reader takes longer than its limit; no reader catches it."""


def memory(field: str) -> float:
    """Returns VmRSS or VmHWM of this process in MiB."""
    for line in pathlib.Path('/proc/self/status').read_text().splitlines():
        if line.startswith(f'{field}:'):
            return int(line.split()[1]) / 1024
    raise LookupError(field)


@contextlib.contextmanager
def bounded(seconds: float = SECONDS, mebibytes: float = MEBIBYTES) -> Iterator[None]:
    """Fails if its block takes more processor time or memory."""

    def late(*_: object) -> None:
        raise TooLong(f'more than {seconds} s')

    pathlib.Path('/proc/self/clear_refs').write_text('5')  # sets VmHWM to VmRSS
    before, began = memory('VmRSS'), time.process_time()
    previous = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
    took, grew = time.process_time() - began, memory('VmHWM') - before
    assert took < 1.5 * seconds, f'took {took:.1f} s'  # C code is not interrupted
    assert grew < mebibytes, f'took {grew:.0f} MiB'


def outcome(read: Callable[[pathlib.Path], object], path: pathlib.Path) -> str:
    """Reads a file; returns '' if that worked, or the message of the error that refused it."""
    with bounded():
        try:
            read(path)
        except UserError as error:
            text = str(error)
        else:
            return ''
    assert 'Traceback' not in text, text
    assert len(text) < LONGEST, f'{len(text)} characters: {text[:LONGEST]}'
    assert text.replace('\n', ' ').isprintable(), repr(text)
    text.encode()
    return text
