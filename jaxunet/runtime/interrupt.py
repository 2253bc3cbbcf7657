"""Ctrl-C ends a command quietly, with the exit code of shells, even while it still imports."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # exit code of shells after Ctrl-C


def quiet_while_importing() -> None:
    """Makes Ctrl-C end `python -m jaxunet...` at once, until `raise_again`.

    Nothing is running yet that must be ended in order. Does nothing in other programs, and where
    Ctrl-C is ignored, as in a shell's background jobs.
    """
    # Python uses this name until it has found the module, which imports its package.
    if sys.argv[:1] == ['-m'] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, for commands that have to end in order."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
