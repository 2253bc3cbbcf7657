"""Ctrl-C ends a command with 130 and without a traceback, whatever it is doing."""

from __future__ import annotations

import ast
import gc
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from support.commands import ROOT

from jaxunet.data import pipeline
from jaxunet.runtime import command, interrupt, subprocesses
from jaxunet.training import preemption
from jaxunet.training.preemption import Preemption
from jaxunet.training.restarts import Supervisor

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


def test_every_command_is_quiet_before_its_imports():
    commands = [
        path for path in (ROOT / 'jaxunet').rglob('*.py') if 'command.run(main' in path.read_text()
    ]
    assert len(commands) > 12
    for path in commands:
        first = next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import))
        assert first.names[0].name == 'jaxunet.runtime.quiet', path


def test_other_programs_keep_their_handler(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    for module in (None, 'pytest.__main__', 'jaxunet_of_others'):
        started = SimpleNamespace(__spec__=module and SimpleNamespace(name=module))
        monkeypatch.setitem(sys.modules, '__main__', started)
        interrupt.quiet_while_importing()
        assert signal.getsignal(signal.SIGINT) is before


def test_garbage_is_not_collected_before_a_command_runs(monkeypatch):
    started = SimpleNamespace(__spec__=SimpleNamespace(name='jaxunet.train'), __doc__='')
    monkeypatch.setattr(interrupt, 'end_quietly', lambda: None)
    monkeypatch.setattr(command.app, 'run', lambda *_, **__: None)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, '__main__', started)
        interrupt.quiet_while_importing()
        assert not gc.isenabled()
        command.run(lambda _: None)
    assert gc.isenabled()


class Ended(BaseException):
    pass


@pytest.mark.parametrize(
    ('how', 'said'),
    [
        (KeyboardInterrupt(), 'interrupted'),
        (SystemError('an exception set'), 'interrupted'),
        (KeyboardInterrupt('stopped; go on'), 'stopped; go on'),
    ],
)
def test_while_a_command_runs(how, said, monkeypatch, capsys):
    def ended(code):
        raise Ended(code)

    def run(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise how from error

    monkeypatch.setattr(command.app, 'run', run)
    monkeypatch.setattr(command, 'end', ended)
    with pytest.raises(Ended, match='130'):
        command.run(lambda _: None)
    assert capsys.readouterr().err == f'\n{said}\n'


def handler_in(context):
    with context:
        return signal.getsignal(signal.SIGTERM)


HANDLERS = {
    'training': lambda _: handler_in(Preemption()),
    'supervisor': lambda folder: handler_in(
        Supervisor(['true'], folder, 1, environ={})._signals_passed_on()
    ),
    'start of a process': lambda _: handler_in(subprocesses._signals_deferred()),
    'worker': lambda _: pipeline._end_soon,
}


@pytest.mark.parametrize('name', HANDLERS)
def test_handlers_take_no_locks(name, tmp_path):
    """One that comes while the main thread holds the lock would wait for ever."""
    handler = HANDLERS[name](tmp_path)
    taken = []

    def profile(frame, event, argument):
        held = getattr(argument, '__self__', None)
        if event == 'c_call' and isinstance(
            held, (type(threading.Lock()), type(threading.RLock()))
        ):
            taken.append(frame.f_code)

    sys.setprofile(profile)
    try:
        handler(signal.SIGTERM, None)
    finally:
        sys.setprofile(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert not taken


@pytest.mark.parametrize('ignored', [False, True])
def test_the_end_of_a_terminal_saves_unless_it_is_ignored(ignored, capfd):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with Preemption() as asked:
            asked.nothing_to_save = False
            for _ in range(3):  # a shell and the system may both send it
                os.kill(os.getpid(), signal.SIGHUP)
            assert asked.requested is not ignored
            said = ''
            while not ignored and 'SIGHUP: finishing the steps' not in said:  # by the thread
                said += capfd.readouterr().err
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures('hangup')
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_to_stop_is_ctrl_c(number):
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        interrupt.interrupt_when_terminated()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # during the orderly end
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


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
        os.kill(os.getpid(), signal.SIGINT)  # `timeout` sends it to a process and to its group
        assert not ended.wait(preemption.ONE_REQUEST + 0.1)
        os.kill(os.getpid(), signal.SIGINT)
        assert ended.wait(10)
    assert codes == [130]
    first, second = capfd.readouterr().err.split('\n\n')
    assert 'then saving; a further Ctrl-C ends at once' in first
    assert 'ended without saving' in second
