"""The measurement in a point's process: its errors, its clock, its statistics, its step."""

import time
import unittest.mock

import jax
import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import to_dict
from jaxunet.runtime.errors import UserError
from jaxunet.sweep import measure, runner
from jaxunet.training.eager import eager


def test_memory_errors_are_told_apart(monkeypatch):
    task = runner.Task({}, True, [], 1, 1, 1.0)
    for error, status in (
        (
            jax.errors.JaxRuntimeError(
                'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore'
            ),
            'out of memory',
        ),
        (MemoryError(), 'out of memory'),
        (ValueError('other'), 'error'),
        (UserError('data.path: wrong'), 'error'),
    ):
        monkeypatch.setattr(measure, 'measure', unittest.mock.Mock(side_effect=error))
        row = measure.outcome(task)
        assert row['status'] == status
        assert row['reason']
        assert '\n' not in row['reason']
    assert row['reason'] == 'data.path: wrong'


def test_statistics_of_steps():
    ends = list(np.cumsum([5.0, *([0.1] * 8), 0.3, 0.1]))
    found = measure.statistics(ends, batch=4)
    assert found['steps'] == 10
    assert found['step_ms']['median'] == pytest.approx(100)
    assert found['images_per_s'] == pytest.approx(40)  # one slow step of five pairs changes nothing
    assert found['images_per_s_range'] == pytest.approx([20, 40])
    together = measure.statistics(ends, batch=4, unit=5)
    assert together['steps'] == 50
    assert together['step_ms']['median'] == pytest.approx(20)
    assert together['images_per_s'] == pytest.approx(200)


@pytest.mark.parametrize(
    ('max_seconds', 'expected', 'in_flight'), [(1e9, 12, 8), (0.0, measure.MIN_CALLS, 1)]
)
def test_the_clock_covers_the_timed_steps_alone(max_seconds, expected, in_flight):
    """Every step takes a second of a fake clock that moves when a result is waited for; the warm-up
    takes ten.
    """
    now, waited = [0.0], [0]

    class Loss(float):
        def __float__(self):
            waited[0] += 1
            now[0] += 10 if waited[0] <= 3 else 1
            return 0.5

    dispatched = []

    def call(data):
        dispatched.append(data)
        return {'step_loss': [1.0, Loss(0.5)]}

    ends, loss = measure.run(
        call,
        lambda: len(dispatched),
        lambda m: m,
        3,
        12,
        max_seconds,
        in_flight,
        clock=lambda: now[0],
    )
    assert np.diff(ends).tolist() == [1.0] * expected
    assert loss == 0.5
    assert len(dispatched) == expected + 3 + in_flight


def test_a_point_queues_as_many_calls_as_training(monkeypatch):
    """On a CPU one, where a longer queue would delay the steps that are timed."""
    in_flight = []

    def run(*_, **options):
        in_flight.append(options['in_flight'])
        return [0.0, 1.0, 2.0], 0.5

    monkeypatch.setattr(measure, 'run', run)
    monkeypatch.setattr(measure, '_compile', lambda *_, **__: {})
    task = runner.Task(to_dict(tiny_config(parallel={'devices': 1})), True, [], 2, 1, 1.0)
    measure.measure(task)
    monkeypatch.setattr(measure.Session, 'calls_ahead', 5)
    measure.measure(task)
    assert in_flight == [1, 5]


def test_the_eager_step_sees_the_batches_that_training_sees():
    config = tiny_config(parallel={'devices': 1})
    source = measure.open_images(config)
    resident, streaming = (
        measure.Session(config.replace(data={'cache': cache}), source)
        for cache in ('device', 'stream')
    )
    calls = []
    step = eager(lambda state, batch: (calls.append(state.step), ({}, batch))[1], config)
    resident.load(fresh_state(config))
    with streaming:
        streaming.load(fresh_state(config))
        streaming.open_stream(end=3)
        for number in range(3):
            streamed = streaming.next_data()
            state = unittest.mock.Mock(step=jax.numpy.asarray(number, 'int32'))
            for data in (resident.next_data(), streamed):
                _, batch = step(state, data)
                np.testing.assert_array_equal(batch['image'], streamed['image'])
                np.testing.assert_array_equal(batch['label'], streamed['label'])
                np.testing.assert_array_equal(batch['row'], np.arange(8))
        with pytest.raises(StopIteration):
            streaming.next_data()
    assert len(calls) == 6  # Python runs it every time: nothing is compiled as a whole


def test_programs_are_counted_with_their_cache(tmp_path):
    def make(seed):
        return (
            jax.jit(lambda x: jax.numpy.sin(x) * seed)
            .lower(jax.ShapeDtypeStruct((3,), 'float32'))
            .compile()
        )

    fresh = measure.Programs()
    make(time.time())
    assert (fresh.made, fresh.hits, fresh.cached) == (1, 0, False)
    assert measure.Programs().cached  # nothing had to be made: the whole step was kept
