"""Processes of measurements end with the command that started them, whenever it is interrupted."""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest

from jaxunet.runtime import subprocesses as processes

SLEEP = [sys.executable, '-c', 'import time; time.sleep(60)']


class Recorded(subprocess.Popen):
    """A Popen that a signal meets while it starts."""

    started: ClassVar[list['Recorded']] = []
    signal_self = False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.started.append(self)
        if self.signal_self:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(Recorded, 'started', [])
    monkeypatch.setattr(subprocess, 'Popen', Recorded)
    return Recorded.started


def test_a_signal_while_a_process_starts_ends_it(started, monkeypatch):
    monkeypatch.setattr(Recorded, 'signal_self', True)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        processes.answer(SLEEP, dict(os.environ), 60, None)
    assert [p.returncode for p in started] == [-signal.SIGKILL]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_pool_ends_its_processes_and_starts_no_other(started):
    """A killed process gives no result, and is not taken for one that ran out of memory."""
    results = []

    def work(number, _):
        for _ in range(2):
            results.append((number, processes.answer(SLEEP, dict(os.environ), 60, None)))

    def interrupt():
        while len(started) < 2:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    timer = threading.Thread(target=interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        processes.share([(i, 1) for i in range(4)], ['0', '1'], work)
    timer.join()
    assert [p.returncode for p in started] == [-signal.SIGKILL] * 2
    assert not results
    assert (
        processes.answer([sys.executable, '-c', 'print("{}")'], dict(os.environ), 60, None).row
        == {}
    )


def test_processes_beside_each_other_share_the_cores():
    cores = sorted(os.sched_getaffinity(0))
    command = [
        sys.executable,
        '-c',
        'import json, os; print(json.dumps({"cores": sorted(os.sched_getaffinity(0))}))',
    ]
    found = {}

    def work(number, gpus):
        found[number] = (gpus, processes.answer(command, dict(os.environ), 60, None).row['cores'])

    processes.share([(0, 1), (1, 1), (2, 2)], ['0', '1'], work)
    half = len(cores) // 2
    parts = {'0': cores[:half], '1': cores[half : 2 * half]} if half else {'0': cores, '1': cores}
    assert [own for _, own in (found[0], found[1])] == [parts[found[i][0][0]] for i in (0, 1)]
    assert found[2][1] == (cores[: 2 * half] if half else cores)
    assert sorted(os.sched_getaffinity(0)) == cores  # this thread's own


# Writes a line once it waits; at SIGTERM it saves, or waits on.
WAIT = """
import pathlib, signal, sys
def stop(number, frame):
    pathlib.Path(sys.argv[1]).touch()
    if sys.argv[2] == 'save':
        sys.exit(130)
signal.signal(signal.SIGTERM, stop)
print('waits', flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize('act', ['save', 'wait'])
def test_a_pool_may_let_its_processes_save(act, started, tmp_path):
    """Those that do not end are killed by the next signal."""
    said, main = [], threading.main_thread().ident

    def run(number):
        command = [sys.executable, '-c', WAIT, str(tmp_path / f'asked{number}'), act]
        with (tmp_path / f'log{number}').open('w') as log:
            processes.follow(command, os.environ, log, said.append)

    def interrupt():
        while len(said) < 2:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)
        while len(list(tmp_path.glob('asked*'))) < 2:
            time.sleep(0.01)
        if act == 'wait':
            signal.pthread_kill(main, signal.SIGINT)

    timer = threading.Thread(target=interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt), processes.pool(2, signal.SIGTERM) as threads:  # noqa: PT012
        for future in [threads.submit(run, number) for number in (1, 2, 3)]:
            future.result()
    timer.join()
    code = 130 if act == 'save' else -signal.SIGKILL
    assert [p.returncode for p in started] == [code] * 2, 'the third did not start'
    assert said == ['waits\n'] * 2
