"""Steps are timed by when they were done, not by when the loop reads their metrics."""

import threading
import time

import jax
import jax.numpy as jnp
from support.counting_step import count_only
from support.tiny import tiny_config

from jaxunet.data.sources import open_images
from jaxunet.training.calls import Calls
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train
from jaxunet.training.session import Session


def test_a_call_says_when_it_was_done():
    release, begun = threading.Event(), time.perf_counter()

    def wait(x):
        assert release.wait(30)
        return x

    calls = Calls()
    calls.add(20, {'loss': jnp.ones(())})
    threading.Timer(0.2, release.set).start()
    calls.add(40, {'loss': jax.jit(lambda x: jax.pure_callback(wait, x, x))(jnp.ones(()))})
    assert len(calls) == 2
    assert calls.newest.step == 40
    calls.newest.done.result(30)
    time.sleep(0.1)
    read = time.perf_counter()
    first, second = calls.take(), calls.take()
    assert [first.step, second.step, len(calls)] == [20, 40, 0]
    assert begun <= first.done.result() <= second.done.result() <= read - 0.1
    assert begun + 0.2 <= second.done.result()
    calls.close()


def test_rows_have_the_whole_time_of_their_steps_if_starting_a_call_waits(tmp_path, monkeypatch):
    pause = 0.5
    call = Session.call

    def waits(self, data, *, stop=False):
        metrics = call(self, data, stop=stop)
        time.sleep(pause)
        return metrics

    monkeypatch.setattr(Session, 'call', waits)
    monkeypatch.setattr(Session, 'compile', count_only)
    config = tiny_config(train={'steps': 4, 'checkpoint_every': 4})
    train(config, tmp_path, open_images(config))
    rows = list(read_metrics(tmp_path / 'metrics.csv'))
    assert [int(row['step']) for row in rows] == [1, 2, 3, 4]
    seconds = [float(row['training_seconds']) for row in rows]
    assert seconds[-1] - seconds[0] >= 2.5 * pause
    assert float(rows[-1]['step_ms']) >= 0.8 * pause * 1e3
