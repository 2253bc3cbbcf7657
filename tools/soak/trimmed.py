"""Runs `jaxunet.train`, and returns to the system, every few seconds, the memory that it has freed.

    PYTHONPATH=.:tests python -m tools.soak.trimmed FLAGS

glibc keeps freed memory for later, and returns it at some moment: after compiling a step, 160 of
730 MiB were free, and one run gave 100 of them back after 17 minutes. That would hide a slow
growth of what is in use.
"""

from __future__ import annotations

import ctypes
import runpy
import sys
import threading

SECONDS = 15.0


def main() -> None:
    """Becomes the command, with a thread that trims the heap."""
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)
    if trim is None:
        sys.exit('tools.soak.trimmed: expected glibc, found a C library without malloc_trim')
    stopped = threading.Event()

    def work() -> None:
        while not stopped.wait(SECONDS):
            trim(0)

    threading.Thread(target=work, daemon=True, name='trim').start()
    try:
        runpy.run_module('jaxunet.train', run_name='__main__', alter_sys=True)
    finally:
        stopped.set()


if __name__ == '__main__':
    main()
