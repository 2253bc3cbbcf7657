"""The learned timestep policy: its distribution, its probes, its rewards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from support.distributions import assert_distribution
from support.tiny import tiny_config

from jaxunet.config import DiffusionConfig
from jaxunet.diffusion import timestep_policy as policy
from jaxunet.diffusion.process import make_diffusion, q_sample

pytestmark = pytest.mark.usefixtures('shared_steps')

STEPS = 40


@pytest.mark.long
def test_policy_draws_its_beta_distribution():
    config = tiny_config(timesteps={'sampler': 'policy'})
    state = policy.init_policy(config)
    keys = jax.random.split(jax.random.key(0), 5000)
    x0 = jax.random.normal(jax.random.key(1), (5000, 1, 1, 1))
    u, t, importance = policy.draw_from_policy(state.params, keys, x0, steps=STEPS)
    start = float(jax.nn.softplus(0.5))
    assert stats.kstest(np.asarray(u), stats.beta(start, start).cdf).pvalue > 1e-3
    edges = np.clip((np.arange(STEPS + 1) - 0.5) / (STEPS - 1), 0, 1)
    mass = np.diff(stats.beta(start, start).cdf(edges))
    assert_distribution(np.asarray(t), mass)
    np.testing.assert_allclose(importance, 1 / (STEPS * mass[np.asarray(t)]), rtol=1e-3)
    # A loop in the draw would have the host follow it in every step.
    program = str(
        jax.make_jaxpr(functools.partial(policy.draw_from_policy, steps=STEPS))(
            state.params, keys, x0
        )
    )
    assert not any(loop in program for loop in ('while', 'scan'))
    a, b = jnp.asarray([0.7, 3.0]), jnp.asarray([2.0, 1.5])
    np.testing.assert_allclose(
        policy.entropy(a, b), stats.beta(a, b).entropy(), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        policy.log_density(jnp.asarray([0.2, 0.9]), a, b),
        stats.beta(a, b).logpdf([0.2, 0.9]),
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    ('a', 'b'), [(0.3, 0.5), (0.974, 0.974), (1.0, 4.0), (30.0, 2.0), (50.0, 50.0)]
)
def test_policy_draws_any_beta_distribution(a, b, monkeypatch):
    count, steps = 5_000, 1000
    monkeypatch.setattr(
        policy, 'propose', lambda params, x0: (jnp.full(count, a), jnp.full(count, b))
    )
    keys = jax.random.split(jax.random.key(7), count)
    u, t, importance = policy.draw_from_policy({}, keys, jnp.zeros((count, 1, 1, 1)), steps=steps)
    exact = stats.beta(a, b)
    assert stats.kstest(np.asarray(u, np.float64), exact.cdf).pvalue > 1e-3
    np.testing.assert_array_equal(t, np.round(np.asarray(u) * (steps - 1)))
    every = np.arange(steps)
    mass = np.diff(exact.cdf(np.clip((np.arange(steps + 1) - 0.5) / (steps - 1), 0, 1)))
    found = np.asarray(
        policy.beta_mass(jnp.asarray(every), jnp.full(steps, a), jnp.full(steps, b), steps)
    )
    likely = mass > 1e-6
    np.testing.assert_allclose(found[likely], mass[likely], rtol=0.01)
    assert found.sum() == pytest.approx(1, rel=1e-3)
    np.testing.assert_allclose(
        importance, 1 / (steps * np.maximum(found[np.asarray(t)], 1e-6)), rtol=1e-5
    )


@pytest.mark.long
def test_policy_moves_to_what_is_rewarded():
    config = tiny_config(timesteps={'sampler': 'policy', 'policy_learning_rate': 5e-3})
    x0 = jax.random.normal(jax.random.key(1), (64, 4, 4, 1))

    @jax.jit
    def step(state, key):
        keys = jax.random.split(key, 64)
        u = policy.draw_from_policy(state.params, keys, x0, steps=STEPS)[0]
        return policy.reinforce(config, state, keys, x0, 0.1 - jnp.square(u - 0.2), None), jnp.mean(
            u
        )

    state, path = policy.init_policy(config), []
    for key in jax.random.split(jax.random.key(0), 60):  # a scan's convolutions are slow on a CPU
        state, mean = step(state, key)
        path.append(float(mean))
    assert 0.4 < path[0] < 0.6
    assert 0.05 < np.mean(path[-20:]) < 0.33


def test_policy_probes_are_the_best_correlated_timesteps():
    rng = np.random.default_rng(0)
    deltas = rng.normal(size=(6, STEPS)) * 0.1
    common = rng.normal(size=6) * 5
    deltas[:, [7, 21, 33]] += common[:, None]
    deltas[5] = 1e3  # not measured yet
    probes = policy.select_probes(jnp.asarray(deltas, jnp.float32), jnp.asarray(5), 3)
    assert sorted(np.asarray(probes).tolist()) == [7, 21, 33]


def test_policy_bound_terms_are_ddpms_weighted_error():
    """With variance β: L_t = β²/(2 β α (1 − ᾱ)) ‖ε − ε̂‖² plus what does not depend on the network
    (DDPM eq. 12).
    """
    diffusion = make_diffusion(DiffusionConfig(steps=STEPS))
    t = jnp.arange(1, STEPS)
    keys = jax.random.split(jax.random.key(0), 3)
    x0, noise, error = (jax.random.normal(k, (STEPS - 1, 4, 4, 1)) for k in keys)
    xt = q_sample(diffusion, x0, t, noise)
    terms = functools.partial(policy.bound_terms, diffusion, x0=x0, xt=xt, t=t)
    got = terms(output=noise + error) - terms(output=noise)
    b = diffusion.betas[1:]
    want = (
        b
        / (2 * (1 - b) * (1 - diffusion.alphas_cumprod[1:]))
        * np.mean(np.square(error), axis=(1, 2, 3))
        / np.log(2)
    )
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
