"""A command does not wait for its threads at its end."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import pytest
from support.commands import ROOT
from support.tiny import tiny_config

from jaxunet.data.sources import open_images
from jaxunet.runtime import beside_steps
from jaxunet.runtime.background import Background
from jaxunet.sweep.measure import Programs
from jaxunet.training.held_out import HeldOutLoss
from jaxunet.training.loop import train
from jaxunet.training.session import Session

# Exits that are at once run none of Python's functions at exit.
COMMAND = """
import atexit, time
from jaxunet.runtime import command
from jaxunet.runtime.background import Background
from jaxunet.runtime.errors import UserError

def main(argv):
    atexit.register(print, 'waited')
    Background(lambda: time.sleep({seconds})).result(lambda: {seconds} == 0)
    {end}

command.run(main)
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


def test_a_program_waits_for_its_threads_at_exit() -> None:
    """Beside a thread that runs code of XLA, Python may crash where it ends."""
    program = (
        'import time\nfrom jaxunet.runtime.background import Background\n'
        "def work(): time.sleep(0.5); print('saved')\n"
        'Background(work); never = Background(lambda: time.sleep(1000)); never.abandon()'
    )
    done = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, 'saved\n'), done.stderr


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


def test_which_devices_are_several_gpus() -> None:
    gpu, cpu = SimpleNamespace(platform='gpu'), SimpleNamespace(platform='cpu')
    cases = [([gpu], False), ([gpu, gpu], True), ([cpu, cpu], False)]
    assert [beside_steps._several_gpus(devices) for devices, _ in cases] == [e for _, e in cases]


@pytest.mark.usefixtures('alone', 'counted_steps')
@pytest.mark.parametrize('devices', [1, 2])
def test_nothing_compiles_beside_steps_on_several_gpus(devices, tmp_path, monkeypatch) -> None:
    """Their collectives may wait for ever; steps on one GPU do not wait for the compiler."""
    monkeypatch.setattr(beside_steps, '_several_gpus', lambda found: len(found) > 1)
    compile_loss, call = HeldOutLoss.compile, Session.call
    stepped, beside = threading.Event(), []

    def compiled(self):
        assert devices > 1 or stepped.wait(60)
        return compile_loss(self)

    def called(self, *args, **options):
        beside.append(Background.running())
        stepped.set()
        return call(self, *args, **options)

    monkeypatch.setattr(HeldOutLoss, 'compile', compiled)
    monkeypatch.setattr(Session, 'call', called)
    config = tiny_config(
        parallel={'devices': devices},
        data={'holdout': 9},
        train={'steps': 2, 'holdout_every': 2, 'sample_every': 2},
    )
    assert train(config, tmp_path, open_images(config)) == 2
    assert beside[0] == (devices == 1)


@pytest.mark.usefixtures('alone')
def test_steps_compile_nothing_more(tmp_path, monkeypatch) -> None:
    """Metrics are read, and batches put on the devices, beside other steps."""
    call, counts = Session.call, []

    def called(self, *args, **options):
        metrics = call(self, *args, **options)
        counts.append(Programs())
        return metrics

    monkeypatch.setattr(Session, 'call', called)
    config = tiny_config(
        parallel={'devices': 2, 'mode': 'pmap'},
        data={'cache': 'stream'},
        # Several, which few tests have: JAX would have kept the programs of another test.
        train={'steps': 9, 'steps_per_call': 3, 'log_every': 3, 'checkpoint_every': 9},
    )
    assert train(config, tmp_path, open_images(config)) == 9
    assert [programs.made for programs in counts] == [0, 0, 0]
    jax.jit(lambda x: x + 1.5)(1.0)
    assert counts[0].made > 0, 'they are counted'
