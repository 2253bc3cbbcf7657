"""A plugin of pytest for `sanitizer_run`, which watches another process from outside: it writes the
begin and the end of each test to a file, and the Python stacks when asked by a signal.

The variable SANITIZER_PROGRESS names the folder of these files; without it, nothing is written.
Loaded through PYTEST_PLUGINS.
"""

from __future__ import annotations

import faulthandler
import os
import pathlib
import signal

VARIABLE = 'SANITIZER_PROGRESS'
TESTS, STACKS, PROCESS = 'tests', 'stacks', 'process'  # files of the folder
# Without the variable, no process that a test starts writes to the same files.
_folder = os.environ.pop(VARIABLE, '')

if _folder:
    # C code writes the stacks, at once, even if a thread in C++ holds the interpreter's lock. The
    # file stays open: pytest would catch what goes to stderr.
    _stacks = (pathlib.Path(_folder) / STACKS).open('w', encoding='utf-8')
    faulthandler.register(signal.SIGUSR1, file=_stacks, all_threads=True)
    # Last: it says that the signal may be sent.
    (pathlib.Path(_folder) / PROCESS).write_text(str(os.getpid()), encoding='utf-8')


def pytest_runtest_logstart(nodeid: str) -> None:
    _write('begin', nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _write('end', nodeid)


def _write(event: str, nodeid: str) -> None:
    if _folder:
        with (pathlib.Path(_folder) / TESTS).open('a', encoding='utf-8') as file:
            file.write(f'{event} {nodeid}\n')
