"""The processes of a comparison: how they start, start again, and stop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time

import pytest
from support.commands import environment, python_path
from support.queues import TINY
from support.untrained_features import write_untrained

from jaxunet.compare.queue_process import STALLED, QueueProcess, run_all
from jaxunet.runtime.errors import UserError

# Each writes a file at its start; this one waits for SIGTERM, and then saves.
WAIT = """
import pathlib, signal
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('saved').touch(), exit(130)))
pathlib.Path('begun').touch()
while True:
    signal.pause()
"""
STALL = f"open('begun', 'a').write('.'); raise SystemExit({STALLED})"


@pytest.fixture
def make(tmp_path):
    """Returns a function that makes a process that runs a program in the folder of its number."""
    logs = []

    def make(number, program):
        folder = tmp_path / str(number)
        folder.mkdir()
        logs.append((folder / 'log').open('w'))
        run = f'import os; os.chdir({str(folder)!r}); exec({program!r})'
        command = [sys.executable, '-c', run]
        return QueueProcess(number, lambda: command, os.environ, set(), logs[-1])

    yield make
    for log in logs:
        log.close()


@pytest.mark.parametrize(
    ('module', 'flag'), [('jaxunet.compare', '--file'), ('jaxunet.compare.queue', '--jobs')]
)
def test_the_time_limit_counts_from_before_the_imports(module, flag, tmp_path):
    """They take two seconds longer here than the limit."""
    (tmp_path / 'study.toml').write_text(
        TINY.read_text()
        .replace('../../../runs/features_tiny.npz', str(write_untrained(tmp_path)))
        .replace('../../../', f'{TINY.parents[3]}/')
        .replace('"PROTOCOL.md"', f'"{TINY.parent}/PROTOCOL.md"')
    )
    arguments = [f'{flag}={tmp_path}/study.toml', '--limit=1', f'--output={tmp_path}/out']
    run = (
        'import jaxunet.compare, runpy, sys, time\n'
        "assert 'jax' not in sys.modules\n"
        'time.sleep(3)\n'
        f'sys.argv = {[module, *arguments]}\n'
        f"runpy.run_module('{module}', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, '-c', run]
    env = environment() | {'PYTHONPATH': python_path()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    left = re.findall('left out, (.*) s are left', done.stdout)
    assert left
    assert all(int(seconds) <= -2 for seconds in left)


def test_a_process_that_is_asked_to_stop_does_not_start_again(make, tmp_path, monkeypatch):
    """The request comes after its devices stalled, just before it would start again."""
    process, start = make(1, STALL), QueueProcess.start

    def start_late(process):
        process.stop()
        return start(process)

    process.start()
    monkeypatch.setattr(QueueProcess, 'start', start_late)
    assert process.follow() == STALLED
    assert (tmp_path / '1/begun').read_text() == '.'


@pytest.mark.parametrize(
    ('owner', 'name', 'error'),
    [
        (subprocess.Popen, '__init__', BlockingIOError(11, 'Resource temporarily unavailable')),
        (threading.Thread, 'start', RuntimeError("can't start new thread")),
    ],
)
def test_one_that_cannot_be_started_stops_the_others(
    owner, name, error, make, tmp_path, monkeypatch
):
    """The first process saves and ends; the second one does, too, if it only lacks a thread."""
    real, calls = getattr(owner, name), []

    def fail(self, *arguments, **options):
        if calls:
            while not (tmp_path / '1/begun').exists():
                time.sleep(0.01)
            raise error
        calls.append(self)
        real(self, *arguments, **options)

    processes = [make(number, WAIT) for number in (1, 2, 3)]
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(UserError) as found:
        run_all(processes)
    assert str(found.value) == (
        f'process 2 of 3 cannot be started: {error}; the others were stopped. The same command '
        'goes on from here'
    )
    assert (tmp_path / '1/saved').exists()
    assert not (tmp_path / '3/begun').exists()


def test_a_stalled_one_that_cannot_be_started_again(make, tmp_path, monkeypatch, capsys):
    """It counts as stalled, and the other processes are not stopped."""
    real = QueueProcess.start

    def start(process):
        if process is first and (tmp_path / '1/begun').exists():
            raise BlockingIOError(11, 'Resource temporarily unavailable')
        return real(process)

    first, second = make(1, STALL), make(2, STALL)
    monkeypatch.setattr(QueueProcess, 'start', start)
    assert run_all([first, second]) == [STALLED, STALLED]
    assert [(tmp_path / f'{n}/begun').read_text() for n in (1, 2)] == ['.', '....']
    assert '1: it cannot start again: [Errno 11] Resource' in capsys.readouterr().out
