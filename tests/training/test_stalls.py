"""A run whose devices no longer work ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from support.commands import ROOT
from support.counting_step import count_only
from support.tiny import tiny_config

from jaxunet.data.sources import open_images
from jaxunet.training import stalls
from jaxunet.training.classifier import train_classifier
from jaxunet.training.loop import train
from jaxunet.training.restarts import describe
from jaxunet.training.session import Session

# A program that takes SECONDS on the device, while the main thread waits in JAX.
SLOW = """
import pathlib, sys, time
import jax
from jaxunet.training.preemption import Preemption
from jaxunet.training.stalls import StallWatch

def slowly(seconds):
    return lambda x: (time.sleep(seconds), x)[1]

def slow(x, seconds):
    return jax.jit(lambda x: jax.pure_callback(slowly(seconds), x, x))(x)
"""
WAITS = """
x, stalled = jax.numpy.zeros(()), Preemption().stalled
for limit, times, seconds, process in {cases}:
    jax.process_index = lambda: process
    watch = StallWatch(limit, pathlib.Path('.'), stalled)
    for _ in range(times):
        result = slow(x, seconds)
        print('waits', flush=True)
        watch.wait(result)
    watch.close()
print('done', flush=True)
"""
TRAINS = """
sys.path.insert(0, 'tests')
from support.counting_step import count_only
from support.tiny import tiny_config
from jaxunet.data.sources import open_images
from jaxunet.training.loop import train
from jaxunet.training.session import Session

call, calls = Session.call, []

def stalled(self, data, stop=False):
    metrics = call(self, data, stop=stop)
    calls.append(metrics)
    return {{**metrics, 'loss': slow(metrics['loss'], 1000)}} if len(calls) > 2 else metrics

Session.call, Session.compile = stalled, count_only
config = tiny_config(train={{'steps': 9, 'checkpoint_every': 2, 'stall_seconds': 8.0}})
train(config, pathlib.Path({workdir!r}), open_images(config), caller=Preemption())
"""


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, '-c', SLOW + code],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_run_ends_and_says_what_is_saved(tmp_path):
    run = start(TRAINS.format(workdir=str(tmp_path / 'run')))
    _, errors = run.communicate(timeout=300)
    assert run.returncode == stalls.STALLED
    assert errors.strip().splitlines()[-1] == (
        'error: the devices finished no step within 8 s; step 2 is saved, and the same command '
        'resumes from there. If a step takes that long, raise train.stall_seconds'
    )
    assert describe(run.returncode).endswith('exit code 6: the devices finished no step')


def test_waits_that_do_not_end_a_process():
    """Many short ones, any without a limit, and those for process 0, which may measure samples."""
    waits = start(WAITS.format(cases=[(6, 8, 1, 0), (0, 1, 2, 0), (1, 1, 4, 1)]))
    output, errors = waits.communicate(timeout=300)
    assert waits.returncode == 0, errors
    assert output == 10 * 'waits\n' + 'done\n'


def test_a_step_that_does_not_begin_ends_a_process():
    run = start("StallWatch(1, pathlib.Path('.'), Preemption().stalled).call(time.sleep, 1000)")
    _, errors = run.communicate(timeout=300)
    assert run.returncode == stalls.STALLED
    assert 'within 1 s; there is no checkpoint yet.' in errors


@pytest.mark.parametrize('trained', [train, train_classifier], ids=['unet', 'classifier'])
def test_what_has_a_limit(trained, tmp_path, monkeypatch):
    """Starting steps, waiting for them or for checks of their state, and ending the session."""
    call, functions = stalls.StallWatch.call, []

    def spy(self, function, *args, **kwargs):
        functions.append(function.__name__)
        assert not self._closed.is_set()
        return call(self, function, *args, **kwargs)

    monkeypatch.setattr(stalls.StallWatch, 'call', spy)
    monkeypatch.setattr(Session, 'compile', count_only)
    labels = {'num_classes': 10} if trained is train_classifier else {}
    config = tiny_config(model=labels, train={'steps': 2})
    assert trained(config, tmp_path, open_images(config)) == 2
    assert set(functions) == {'call', 'block_until_ready', 'check', 'close'}
    assert functions[0] == 'call'
    assert functions[-1] == 'close'


def test_time_in_which_a_process_is_suspended_does_not_count():
    waits = start(WAITS.format(cases=[(6, 1, 2, 0)]))
    assert waits.stdout.readline() == 'waits\n'
    waits.send_signal(signal.SIGSTOP)
    time.sleep(7)
    waits.send_signal(signal.SIGCONT)
    _, errors = waits.communicate(timeout=300)
    assert waits.returncode == 0, errors
