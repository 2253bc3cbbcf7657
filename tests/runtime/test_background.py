"""A command does not wait for its threads at its end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from support.commands import ROOT

from jaxunet.runtime.background import Background

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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what earlier tests of this process still run."""
    monkeypatch.setattr(Background, '_all_running', set())


@pytest.mark.usefixtures('alone')
def test_a_thread_runs_from_its_start_to_its_end() -> None:
    """Its name does not matter, and a thread of another program may have the same."""
    renamed, may_end = threading.Event(), threading.Event()
    names = []

    def function() -> str:
        names.append(threading.current_thread().name)
        threading.current_thread().name = 'another'
        renamed.set()
        assert may_end.wait(60)
        return 'done'

    assert not Background.running()
    task = Background(function)
    assert renamed.wait(60)
    assert Background.running()
    may_end.set()
    assert task.wait() == 'done'
    stranger = threading.Thread(target=may_end.wait, name=names[0])
    may_end.clear()
    stranger.start()
    assert not Background.running()
    may_end.set()
    stranger.join()


@pytest.mark.usefixtures('alone')
def test_a_function_that_fails_runs_no_more() -> None:
    with pytest.raises(ZeroDivisionError):
        Background(lambda: 1 / 0).wait()
    assert not Background.running()


@pytest.mark.usefixtures('alone')
def test_a_thread_that_cannot_start_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, 'start', fail)
    with pytest.raises(RuntimeError, match='new thread'):
        Background(str)
    assert not Background.running()
