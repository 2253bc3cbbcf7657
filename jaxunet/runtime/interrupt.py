"""Signals that ask a command to stop.

Ctrl-C ends a command quietly, with the exit code of shells, even during its imports.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130  # exit code of shells after Ctrl-C
Handler = Callable[[int, FrameType | None], object]


def quiet_while_importing() -> None:
    """Makes Ctrl-C end `python -m jaxunet...` at once, until `raise_again`.

    While modules are imported, nothing runs that needs an orderly end. Nor is there any garbage to
    collect, which `jaxunet.runtime.command.run` turns on again: scanning what was imported takes a
    fifth of the time. Does nothing in other programs; keeps a Ctrl-C that is ignored, as in a
    shell's background jobs.
    """
    started = getattr(sys.modules['__main__'], '__spec__', None)
    if started is not None and started.name.partition('.')[0] == 'jaxunet':
        end_quietly()
        gc.disable()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Does for imports in the block what `quiet_while_importing` does for those before it."""
    end_quietly()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # as in `jaxunet.runtime.command.run`
        gc.enable()
        raise_again()


def end_quietly() -> None:
    """Makes Ctrl-C end this process at once, until `raise_again`, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, for commands that need an orderly end."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def terminating() -> tuple[signal.Signals, ...]:
    """Returns the signals besides Ctrl-C that ask a process to stop.

    The end of a terminal or a connection, SIGHUP, is one unless it is ignored, as under nohup.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Calls `handler` for Ctrl-C and the signals of `terminating` while the block runs.

    Only the main thread may do this.

    Args:
      handler: it may interrupt the main thread anywhere, even while that holds a lock. So it must
        take none: no printing, no logging, no `threading.Event.set`.
    """
    signals = (signal.SIGINT, *terminating())
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def interrupt_when_terminated() -> None:
    """Makes the signals of `terminating` raise KeyboardInterrupt, as Ctrl-C does.

    Only the first one does, as another would interrupt the orderly end.
    """
    signals = terminating()

    def stop(number: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in signals:
        signal.signal(number, stop)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
