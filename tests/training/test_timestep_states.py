"""Timestep samplers and loss weightings in runs: devices, resuming, checkpoints, skipped steps."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.bench import Bench
from support.tiny import tiny_config

from jaxunet.checkpoint import state as state_module
from jaxunet.checkpoint import store as checkpoint
from jaxunet.config import to_dict
from jaxunet.diffusion.process import make_diffusion
from jaxunet.diffusion.timesteps import (
    Draw,
    TimestepSampler,
)
from jaxunet.diffusion.weighting import make_weighting
from jaxunet.runtime.errors import UserError
from jaxunet.training import step as step_module
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train

pytestmark = pytest.mark.usefixtures('shared_steps')

METHODS = [
    ('loss_second_moment', 'min_snr'),
    ('speed', 'speed'),
    ('adaptive', 'uncertainty'),
    ('policy', 'p2'),
    ('infonoise', 'soft_min_snr'),
]


def method(sampler, weighting, **changes):
    fields = {
        'sampler': sampler,
        'policy_every': 2,
        'adaptive_bins': 8,
        'adaptive_memory': 20.0,
        'history': 1,
        'infonoise_bins': 4,
        'infonoise_warmup': 2,
    }
    return tiny_config(timesteps=fields, loss={'weighting': weighting}, **changes)


JIT = {'parallel': {'mode': 'jit', 'devices': 4}}
PMAP = {'parallel': {'mode': 'pmap', 'devices': 2}, 'optimizer': {'accumulate_steps': 2}}
SPREAD_METHODS = [
    pytest.param(*m, s, marks=() if m[0] == 'adaptive' else pytest.mark.long)
    for m, s in zip(METHODS, (JIT, PMAP, PMAP, JIT, PMAP), strict=True)
]


def spread_method(sampler, weighting, spread):
    return method(sampler, weighting, train={'steps': 8}).replace(**spread)


@pytest.mark.long
@pytest.mark.parametrize(('sampler', 'weighting', 'spread'), SPREAD_METHODS)
def test_losses_and_states_do_not_depend_on_the_devices(sampler, weighting, spread, source):
    benches = [
        Bench(method(sampler, weighting, parallel={'devices': 1}), source),
        Bench(spread_method(sampler, weighting, spread), source),
    ]
    one, several = ([bench.losses(4), bench.parallel.fetch(bench.state)] for bench in benches)
    np.testing.assert_allclose(several[0], one[0], rtol=1e-4)
    names = ('weighting', 'timesteps')
    for got, want in zip(
        *(jax.tree.leaves([getattr(side[1], n) for n in names]) for side in (several, one)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize(('sampler', 'weighting', 'spread'), SPREAD_METHODS)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    sampler, weighting, spread, tmp_path, source
):
    config = spread_method(sampler, weighting, spread)
    train(config, tmp_path / 'whole', source)
    halves = shutil.copytree(tmp_path / 'whole', tmp_path / 'halves')
    for step in (6, 8):  # as if it had ended before these were written
        shutil.rmtree(halves / 'checkpoints' / str(step))
    half = checkpoint.read(halves).state
    assert half.step == 4
    train(config, halves, source)
    whole, resumed = (checkpoint.read(tmp_path / name).state for name in ('whole', 'halves'))
    assert checkpoint.checksum(resumed) == checkpoint.checksum(whole)
    stateful = jax.tree.leaves((half.weighting, half.timesteps))
    if sampler != 'speed':
        assert any(
            not np.array_equal(a, b)
            for a, b in zip(
                stateful, jax.tree.leaves((resumed.weighting, resumed.timesteps)), strict=True
            )
        )
    rows = [read_metrics(tmp_path / name / 'metrics.csv') for name in ('whole', 'halves')]
    assert [r['loss'] for r in rows[0]] == [r['loss'] for r in rows[1]]


@pytest.mark.parametrize(
    'spread', [{'parallel': {'devices': 1}}, pytest.param(PMAP, marks=pytest.mark.long)], ids=str
)
def test_a_step_hands_the_sampler_what_it_drew_and_its_loss_weights(spread, source, monkeypatch):
    rows = 8

    def draw(state, keys, row, x0):
        del state, keys, x0
        return Draw(5 * row, jnp.ones(row.shape), jnp.full(row.shape, 0.5))

    sampler = TimestepSampler(
        lambda: jnp.zeros((3, rows)),
        draw,
        lambda state, t, loss, weight: jnp.stack([t.astype(float), loss, weight]),
    )
    for module in (state_module, step_module):
        monkeypatch.setattr(module, 'make_sampler', lambda *_: sampler)
    config = method('uniform', 'p2', data={'batch_size': rows}, seed=1).replace(**spread)
    bench = Bench(config, source, shared=False)  # and JAX keeps its state by this seed
    bench.losses(1)
    t, loss, weight = np.asarray(bench.parallel.fetch(bench.state).timesteps)
    np.testing.assert_array_equal(t, 5 * np.arange(rows))
    diffusion = make_diffusion(bench.config.diffusion)
    np.testing.assert_allclose(
        weight, make_weighting(bench.config.loss, diffusion).table(())[t.astype(int)], rtol=1e-6
    )
    assert len(set(weight)) == rows
    assert np.all(loss > 0)


@pytest.mark.long
def test_a_checkpoint_without_the_states_loads_and_another_method_starts_anew(tmp_path, source):
    """Earlier versions saved neither the states nor their config."""
    config = tiny_config()
    train(config, tmp_path, source)
    state = checkpoint.read(tmp_path).state
    assert (state.weighting, state.timesteps) == ((), ())
    old = {
        f.name: getattr(state, f.name)
        for f in dataclasses.fields(state)
        if f.name not in ('weighting', 'timesteps')
    }
    values = {
        name: fields
        for name, fields in to_dict(config).items()
        if name not in ('loss', 'timesteps')
    }
    checkpoints = checkpoint.Checkpoints(tmp_path / 'old', keep=3)
    of_then = jax.tree_util.register_dataclass(dataclasses.make_dataclass('OldState', old))
    checkpoints.save(6, of_then(**old), config)
    checkpoints.wait()
    checkpoints.close()
    meta = tmp_path / 'old' / 'checkpoints' / '6' / 'meta' / 'metadata'
    saved = json.loads(meta.read_text())
    del saved['meta_checksum']
    saved |= {
        'config': values,
        'checksum': checkpoint.checksum(state),
    }  # leaves in the order of the dataclass
    meta.write_text(json.dumps(saved))
    again = checkpoint.read(tmp_path / 'old')
    assert checkpoint.checksum(again.state) == checkpoint.checksum(state)
    train(spread_method('adaptive', 'uncertainty', PMAP), tmp_path / 'old', source)
    now = checkpoint.read(tmp_path / 'old').state
    assert now.step == 8
    assert now.timesteps.weight.max() > 0
    assert int(jax.tree.leaves(now.weighting.optimizer)[0]) == 2


@pytest.mark.parametrize(
    ('field', 'method_of'),
    [('timesteps', 'timesteps.sampler=adaptive'), ('weighting', 'loss.weighting=uncertainty')],
)
def test_a_state_of_another_version_is_no_damage(tmp_path, source, field, method_of):
    config = method('adaptive', 'uncertainty')
    other = checkpoint.state_template(config).replace(**{field: {'fast': np.ones(3, np.float32)}})
    state = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype) if jax.dtypes.issubdtype(x.dtype, np.number) else x,
        other,
    )
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=3)
    checkpoints.save(6, state, config)
    checkpoints.wait()
    checkpoints.close()
    with pytest.raises(
        UserError,
        match=f'another version of jaxunet, whose state of {method_of} holds fast; this one',
    ):
        train(config.replace(train={'steps': 8}), tmp_path, source)
    assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['6']
    assert not (tmp_path / 'damaged').exists()


@pytest.mark.long
def test_a_bad_step_leaves_the_states(source):
    bench = Bench(
        method(
            'adaptive',
            'uncertainty',
            parallel={'devices': 1},
            optimizer={'learning_rate': 1e30, 'clip_norm': 0.0},
        ),
        source,
    )
    bench.losses(4)
    state = bench.parallel.fetch(bench.state)
    assert state.skipped > 0
    assert all(
        np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.weighting, state.timesteps))
    )
