"""Muon beside AdamW: its steps, which weights it moves, and its state in checkpoints."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.configs import CONFIGS, load
from support.tiny import tiny_config

from jaxunet.checkpoint import store
from jaxunet.checkpoint.load import load_initial, load_model
from jaxunet.checkpoint.muon import (
    MUON,
    PADDING,
    STEP_RMS,
    matrix_steps,
    orthogonal,
    orthogonal_momentum,
    part,
    stacks,
)
from jaxunet.checkpoint.optimizer import get_moments, learning_rate_schedule, make_optimizer
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import Config, resolve
from jaxunet.model.unet import build_unet, init_params
from jaxunet.ops.backends import choose
from jaxunet.training.update import make_update

RATE = 1e-3
COEFFICIENTS = jnp.asarray((3.4445, -4.7750, 2.0315))


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
    scaled = step / (STEP_RMS * np.sqrt(max(step.shape)))
    values = np.diag(left.T @ scaled @ right.T)
    # The singular vectors are the gradient's, and five iterations leave this of values of 1.
    np.testing.assert_allclose(scaled, left @ np.diag(values) @ right, atol=2e-3)
    assert 0.65 < values.min() <= values.max() < 1.25


def test_steps_and_state_are_those_of_optax(state):
    """Three steps of all matrices, by products of padded stacks and of each alone."""

    def axes(params):
        return jax.tree.map(
            lambda p: optax.contrib.MuonDimensionNumbers(tuple(range(p.ndim - 1)), p.ndim - 1),
            params,
        )

    matrices = part(MUON, state.params)
    config = muon_config()
    theirs = optax.contrib.muon(
        learning_rate_schedule(config),
        weight_decay=config.optimizer.weight_decay,
        muon_weight_dimension_numbers=axes,
        consistent_rms=STEP_RMS,
    )
    ours = matrix_steps(config, learning_rate_schedule(config))
    found, expected = ([matrices, rule.init(matrices), rule] for rule in (ours, theirs))
    draw = np.random.default_rng(2).standard_normal
    shapes = [(math.prod(p.shape[:-1]), p.shape[-1]) for p in jax.tree.leaves(matrices)]
    assert {(32, 8), (8, 8), (8, 24)} <= {shapes[i] for i in stacks(shapes)[32, 8]}
    for _ in range(3):
        grads = jax.tree.map(lambda p: draw(p.shape).astype(np.float32), matrices)
        for side in found, expected:
            with jax.numpy_dtype_promotion('standard'):  # for optax
                updates, side[1] = jax.jit(side[2].update)(grads, side[1], side[0])
            side[0] = optax.apply_updates(side[0], updates)
    known = expected[1].inner_states[MUON].inner_state
    assert jax.tree.structure(found[1]) == jax.tree.structure(known)
    for a, b in zip(jax.tree.leaves(found[:2]), jax.tree.leaves((expected[0], known)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3 * RATE)


def test_few_stacks_take_the_many_shapes_of_a_network():
    """Each matrix fits its stack, and padding adds less work than it may."""
    config = resolve(load(next(p for p in CONFIGS if p.stem == 'elephants64')))
    params = jax.eval_shape(lambda: init_params(build_unet(config), config, jax.random.key(0)))
    matrices = part(MUON, params)
    shapes = [(math.prod(p.shape[:-1]), p.shape[-1]) for p in jax.tree.leaves(matrices)]
    found = stacks(shapes)
    assert sorted(number for numbers in found.values() for number in numbers) == list(range(103))
    assert (len(set(shapes)), len(found)) == (36, 12)
    work = {False: 0, True: 0}
    for stack, numbers in found.items():
        for i in numbers:
            tall = max(shapes[i]), min(shapes[i])
            assert min(np.subtract(stack, tall)) >= 0
            for padded, (rows, columns) in ((True, stack), (False, tall)):
                work[padded] += 2 * rows * columns**2 + columns**3
    assert 1 < work[True] / work[False] <= 1 + PADDING
    rule = orthogonal_momentum(jnp.bfloat16)
    traced = jax.make_jaxpr(rule.update)(matrices, jax.eval_shape(rule.init, matrices))
    assert str(traced).count('dot_general[') == 12 * 3 * 5


def test_stacks_do_not_depend_on_the_order_of_the_weights():
    small = [(32, 8), (8, 8), (8, 24), (24, 8), (16, 8)]
    expected = {(144, 8): [(144, 8)] * 4, (72, 8): [(72, 8)] * 6, (32, 8): sorted(small)}
    shapes = [shape for group in expected.values() for shape in group]
    for order in shapes, shapes[::-1], sorted(shapes):
        found = stacks(order)
        assert {stack: sorted(order[i] for i in found[stack]) for stack in found} == expected


@pytest.mark.parametrize(('dtype', 'tolerance'), [('float32', 2e-6), ('bfloat16', 2e-2)])
def test_padding_stays_zero_and_changes_no_other_element(dtype, tolerance):
    tall = jnp.asarray(np.random.default_rng(5).standard_normal((3, 72, 16)), dtype)
    padded = np.asarray(orthogonal(jnp.pad(tall, ((0, 0), (0, 40), (0, 8))), COEFFICIENTS))
    assert not padded[:, 72:].any()
    assert not padded[:, :, 16:].any()
    expected = np.asarray(orthogonal(tall, COEFFICIENTS), np.float32)
    assert np.abs(expected).max() > 0.3
    np.testing.assert_allclose(padded[:, :72, :16].astype(np.float32), expected, atol=tolerance)


def test_half_precision_leaves_the_singular_values_near_1():
    draw = np.random.default_rng(3).standard_normal
    tall = draw((2, 72, 16))
    for matrices in tall, np.swapaxes(tall, 1, 2):
        found = orthogonal(jnp.asarray(matrices, jnp.bfloat16), COEFFICIENTS)
        assert found.dtype == jnp.bfloat16
        left, _, right = np.linalg.svd(matrices, full_matrices=False)
        values = np.swapaxes(left, 1, 2) @ np.asarray(found, np.float64) @ np.swapaxes(right, 1, 2)
        diagonal = np.diagonal(values, axis1=1, axis2=2)
        assert 0.6 < diagonal.min() <= diagonal.max() < 1.3
        np.testing.assert_allclose(values, diagonal[..., None] * np.eye(16), atol=0.05)


@pytest.mark.parametrize('layer', ['conv_in', 'conv_out', 'time_embed_0'])
def test_other_weights_move_as_by_adamw(layer, first_step):
    step, grads = (tree[layer]['kernel'] for tree in first_step)
    np.testing.assert_allclose(np.abs(step), 1, rtol=1e-3)  # Adam's first step
    np.testing.assert_array_equal(np.sign(step), np.sign(grads))


def test_checkpoints_keep_the_state_which_has_no_moments_of_adam(state, tmp_path):
    checkpoints = store.Checkpoints(tmp_path, keep=1)
    checkpoints.save(3, dataclasses.replace(state, step=np.int32(3)), muon_config())
    checkpoints.close()
    found = store.read(tmp_path).state
    assert store.checksum(found.opt_state) == store.checksum(state.opt_state)
    assert get_moments(found.opt_state) is None
    assert load_model(str(tmp_path)).moments is None
    started = load_initial(tiny_config(init_from=str(tmp_path)))
    assert not any(leaf.any() for leaf in jax.tree.leaves(get_moments(started.opt_state)))


@pytest.mark.extension
@pytest.mark.parametrize('finite', [True, False])
def test_kernels_of_adamw_give_the_same_update(state, finite):
    """They take the norm and the weights that AdamW updates; Muon's part is XLA's."""
    draw = np.random.default_rng(4).standard_normal
    grads = jax.tree.map(lambda p: jnp.asarray(draw(p.shape) * 3, jnp.float32), state.params)
    positive = dataclasses.replace(state, opt_state=jax.tree.map(abs, state.opt_state))
    ema = {'0.9': state.params, '0.1': jax.tree.map(lambda p: p + 1, state.params)}
    before = dataclasses.replace(positive, step=jnp.int32(7), ema=ema)
    loss = jnp.float32(1 if finite else np.nan)
    found, expected = (
        jax.jit(
            make_update(config, make_optimizer(config), choose(config.backend, here=False).update)
        )(before, grads, loss, loss, ())
        for config in (
            muon_config(backend=f'xla+adamw={name}', ema={'rates': (0.9,), 'widths': (0.1,)})
            for name in ('cuda', 'xla')
        )
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b, old in zip(
        *(jax.tree.leaves(side[:3]) for side in (found, expected)),
        jax.tree.leaves((before.params, before.opt_state, before.ema)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert finite or (np.asarray(a) == np.asarray(old)).all()
    np.testing.assert_allclose(found.grad_norm, expected.grad_norm, rtol=1e-5)
    assert bool(found.taken) == bool(expected.taken) == finite


@pytest.mark.parametrize('backend', ['xla', 'xla+adamw=cuda'])
def test_a_profile_finds_the_averages_of_the_matrices(backend, state):
    config = muon_config(backend=backend)
    update = jax.jit(
        make_update(config, make_optimizer(config), choose(config.backend, here=False).update)
    )
    lowered = update.lower(state, state.params, jnp.float32(1), jnp.float32(1), ())
    assert '/ema/' in lowered.as_text(debug_info=True)
