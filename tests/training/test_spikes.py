"""Steps whose gradient norm is far above the last ones are skipped (`train.spike_sigmas`)."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.checkpoint.recent_norms import FEWEST, WINDOW, RecentNorms
from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import Checkpoints, read
from jaxunet.data.sources import open_source
from jaxunet.runtime.errors import UserError
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train
from jaxunet.training.resume import starting_point

pytestmark = pytest.mark.usefixtures('shared_steps')
SIGMAS = 4.0
SPREAD = {'precision': 'float16', 'parallel': {'devices': 2, 'mode': 'pmap'}}
FUSED = {'backend': 'cuda', 'precision': 'bfloat16', 'parallel': {'devices': 1}}


def config_of(changes, **train_fields):
    train_fields = {'spike_sigmas': SIGMAS, **train_fields}
    return tiny_config(train=train_fields).replace(**changes)


@pytest.fixture(scope='module')
def source():
    return open_source('digits:', image_shape=(8, 8, 1))


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


@pytest.mark.parametrize('changes', [SPREAD, pytest.param(FUSED, marks=pytest.mark.extension)])
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


def test_a_resumed_run_knows_the_norms(tmp_path, source):
    config = config_of(SPREAD, steps=4)
    initial = dataclasses.replace(fresh_state(config), recent_norms=norms(1e3))
    train(config, tmp_path / 'whole', source, initial)
    train(config.replace(train={'steps': 2}), tmp_path / 'parts', source, initial)
    train(config, tmp_path / 'parts', source)
    whole, parts = (read(tmp_path / name).state for name in ('whole', 'parts'))
    assert_equal(whole, parts)
    assert whole.recent_norms.taken == WINDOW + 3
    rows = read_metrics(tmp_path / 'parts' / 'metrics.csv')
    assert [row['spikes'] for row in rows] == ['5'] * 4

    off = config.replace(train={'spike_sigmas': 0.0})
    for now, kept in ((off, False), (config.replace(train={'spike_sigmas': 9.0}), True)):
        checkpoints = Checkpoints(tmp_path / 'parts', keep=3)
        begin = starting_point(now, tmp_path, checkpoints, source.class_names, None)
        checkpoints.close()
        assert_equal(begin.state.recent_norms, whole.recent_norms if kept else ())


def test_spikes_in_a_row_end_the_run(tmp_path, source):
    config = config_of(SPREAD, steps=4, max_bad_steps=2)
    initial = dataclasses.replace(fresh_state(config), recent_norms=norms(1e-6))
    with pytest.raises(
        UserError,
        match=r'2 steps in a row .*, or a norm beyond train.spike_sigmas=4.0 '
        r'\(train.max_bad_steps=2\); raise train.spike_sigmas, lower optimizer.learning_rate',
    ):
        train(config, tmp_path, source, initial)
    assert [row['spikes'] for row in read_metrics(tmp_path / 'metrics.csv')] == ['6']
