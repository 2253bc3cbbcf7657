"""The cuda backend's update of all weights at once, on its CPU handlers, against optax and XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import tiny_config

from jaxunet.checkpoint.optimizer import make_optimizer
from jaxunet.checkpoint.state import fresh_state
from jaxunet.model.unet import build_unet
from jaxunet.ops.backends import load_ops
from jaxunet.training.update import make_update
from xla_ffi.adamw.narrow import narrow

pytestmark = pytest.mark.extension


AVERAGES = {'rates': (0.9, 0.99), 'widths': (0.05, 0.1)}


def states(backend, steps, scale=1.0, spoil=-1, narrowed=False, **changes):
    """Returns the state after a few updates with given gradients, and the last norm. With
    `narrowed`, optax gets the kernels' gradients widened.
    """
    config = tiny_config(
        backend=backend,
        optimizer={'weight_decay': 0.1, 'warmup_steps': 3, **changes},
        ema=AVERAGES,
    )
    optimizer = make_optimizer(config)
    state = fresh_state(config)
    state = dataclasses.replace(
        state, loss_scale=state.loss_scale._replace(scale=jnp.float32(scale))
    )
    update = jax.jit(make_update(config, optimizer))
    draw = np.random.default_rng(0)
    zero = jnp.zeros(())
    for step in range(steps):
        grads = jax.tree.map(
            lambda p: jnp.asarray(scale * draw.standard_normal(p.shape), jnp.float32), state.params
        )
        if narrowed:
            grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16) if g.ndim > 1 else g, grads)
            grads = (
                grads if backend == 'cuda' else jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            )
        loss = jnp.full((), jnp.nan) if step == spoil else zero
        found = update(state, grads, loss, zero, ())
        assert bool(found.finite) == (step != spoil)
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=found.params,
            opt_state=found.opt_state,
            ema=found.ema,
        )
    return state, found.grad_norm


@pytest.mark.parametrize(
    'options',
    [
        {},
        pytest.param({'narrowed': True}, marks=pytest.mark.long),
        pytest.param({'scale': 1024.0, 'clip_norm': 0.0}, marks=pytest.mark.long),
        pytest.param({'spoil': 1}, marks=pytest.mark.long),
        pytest.param({'schedule': 'cosine', 'clip_norm': 0.5}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_fused_update_is_that_of_optax(options):
    (fused, norm), (plain, plain_norm) = (
        states(backend, 3, **options) for backend in ('cuda', 'xla')
    )
    assert jax.tree.structure(fused) == jax.tree.structure(plain)  # checkpoints are interchangeable
    np.testing.assert_allclose(norm, plain_norm, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=1e-5, atol=1e-6
        )


def test_a_norm_that_is_not_finite_changes_nothing():
    config = tiny_config(backend='cuda', ema=AVERAGES)
    optimizer = make_optimizer(config)
    state = fresh_state(config)
    grads = jax.tree.map(lambda p: jnp.full(p.shape, jnp.inf), state.params)
    zero = jnp.zeros(())
    found = jax.jit(make_update(config, optimizer))(state, grads, zero, zero, ())
    assert not bool(found.finite)
    for kept, old in zip(
        jax.tree.leaves(found[:3]),
        jax.tree.leaves((state.params, state.opt_state, state.ema)),
        strict=True,
    ):
        np.testing.assert_array_equal(kept, old)


@pytest.mark.parametrize(
    'options',
    [
        {},
        pytest.param(
            {'conv_resample': True, 'scale_shift_norm': True, 'time_embedding': 'ddpm'},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_weights_narrowed_at_once_are_those_narrowed_one_by_one(options):
    """Predictions and gradients are equal bit for bit. If a wrong weight were narrowed, or one left
    out, they would differ or raise an error.
    """
    config = tiny_config(
        precision='bfloat16', model={'zero_init': False, **options}, data={'classes': ('a', 'b')}
    )
    model = build_unet(config, load_ops('xla'))
    params = fresh_state(config).params
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.standard_normal((2, *config.image_shape)), jnp.float32)
    t, labels = jnp.asarray([3, 500]), jnp.asarray([0, 1]) if config.model.num_classes else None
    seen = []

    def remember(arrays):
        seen.extend(arrays)
        return narrow(arrays, 'bfloat16')

    @jax.jit
    def value_and_grad(params):
        found = jax.value_and_grad(lambda p: jnp.sum(jnp.square(model.predict(p, x, t, labels))))(
            params
        )
        return jax.tree.map(lambda g: g.astype(jnp.float32), found)

    jax.tree.map(
        np.testing.assert_array_equal,
        value_and_grad(model.narrowed(params, remember)),
        value_and_grad(params),
    )
    kernels = [path for path, _ in jax.tree.leaves_with_path(params) if path[-1].key == 'kernel']
    assert len(seen) == len(kernels) - 2  # the time embedding's are not narrowed
