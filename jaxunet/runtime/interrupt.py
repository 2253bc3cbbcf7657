"""Makes Ctrl-C end a command quietly, with the exit code of shells, even during its imports."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # exit code of shells after Ctrl-C


def quiet_while_importing() -> None:
    """Makes Ctrl-C end `python -m jaxunet...` at once, until `raise_again`.

    While modules are imported, nothing runs that needs an orderly end. Does nothing in other
    programs, or if Ctrl-C is ignored, as in a shell's background jobs.
    """
    # sys.argv[0] is '-m' while Python looks for the module, and so while its package is imported.
    if sys.argv[:1] == ['-m']:
        end_quietly()


def end_quietly() -> None:
    """Makes Ctrl-C end this process at once, until `raise_again`, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, for commands that need an orderly end."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
