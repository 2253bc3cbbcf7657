"""Muon beside AdamW: its steps, which weights it moves, and its state in checkpoints."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint import store
from jaxunet.checkpoint.load import load_initial, load_model
from jaxunet.checkpoint.state import MUON_RMS, fresh_state, get_moments, make_optimizer
from jaxunet.config import Config
from jaxunet.runtime.errors import UserError

RATE = 1e-3


def muon_config(**changes) -> Config:
    fields = {'name': 'muon', 'learning_rate': RATE, 'warmup_steps': 0, 'schedule': 'constant'}
    return tiny_config(optimizer=fields, **changes)


@pytest.fixture(scope='module')
def state():
    """The state of a run, with an optimizer state of random numbers."""
    fresh = fresh_state(muon_config())
    draw = np.random.default_rng(0).standard_normal

    def random(leaf):
        return draw(leaf.shape).astype(leaf.dtype)

    return dataclasses.replace(fresh, opt_state=jax.tree.map(random, fresh.opt_state))


@pytest.fixture(scope='module')
def first_step(state):
    """The first step of some weights, in learning rates, and their gradients."""
    block, others = state.params['down_0_res_0'], ('conv_in', 'conv_out', 'time_embed_0')
    params = {name: state.params[name] for name in others}
    params['down_0_res_0'] = {name: block[name] for name in ('conv_1', 'embed')}
    draw = np.random.default_rng(1).standard_normal
    grads = jax.tree.map(lambda p: draw(p.shape).astype(np.float32), params)
    optimizer = make_optimizer(muon_config())
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    return jax.tree.map(lambda u: -np.asarray(u, np.float64) / RATE, updates), grads


@pytest.mark.parametrize('layer', ['conv_1', 'embed'])
def test_a_matrix_moves_by_an_orthogonal_step(layer, first_step):
    step, grads = (
        tree['down_0_res_0'][layer]['kernel'].reshape(-1, tree['conv_in']['kernel'].shape[-1])
        for tree in first_step
    )
    left, _, right = np.linalg.svd(grads, full_matrices=False)
    scaled = step / (MUON_RMS * np.sqrt(max(step.shape)))
    values = np.diag(left.T @ scaled @ right.T)
    # The singular vectors are the gradient's, and five iterations leave this of values of 1.
    np.testing.assert_allclose(scaled, left @ np.diag(values) @ right, atol=2e-3)
    assert 0.65 < values.min() <= values.max() < 1.25


@pytest.mark.parametrize('layer', ['conv_in', 'conv_out', 'time_embed_0'])
def test_other_weights_move_as_by_adamw(layer, first_step):
    step, grads = (tree[layer]['kernel'] for tree in first_step)
    # Adam's first step with Nesterov's momentum: β₁ (1 − β₁) / (1 − β₁²) + 1.
    np.testing.assert_allclose(np.abs(step), 0.9 / 1.9 + 1, rtol=1e-3)
    np.testing.assert_array_equal(np.sign(step), np.sign(grads))


def test_checkpoints_keep_the_state_which_has_no_moments_of_adam(state, tmp_path):
    checkpoints = store.Checkpoints(tmp_path, keep=1)
    checkpoints.save(3, dataclasses.replace(state, step=np.int32(3)), muon_config(), seconds=1.0)
    checkpoints.close()
    found = store.read(tmp_path).state
    assert store.checksum(found.opt_state) == store.checksum(state.opt_state)
    assert get_moments(found.opt_state) is None
    assert load_model(str(tmp_path)).moments is None
    started = load_initial(tiny_config(init_from=str(tmp_path)))
    assert not any(leaf.any() for leaf in jax.tree.leaves(get_moments(started.opt_state)))


def test_kernels_of_adamw_are_refused():
    with pytest.raises(UserError, match=r'which optimizer\.name=muon does not have'):
        muon_config(backend='xla+adamw=cuda')
