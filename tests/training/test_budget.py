"""`train.minutes`: the steps that fit into a time budget, and runs that resume within it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.newest import newest_config
from jaxunet.checkpoint.optimizer import learning_rate_schedule
from jaxunet.config import resolve, to_dict
from jaxunet.data import pipeline
from jaxunet.data.automatic import complete, steps_within
from jaxunet.data.sources import open_images
from jaxunet.runtime.errors import UserError
from jaxunet.training import budget
from jaxunet.training.budget import check_named, step_seconds
from jaxunet.training.loop import train
from jaxunet.training.preemption import Caller
from jaxunet.training.session import choose_steps_per_call

pytestmark = pytest.mark.usefixtures('shared_steps')


@pytest.fixture(scope='module')
def source():
    return open_images(tiny_config())


def config_of(minutes, **train):
    falling = {'warmup_steps': 0, 'schedule': 'linear'}
    return tiny_config(optimizer=falling, train={'steps_per_call': 1, 'minutes': minutes, **train})


@pytest.mark.parametrize(
    ('minutes', 'seconds', 'calls', 'every', 'steps'),
    [
        (3.0, 0.0043, 0, 100, 41_860),  # calls of up to 20 steps, which divide the other counts
        (3.0, 0.0043, 1, 100, 41_860),
        (3.0, 0.0043, 8, 80, 41_856),
        (1.0, 0.007, 1, 100, 8571),
        (0.001, 5.0, 4, 100, 4),  # at least one call
    ],
)
def test_the_steps_that_fit(minutes, seconds, calls, every, steps):
    counts = dict.fromkeys(('log_every', 'checkpoint_every'), every)
    config = config_of(minutes, steps=80, **counts | {'steps_per_call': calls})
    assert steps_within(config, seconds) == steps


def test_a_step_is_timed(source, monkeypatch):
    monkeypatch.setattr(budget, 'TIMED_SECONDS', 0.2)
    calls, timed = [], budget._timed

    def spy(session, count):
        calls.append((count, timed(session, count)))
        return calls[-1][1]

    monkeypatch.setattr(budget, '_timed', spy)
    found = step_seconds(tiny_config(train={'steps_per_call': 1, 'minutes': 1.0}), source)
    (warm, _), (once, one), (many, whole) = calls
    assert (warm, once) == (budget.WARM_UP, 1)
    assert many == max(int(np.ceil(0.2 / one)), 1)
    assert found == whole / many > 0


def test_a_step_is_timed_in_calls_as_long_as_those_of_the_run(source, monkeypatch):
    def session(config, *_):
        raise LookupError(config)

    monkeypatch.setattr(budget, 'Session', session)
    counts = dict.fromkeys(('log_every', 'checkpoint_every', 'sample_every'), 100)
    config = config_of(1.0, steps=1207, **counts | {'steps_per_call': 0})
    with pytest.raises(LookupError) as timed:
        step_seconds(config, source)
    run = config.replace(train={'steps': steps_within(config, 0.0043)})
    for each in (timed.value.args[0], run):
        assert choose_steps_per_call(each, resident=True, platform='gpu') == 20


def test_more_steps_than_a_run_can_have_are_refused(source, tmp_path, monkeypatch):
    monkeypatch.setattr(budget, 'step_seconds', lambda *_: 0.001)
    with pytest.raises(UserError, match=r'train\.steps: expected at most 2147483647, found 6'):
        budget.fitted(config_of(1e8), tmp_path, source)


class Stops(Caller):
    """Stops a run after its fourth step, at the latest after the next."""

    def logged(self, row):
        self.requested |= row['step'] >= 4


def test_a_run_ends_with_its_budget_and_resumes_bit_for_bit(source, tmp_path, monkeypatch, caplog):
    seconds = iter([0.005, 0.005])
    monkeypatch.setattr(budget, 'step_seconds', lambda *_: next(seconds))
    values = to_dict(config_of(0.001))
    with caplog.at_level('INFO', logger='absl'):
        assert train(complete(values), tmp_path / 'whole', source) == 12
    assert 'train.minutes: compiling the step, to time it for 3 s' in caplog.text
    assert 'train.minutes=0.001: 12 steps of 5 ms' in caplog.text
    assert 4 <= train(complete(values), tmp_path / 'parts', source, caller=Stops()) < 12
    again = complete(values, newest_config(tmp_path / 'parts'))
    assert again.train.steps == 12
    assert learning_rate_schedule(again)(12) == 0
    assert train(again, tmp_path / 'parts', source) == 12  # times no step
    whole, parts = (checkpoint.read(tmp_path / name) for name in ('whole', 'parts'))
    jax.tree.map(np.testing.assert_array_equal, parts.state, whole.state)
    assert (whole.config.train.steps, whole.config.train.minutes) == (12, 0.001)


@pytest.mark.usefixtures('counted_steps')
def test_a_run_with_a_budget_decodes_a_resident_set_once(source, tmp_path, monkeypatch):
    monkeypatch.setattr(budget, 'TIMED_SECONDS', 0.01)
    loads, load_all = [], pipeline.load_all
    monkeypatch.setattr(
        pipeline, 'load_all', lambda *args, **kwargs: loads.append(0) or load_all(*args, **kwargs)
    )
    config = config_of(1e-5)
    assert config.data.cache == 'auto'
    assert train(config, tmp_path / 'timed', source) > 0
    assert len(loads) == 1
    monkeypatch.setattr(budget, 'step_seconds', lambda *_: 0.005)
    steps = train(config_of(1e-5), tmp_path / 'given', source)
    assert (steps, len(loads)) == (1, 2)


def test_another_budget_of_a_run_counts_the_time_of_its_first_step():
    saved = config_of(3.0, steps=1200)
    assert complete(to_dict(config_of(3.0)), saved).train.steps == 1200
    assert complete(to_dict(config_of(4.5)), saved).train.steps == 1800
    assert complete(to_dict(config_of(0.0, steps=7)), saved).train.steps == 7
    counts = {'steps_per_call': 7, 'log_every': 7, 'checkpoint_every': 7, 'sample_every': 7}
    assert complete(to_dict(config_of(3.0, **counts)), saved).train.steps == 1197  # whole calls
    with pytest.raises(UserError, match=r'ends at train\.steps=6 without a budget'):
        complete(to_dict(config_of(3.0)), config_of(0.0))


def test_two_lengths_are_refused():
    check_named(config_of(0.0), ['train.steps'])
    check_named(config_of(1.0), ['train.log_every'])
    with pytest.raises(UserError, match=r'budget of 1 minutes sets .* leave train\.steps out'):
        check_named(config_of(1.0), ['train.log_every', 'train.steps'])
    with pytest.raises(UserError, match=r'train\.minutes: 1 and train\.epochs=2 both set'):
        resolve(to_dict(config_of(1.0, epochs=2.0)))
