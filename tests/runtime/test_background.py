"""A command does not wait for its threads at its end."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.commands import ROOT

# Exits that are at once run none of Python's functions at exit.
COMMAND = """
import atexit, time
from jaxunet.config import cli
from jaxunet.runtime.background import Background
from jaxunet.runtime.errors import UserError

def main(argv):
    atexit.register(print, 'waited')
    Background(lambda: time.sleep({seconds})).result(lambda: {seconds} == 0)
    {end}

cli.run(main)
"""
ENDS = [
    ('return None', 0, ''),
    ('return 3', 3, ''),
    ("raise UserError('no step')", 2, 'error: no step\n'),
    ("raise ValueError('wrong')", 1, 'ValueError: wrong\n'),
]


def ended(seconds: int, end: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, '-c', COMMAND.format(seconds=seconds, end=end)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(('end', 'code', 'error'), ENDS)
def test_a_command_ends_while_a_thread_runs(end: str, code: int, error: str) -> None:
    done = ended(1000, end)
    assert (done.returncode, done.stdout) == (code, '')
    assert done.stderr.endswith(error)
    assert done.stderr.count(error) == 1 or not error


def test_a_command_ends_as_usual_after_its_threads() -> None:
    done = ended(0, 'return 3')
    assert (done.returncode, done.stdout, done.stderr) == (3, 'waited\n', '')
