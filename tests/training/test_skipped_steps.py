"""Spikes are skipped (`train.spike_sigmas`), and runs that skip too much go back (`rollbacks`)."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.checkpoint.damaged import FOLDER as DAMAGED
from jaxunet.checkpoint.recent_norms import FEWEST, WINDOW, RecentNorms
from jaxunet.checkpoint.store import Checkpoints, read
from jaxunet.data import pipeline
from jaxunet.runtime.errors import UserError
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train
from jaxunet.training.resume import starting_point
from jaxunet.training.rollback import TooManySkippedError, with_rollbacks
from jaxunet.training.session import Session

pytestmark = pytest.mark.usefixtures('shared_steps')
SIGMAS = 4.0
ONE = {'precision': 'float16', 'parallel': {'devices': 1}}
BEGIN, FIRST_BAD = 2, 4  # steps: of the first state, and from which on none is finite
FUSED = {'backend': 'cuda', 'precision': 'bfloat16', 'parallel': {'devices': 1}}


def config_of(changes, **train_fields):
    train_fields = {'spike_sigmas': SIGMAS, **train_fields}
    return tiny_config(train=train_fields).replace(**changes)


@pytest.fixture(scope='module')
def fresh(source):
    """The state before step 0, drawn once."""
    bench = Bench(config_of(ONE), source)
    return bench.parallel.fetch(bench.state)


def norms(around, taken=WINDOW - 1):
    """Norms of so many steps, within 10% of a value."""
    values = np.where(np.arange(WINDOW) % 2, 0.9, 1.1).astype(np.float32) * np.float32(around)
    values[taken:] = 0
    return RecentNorms(values, np.int32(taken), np.int32(5))


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_spike_is_beyond_the_standard_deviations_of_the_last_norms():
    rng = np.random.default_rng(0)
    drawn = rng.uniform(1, 2, WINDOW + 30).astype(np.float32)
    is_spike, after = jax.jit(RecentNorms.is_spike, static_argnums=2), jax.jit(RecentNorms.after)
    state = RecentNorms.start()
    for n, norm in enumerate(drawn):
        if n in (0, FEWEST - 1):
            assert not is_spike(state, np.float32(1e9), SIGMAS)
        if n in (FEWEST, WINDOW, WINDOW + 29):
            last = drawn[max(n - WINDOW, 0) : n].astype(np.float64)
            bound = last.mean() + SIGMAS * last.std()
            assert not is_spike(state, np.float32(bound * 0.999), SIGMAS)
            assert is_spike(state, np.float32(bound * 1.001), SIGMAS)
            assert not is_spike(state, np.float32(np.nan), SIGMAS)
        state = after(state, norm, taken=True, spike=False)
    skipped = after(state, np.float32(1e9), taken=False, spike=True)
    assert_equal(skipped, state._replace(spikes=1))
    assert state.taken == WINDOW + 30


def test_a_run_that_ends_without_a_checkpoint_says_so():
    told = str(TooManySkippedError(config_of(ONE), 3, 3, None, 0))
    assert told.endswith('There is no checkpoint yet.')
    told = str(TooManySkippedError(config_of(ONE), 3, 3, 2, 0))
    assert told.endswith('The last checkpoint is step 2.')


@pytest.mark.parametrize('changes', [ONE, pytest.param(FUSED, marks=pytest.mark.extension)])
def test_a_spike_changes_only_the_counters(changes, source):
    bench = Bench(config_of(changes), source)
    host = bench.parallel.fetch(bench.state)

    def step(recent):
        begin = dataclasses.replace(host, recent_norms=recent)
        bench.state = bench.parallel.replicate(begin)
        _, norm = bench.losses(count=1)
        return np.float32(norm), bench.parallel.fetch(bench.state)

    norm, spike = step(norms(1e-6))
    for name in ('params', 'ema', 'opt_state'):
        assert_equal(getattr(spike, name), getattr(host, name))
    assert (spike.step, spike.skipped, spike.bad_steps, spike.loss_count) == (1, 1, 1, 0)
    assert_equal(spike.recent_norms, norms(1e-6)._replace(spikes=6))
    assert spike.loss_scale.scale == host.loss_scale.scale

    few = norms(1e-6, FEWEST - 1)
    same_norm, taken = step(few)
    assert same_norm == norm
    few.norms[FEWEST - 1] = norm
    assert_equal(taken.recent_norms, RecentNorms(few.norms, np.int32(FEWEST), np.int32(5)))
    assert (taken.step, taken.skipped, taken.bad_steps) == (1, 0, 0)
    assert_equal(taken.loss_scale, spike.loss_scale)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), taken.params, host.params)
    assert any(jax.tree.leaves(moved))


def test_spikes_in_a_row_end_the_run(fresh, tmp_path, source):
    config = config_of(ONE, steps=4, max_bad_steps=2)
    initial = dataclasses.replace(fresh, recent_norms=norms(1e-6))
    with pytest.raises(
        UserError,
        match=r'2 steps in a row .*, or a norm beyond train.spike_sigmas=4.0 '
        r'\(train.max_bad_steps=2\); raise train.spike_sigmas, lower optimizer.learning_rate',
    ):
        train(config, tmp_path, source, initial)
    assert [row['spikes'] for row in read_metrics(tmp_path / 'metrics.csv')] == ['6']


def going_back(**fields):
    return config_of(
        ONE, **{'steps': 8, 'max_bad_steps': 3, 'checkpoint_every': 2, 'keep': 9, **fields}
    )


def folded(key, count):
    folded_key = jax.random.fold_in(jax.random.wrap_key_data(key), count)
    return np.asarray(jax.random.key_data(folded_key))


@pytest.fixture
def begin(fresh):
    return dataclasses.replace(fresh, step=np.int32(BEGIN), recent_norms=norms(1e3))


@pytest.fixture
def fate(monkeypatch):
    """Makes the gradients not finite from step `FIRST_BAD` on while the key is one of these."""
    call, bad_keys = Session.call, []

    def doomed(self, data, *, stop=False):
        state = self.parallel.fetch(self.state)
        if state.step >= FIRST_BAD and any(np.array_equal(state.rng, key) for key in bad_keys):
            loss_scale = state.loss_scale._replace(scale=np.float32(np.inf))
            self.state = self.parallel.replicate(dataclasses.replace(state, loss_scale=loss_scale))
        return call(self, data, stop=stop)

    monkeypatch.setattr(Session, 'call', doomed)
    return bad_keys


@pytest.mark.long
def test_the_second_try_draws_other_numbers(begin, fate, source, tmp_path, monkeypatch, caplog):
    """It trains on the images that the first has put on the device."""
    fate += [begin.rng]
    run, load_all, loads = tmp_path / 'run', pipeline.load_all, []
    monkeypatch.setattr(
        pipeline, 'load_all', lambda *args, **kwargs: loads.append(0) or load_all(*args, **kwargs)
    )
    assert train(going_back(rollbacks=1, steps=7), run, source, begin) == 7
    assert len(loads) == 1
    assert (
        f'step 7: 3 steps in a row were skipped; going back to the checkpoint of step {FIRST_BAD}, '
        'with other random numbers (rollback 1)'
    ) in [record.getMessage() for record in caplog.records]
    assert {path.name for path in (run / DAMAGED).iterdir()} == {'6'}
    assert train(going_back(rollbacks=1), run, source) == 8  # resumes with the key and the number
    rows = read_metrics(run / 'metrics.csv')
    assert [(int(r['step']), r['rollbacks'], r['skipped_steps']) for r in rows] == [
        (step, str(int(step > FIRST_BAD)), '0') for step in range(BEGIN + 1, 9)
    ]
    ended, good = read(run), read(run / 'checkpoints' / str(FIRST_BAD))
    assert (ended.facts.rollbacks, good.facts.rollbacks) == (1, 0)
    assert {row['spikes'] for row in rows} == {'5'}

    key = folded(begin.rng, 1)  # the same steps with the key changed by hand
    initial = dataclasses.replace(good.state, rng=key)
    train(going_back(checkpoint_every=8), tmp_path / 'by_hand', source, initial)
    assert_equal(read(tmp_path / 'by_hand').state, ended.state)

    off = going_back(spike_sigmas=0.0)  # a run that goes on without the option has no norms
    checkpoints = Checkpoints(run, keep=9)
    begin = starting_point(off, run, checkpoints, source.class_names, None)
    checkpoints.close()
    assert (begin.state().recent_norms, begin.facts.rollbacks) == ((), 1)


def test_without_a_good_checkpoint_the_run_ends(begin, fate, source, tmp_path):
    fate += [begin.rng]
    config = going_back(rollbacks=1, checkpoint_every=8)
    with pytest.raises(UserError, match='training stopped at step 7: 3 steps in a row'):
        train(config, tmp_path, source, begin)


def test_a_run_goes_back_as_often_as_allowed():
    told = []

    def run(failed):
        told.append(failed and failed.rollbacks)
        raise TooManySkippedError(going_back(rollbacks=2), 7, 3, 4, len(told) - 1)

    with pytest.raises(UserError, match=r'Rollbacks before it: 2 \(train.rollbacks=2\)'):
        with_rollbacks(run, 2)
    assert told == [None, 0, 1]
