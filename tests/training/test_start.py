"""A fresh run draws its weights in a thread while it compiles its step."""

import itertools
import threading

import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import Checkpoints, checksum, state_template
from jaxunet.data.sources import open_images
from jaxunet.runtime import compiled_cache
from jaxunet.runtime.errors import UserError
from jaxunet.training import loop, resume
from jaxunet.training.clock import Clock
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train
from jaxunet.training.session import Session

pytestmark = pytest.mark.usefixtures('shared_steps')

CONFIG = tiny_config(train={'steps': 2})


@pytest.fixture(scope='module')
def source():
    return open_images(CONFIG)


def test_the_step_does_not_wait_for_the_weights(source, tmp_path, monkeypatch):
    """It is compiled before they are drawn, and the run is that of weights drawn before."""
    compiled, threads = threading.Event(), []
    compile_step = Session.compile

    def late(config, draw):
        threads.append(threading.current_thread())
        assert compiled.wait(60), 'the step waits for the weights'
        return fresh_state(config, draw)

    def early(self, **options):
        step = compile_step(self, **options)
        compiled.set()
        return step

    monkeypatch.setattr(resume, 'fresh_state', late)
    monkeypatch.setattr(Session, 'compile', early)
    assert train(CONFIG, tmp_path / 'beside', source) == 2
    assert threads[0] is not threading.main_thread()
    assert not threads[0].is_alive()
    assert train(CONFIG, tmp_path / 'before', source, fresh_state(CONFIG)) == 2
    assert len(threads) == 1
    ends = [checkpoint.read(tmp_path / name).state for name in ('beside', 'before')]
    assert checksum(ends[0]) == checksum(ends[1])


def test_training_time_leaves_out_the_compiling_of_other_processes(source, tmp_path, monkeypatch):
    """A process whose step is ready first waits before it starts its clock."""
    waited = 100.0
    seconds = itertools.count()  # what a clock reads, one more each time
    late = [0.0]
    monkeypatch.setattr(loop, 'wait_for_others', lambda place: late.append(waited))
    monkeypatch.setattr(
        loop, 'Clock', lambda step, before: Clock(step, before, lambda: next(seconds) + late[-1])
    )
    assert train(CONFIG, tmp_path, source) == 2
    assert late[1:] == [waited]
    assert 0 < float(read_metrics(tmp_path / 'metrics.csv')[-1]['training_seconds']) < waited


@pytest.mark.parametrize('error', [UserError('model: no'), MemoryError('no room')])
def test_an_error_of_the_draw_is_that_of_the_run(error, source, tmp_path, monkeypatch):
    def failing(config, draw):
        raise error

    monkeypatch.setattr(resume, 'fresh_state', failing)
    with pytest.raises(type(error), match=str(error)) as raised:
        train(CONFIG, tmp_path, source)
    assert raised.value is error
    assert not list((tmp_path / checkpoint.FOLDER).iterdir())


def test_a_run_that_resumes_draws_nothing(source, tmp_path, monkeypatch):
    train(CONFIG, tmp_path, source)
    monkeypatch.setattr(resume, 'fresh_state', None)
    checkpoints = Checkpoints(tmp_path, keep=3)
    begin = resume.starting_point(CONFIG, tmp_path, checkpoints, (), None)
    checkpoints.close()
    assert begin.step == int(begin.state().step) == 2
    assert begin.shapes is begin.state()


@pytest.mark.parametrize('mode', ['jit', 'pmap'])
def test_shapes_compile_the_step_of_their_arrays(mode, source):
    """The program is the same, and so is the key under which it is kept."""
    config = tiny_config(parallel={'mode': mode, 'devices': 2})
    loaded, expecting = Session(config, source), Session(config, source)
    loaded.load(fresh_state(config))
    expecting.expect(state_template(config), 0)
    found = []
    for session in (loaded, expecting):
        arguments, devices = (session.state, session.data), session.parallel.devices
        lowered = session.parallel.lower(session.make_step, *arguments)
        found.append((lowered.as_text(), compiled_cache.key({}, arguments, devices, {})))
    assert found[0] == found[1]
