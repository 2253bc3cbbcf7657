"""A pytest plugin with which `sanitizer_run` watches the tests of another process.

It writes the begin and the end of each test to a file, and on a signal the Python stacks. The
environment variable SANITIZER_PROGRESS names the folder of these files; without it, nothing is
written. PYTEST_PLUGINS loads the plugin.
"""

from __future__ import annotations

import faulthandler
import os
import pathlib
import signal

VARIABLE = 'SANITIZER_PROGRESS'
TESTS, STACKS, PROCESS = 'tests', 'stacks', 'process'  # files of the folder
# Removed, so that processes that a test starts do not write to the same files.
_folder = os.environ.pop(VARIABLE, '')

if _folder:
    # C code writes the stacks at once, even if a thread in C++ holds the interpreter's lock. They
    # go to a file that stays open, because pytest captures stderr.
    _stacks = (pathlib.Path(_folder) / STACKS).open('w', encoding='utf-8')
    faulthandler.register(signal.SIGUSR1, file=_stacks, all_threads=True)
    # Written last, because this file shows that the signal may be sent.
    (pathlib.Path(_folder) / PROCESS).write_text(str(os.getpid()), encoding='utf-8')


def pytest_runtest_logstart(nodeid: str) -> None:
    _write('begin', nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _write('end', nodeid)


def _write(event: str, nodeid: str) -> None:
    if _folder:
        with (pathlib.Path(_folder) / TESTS).open('a', encoding='utf-8') as file:
            file.write(f'{event} {nodeid}\n')
