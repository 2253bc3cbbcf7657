"""Ctrl-C ends a command with 130 and without a traceback, whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from support.commands import ROOT

from jaxunet.config import cli
from jaxunet.runtime import interrupt
from jaxunet.training import preemption
from jaxunet.training.preemption import Preemption

# Stands in for the first library that a command imports.
INTERRUPTS = 'import os, signal; os.kill(os.getpid(), signal.SIGINT); raise SystemExit(7)\n'


@pytest.mark.parametrize('command', ['train', 'sample', 'sweep', 'benchmark.kernels'])
def test_while_a_command_imports(command, tmp_path):
    for library in ('jax', 'numpy', 'absl'):
        (tmp_path / f'{library}.py').write_text(INTERRUPTS)
    done = subprocess.run(
        [sys.executable, '-S', '-m', f'jaxunet.{command}'],
        env=os.environ | {'PYTHONPATH': str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, '', '')


def test_other_programs_keep_their_handler(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    for program in (['pytest'], ['-c'], ['']):
        monkeypatch.setattr(sys, 'argv', program)
        interrupt.quiet_while_importing()
        assert signal.getsignal(signal.SIGINT) is before


class Ended(BaseException):
    pass


@pytest.mark.parametrize('how', [KeyboardInterrupt, SystemError])
def test_while_a_command_runs(how, monkeypatch):
    def ended(code):
        raise Ended(code)

    def run(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise how from error

    monkeypatch.setattr(cli.app, 'run', run)
    monkeypatch.setattr(cli, 'end', ended)
    with pytest.raises(Ended, match='130'):
        cli.run(lambda _: None)


def test_twice_while_training(monkeypatch, capfd):
    """The first one is a request; the second ends the process from a thread, without an exception
    that would surface in a library.
    """
    codes, ended = [], threading.Event()

    def end(code):
        codes.append(code)
        ended.set()

    monkeypatch.setattr(preemption, 'end', end)
    with Preemption() as asked:
        asked.nothing_to_save = False
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.requested
        assert not ended.wait(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        assert ended.wait(10)
    assert codes == [130]
    first, second = capfd.readouterr().err.split('\n\n')
    assert 'then saving; a further Ctrl-C ends at once' in first
    assert 'ended without saving' in second
