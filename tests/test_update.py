"""The fused update of the cuda backend, on its CPU handlers, against optax's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_config

import xla_ffi
from jaxunet.ops import load_ops
from jaxunet.training.state import init_state, make_optimizer
from jaxunet.training.update import make_update
from jaxunet.unet import build_unet

if xla_ffi._cpu is None:
    pytest.skip(f'the extension is not built: {xla_ffi.unavailable()}', allow_module_level=True)


def states(backend, steps, scale=1.0, spoil=-1, **changes):
    """The state after a few updates with given gradients, and the last norm."""
    config = tiny_config(backend=backend, optimizer={'weight_decay': 0.1, 'warmup_steps': 3, **changes}, ema={'rates': (0.9, 0.99)})
    optimizer = make_optimizer(config)
    state = jax.jit(lambda: init_state(config, build_unet(config, load_ops('xla')), optimizer))()
    state = dataclasses.replace(state, loss_scale=state.loss_scale._replace(scale=jnp.float32(scale)))
    update = jax.jit(make_update(config, optimizer))
    draw = np.random.default_rng(0)
    zero = jnp.zeros(())
    for step in range(steps):
        grads = jax.tree.map(lambda p: jnp.asarray(scale * draw.standard_normal(p.shape), jnp.float32), state.params)
        loss = jnp.full((), jnp.nan) if step == spoil else zero
        found = update(state, grads, loss, zero)
        assert bool(found.finite) == (step != spoil)
        state = dataclasses.replace(state, step=state.step + 1, params=found.params, opt_state=found.opt_state, ema=found.ema)
    return state, found.grad_norm


@pytest.mark.parametrize(
    'options', [{}, {'scale': 1024.0, 'clip_norm': 0.0}, {'spoil': 1}, {'schedule': 'cosine', 'clip_norm': 0.5}], ids=str
)
def test_the_fused_update_is_that_of_optax(options):
    (fused, norm), (plain, plain_norm) = (states(backend, 3, **options) for backend in ('cuda', 'xla'))
    assert jax.tree.structure(fused) == jax.tree.structure(plain)  # checkpoints know no difference
    np.testing.assert_allclose(norm, plain_norm, rtol=1e-5)
    for got, want in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=1e-5, atol=1e-6)


def test_a_norm_that_is_not_finite_changes_nothing():
    config = tiny_config(backend='cuda', ema={'rates': (0.9,)})
    optimizer = make_optimizer(config)
    state = jax.jit(lambda: init_state(config, build_unet(config, load_ops('xla')), optimizer))()
    grads = jax.tree.map(lambda p: jnp.full(p.shape, jnp.inf), state.params)
    found = jax.jit(make_update(config, optimizer))(state, grads, jnp.zeros(()), jnp.zeros(()))
    assert not bool(found.finite)
    for kept, old in zip(jax.tree.leaves(found[:3]), jax.tree.leaves((state.params, state.opt_state, state.ema)), strict=True):
        np.testing.assert_array_equal(kept, old)
