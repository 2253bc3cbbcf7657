"""Timestep samplers: distributions, unbiasedness, convergence on constructed problems."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods_golden import TERMS, losses
from support.distributions import assert_distribution
from support.peer_values import FIXTURES

from jaxunet.config import Config, DiffusionConfig, TimestepsConfig, resolve, to_dict
from jaxunet.diffusion.process import make_diffusion
from jaxunet.diffusion.timesteps import (
    GradientNorms,
    LossHistory,
    gradient_norm_probabilities,
    inverse_cdf,
    make_sampler,
    second_moment_probabilities,
    speed_tables,
)
from jaxunet.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures('shared_steps')

STEPS = 40
GOLDEN = np.load(FIXTURES / 'methods_golden.npz')


def sampler_of(name, steps=STEPS, schedule='linear', **fields):
    process = {'steps': steps, 'schedule': schedule}
    config = Config().replace(diffusion=process, timesteps={'sampler': name, **fields})
    return make_sampler(config, make_diffusion(config.diffusion))


def draws(sampler, state, count=20_000):
    keys = jax.random.split(jax.random.key(1), count)
    if sampler.keys_in_pairs:
        keys = jnp.repeat(keys[::2], 2)
    return jax.jit(sampler.draw)(
        state, keys, jnp.arange(count, dtype=jnp.int32), jnp.zeros((count, 1, 1, 1), jnp.float32)
    )


def test_inverse_cdf_is_exact():
    p = jnp.asarray([0.25, 0.0, 0.5, 0.25])
    u = jnp.asarray([0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 0.99999])
    np.testing.assert_array_equal(inverse_cdf(p, u), [0, 0, 2, 2, 2, 3, 3])
    np.testing.assert_array_equal(inverse_cdf(3 * p, u), inverse_cdf(p, u))


def test_uniform():
    sampler = sampler_of('uniform')
    got = draws(sampler, sampler.init())
    assert_distribution(np.asarray(got.t), np.full(STEPS, 1 / STEPS))
    assert (np.asarray(got.importance) == 1).all()


def test_speed():
    config, diffusion = TimestepsConfig(), make_diffusion(DiffusionConfig())
    p, dual = speed_tables(config, diffusion)
    np.testing.assert_allclose(p[[0, 699, 700, 999]], np.array([5, 5, 1, 1]) / (1000 + 700 * 4))
    np.testing.assert_array_equal(dual[[0, 1, 641, 642, 999]], [642, 641, 1, 0, 357])
    p, dual = speed_tables(config, make_diffusion(DiffusionConfig(steps=STEPS)))
    sampler = sampler_of('speed')
    got = draws(sampler, ())
    t = np.asarray(got.t)
    assert_distribution(t[::2], p)
    np.testing.assert_array_equal(t[1::2], dual[t[::2]])
    assert (np.asarray(got.weight) == 1).all()


@pytest.mark.parametrize(('schedule', 'switch'), [('linear', 641), ('cosine', 958)])
def test_speed_code_is_that_of_its_authors(schedule, switch):
    config = TimestepsConfig(sampler='speed_code')
    p, dual = speed_tables(config, make_diffusion(DiffusionConfig(schedule=schedule)))
    np.testing.assert_allclose(p, GOLDEN[f'speed_p_{schedule}'], rtol=1e-9)
    assert dual[0] == GOLDEN[f'speed_middle_{schedule}']
    assert np.argmax(p < (p.max() + p.min()) / 2) == switch
    sampler = make_sampler(Config(timesteps=config), make_diffusion(DiffusionConfig()))
    assert sampler.keys_in_pairs


def history_of(moments, length=10):
    return LossHistory(
        jnp.asarray(np.repeat(moments[:, None], length, 1), jnp.float32),
        jnp.full(len(moments), length, jnp.int32),
    )


def test_loss_second_moment_is_that_of_iddpms_code():
    t, loss = losses()
    sampler = sampler_of('loss_second_moment', TERMS, schedule='cosine')
    state = sampler.init()
    for rows in np.split(np.arange(len(t)), 12):
        ones = jnp.ones(len(rows), jnp.float32)
        state = sampler.update(
            state, jnp.asarray(t[rows], jnp.int32), jnp.asarray(loss[rows], jnp.float32), ones
        )
    found = second_moment_probabilities(state, 0.001)
    np.testing.assert_allclose(found, GOLDEN['resampled'], rtol=1e-5)


def norms_of(norm):
    """Averages that have seen much."""
    return GradientNorms(
        jnp.ones(len(norm), jnp.float32), jnp.asarray(np.square(norm), jnp.float32)
    )


@pytest.mark.parametrize('name', ['loss_second_moment', 'adaptive', 'speed'])
def test_importance_makes_the_mean_that_of_uniform_timesteps(name):
    sampler = sampler_of(name, adaptive_bins=8)
    config = TimestepsConfig(adaptive_bins=8)
    state = {
        'loss_second_moment': history_of(np.linspace(0.1, 2, STEPS)),
        'adaptive': norms_of(np.linspace(0.1, 2, 8)),
        'speed': (),
    }[name]
    got = draws(sampler, state)
    value = jnp.square(got.t.astype(jnp.float32))
    exact = np.mean(np.arange(STEPS) ** 2.0)
    assert np.ptp(np.asarray(got.importance)) > 0.5
    assert float(jnp.mean(value * got.importance)) == pytest.approx(exact, rel=0.03)
    if name != 'speed':
        np.testing.assert_array_equal(got.weight, got.importance)
    assert_distribution(
        np.asarray(got.t),
        {
            'loss_second_moment': lambda: np.asarray(
                second_moment_probabilities(state, 0.001), np.float64
            ),
            'adaptive': lambda: np.asarray(
                gradient_norm_probabilities(state, config, STEPS), np.float64
            ),
            'speed': lambda: (
                1
                / (
                    STEPS
                    * np.asarray(
                        [got.importance[np.argmax(got.t == t)] for t in range(STEPS)], np.float64
                    )
                )
                * np.isin(np.arange(STEPS), got.t)
            ),
        }[name](),
    )


def test_loss_second_moment_keeps_the_last_losses_of_each_timestep():
    sampler = sampler_of('loss_second_moment', steps=30, history=3)
    rng, state, expected = np.random.default_rng(0), sampler.init(), [[] for _ in range(30)]
    update = jax.jit(sampler.update)
    for number in range(12):
        t, loss = rng.integers(0, 30, 16), rng.random(16)
        t[:7] = 4  # more than the history holds
        t[8:12] = (4 * number + np.arange(4)) % 30
        state = update(
            state, jnp.asarray(t, jnp.int32), jnp.asarray(loss, jnp.float32), jnp.full(16, 2.0)
        )
        for i, v in zip(t, loss, strict=True):
            expected[i].append(2 * v)
    np.testing.assert_array_equal(state.counts, [len(e) for e in expected])
    for got, want in zip(np.asarray(state.losses), expected, strict=True):
        filled = np.sort(want[-3:])
        np.testing.assert_allclose(np.sort(got)[3 - len(filled) :], filled, rtol=1e-6)


def test_loss_second_moment_converges_to_the_known_moments():
    sampler = sampler_of('loss_second_moment', history=10)
    scale = jnp.asarray(np.geomspace(1, 0.05, STEPS), jnp.float32)

    def step(state, key):
        keys = jax.random.split(key, 64)
        got = sampler.draw(state, keys, jnp.arange(64), jnp.zeros((64, 1, 1, 1)))
        return sampler.update(
            state, got.t, scale[got.t], jnp.ones(64)
        ), second_moment_probabilities(state, 0.001)

    state, path = jax.lax.scan(step, sampler.init(), jax.random.split(jax.random.key(0), 100))
    np.testing.assert_allclose(
        path[2], 1 / STEPS, rtol=1e-6
    )  # uniform until all histories are full
    np.testing.assert_allclose(
        second_moment_probabilities(state, 0.001),
        0.999 * scale / scale.sum() + 0.001 / STEPS,
        rtol=1e-4,
    )


def follow_gradients(second_moment, weight, count, **fields):
    """A constructed problem: losses of mean `second_moment` at each timestep, exponentially
    distributed, of constant weights.
    """
    sampler = sampler_of('adaptive', adaptive_bins=STEPS, **fields)
    config = TimestepsConfig(adaptive_bins=STEPS, **fields)
    second_moment, weight = (jnp.asarray(x, jnp.float32) for x in (second_moment, weight))

    def step(state, key):
        keys = jax.random.split(key, 65)
        t = sampler.draw(state, keys[:64], jnp.arange(64), jnp.zeros((64, 1, 1, 1))).t
        state = sampler.update(
            state, t, second_moment[t] * jax.random.exponential(keys[64], (64,)), weight[t]
        )
        return state, gradient_norm_probabilities(state, config, STEPS)

    return np.asarray(
        jax.lax.scan(step, sampler.init(), jax.random.split(jax.random.key(3), count))[1]
    )


def variance(p, second_moment, weight):
    """Variance of w_t/(T p_t) r at t ~ p, with r of mean 0 and mean square `second_moment`."""
    return np.sum(np.square(weight) * second_moment / p) / STEPS**2


MOMENTS, WEIGHTS = np.geomspace(1, 1e-3, STEPS), 1 / (1 + np.geomspace(100, 1e-3, STEPS))


def test_adaptive_converges_to_the_least_variance():
    path = follow_gradients(MOMENTS, WEIGHTS, 3000)
    np.testing.assert_allclose(path.sum(1), 1, rtol=1e-5)
    norm = WEIGHTS * np.sqrt(MOMENTS)
    best = norm / norm.sum()
    np.testing.assert_allclose(path[1000:].mean(0), 0.95 * best + 0.05 / STEPS, rtol=0.05)
    reached, least, uniform = (
        variance(p, MOMENTS, WEIGHTS)
        for p in (path[-1].astype(np.float64), best, np.full(STEPS, 1 / STEPS))
    )
    assert least < reached < 1.05 * least
    assert uniform > 1.25 * least


def test_adaptive_is_uniform_until_all_bins_were_visited_and_bounds_its_factor():
    path = follow_gradients(
        np.where(np.arange(STEPS) < 2, 1.0, 0.0), np.ones(STEPS), 200, adaptive_uniform=0.2
    )
    np.testing.assert_allclose(path[0], 1 / STEPS, rtol=1e-6)
    np.testing.assert_allclose(path[-1, 2:], 0.2 / STEPS, rtol=1e-3)
    assert path[-1, :2].sum() == pytest.approx(0.8 + 2 * 0.2 / STEPS, rel=1e-3)
    still = follow_gradients(np.zeros(STEPS), np.ones(STEPS), 50)
    np.testing.assert_allclose(still, 1 / STEPS, rtol=1e-6)


@pytest.mark.parametrize('bins', [1, 2, 8, STEPS])
def test_adaptive_goes_in_straight_lines_without_a_loop(bins):
    """Between the logarithms at the bins' centres; level beyond the first and the last."""
    state = norms_of(np.random.default_rng(bins).uniform(0.1, 3, bins))
    config = TimestepsConfig(adaptive_bins=bins)
    centres = (np.arange(bins) + 0.5) * STEPS / bins - 0.5
    norm = np.exp(
        np.interp(np.arange(STEPS), centres, np.log(np.asarray(state.square, np.float64)) / 2)
    )
    wanted = 0.95 * norm / norm.sum() + 0.05 / STEPS
    np.testing.assert_allclose(gradient_norm_probabilities(state, config, STEPS), wanted, rtol=1e-5)
    # A loop's body is a launch or more each time on a GPU: ten of them cost a hundredth of a step.
    program = str(
        jax.make_jaxpr(lambda state: gradient_norm_probabilities(state, config, STEPS))(state)
    )
    assert not any(loop in program for loop in ('while', 'scan', 'sort['))


@pytest.mark.parametrize(('bins', 'steps'), [(7, 40), (40, 40), (50_000, 50_000)])
def test_adaptive_finds_the_bin_of_each_timestep(bins, steps):
    """Also where bins times timesteps exceeds the integers of 32 bits."""
    sampler = sampler_of('adaptive', steps, adaptive_bins=bins)
    t = np.array([0, 1, steps // 2, steps - 2, steps - 1])
    ones = jnp.ones(len(t), jnp.float32)
    state = sampler.update(sampler.init(), jnp.asarray(t, jnp.int32), ones, ones)
    np.testing.assert_array_equal(np.flatnonzero(state.weight), np.unique(t * bins // steps))


def test_adaptive_correction_is_a_power_of_the_importance():
    state = norms_of(np.linspace(0.1, 2, 8))
    whole, half, none = (
        draws(sampler_of('adaptive', adaptive_bins=8, adaptive_correction=c), state, 100)
        for c in (1.0, 0.5, 0.0)
    )
    np.testing.assert_array_equal(half.t, whole.t)
    np.testing.assert_allclose(half.weight, np.sqrt(whole.importance), rtol=1e-6)
    assert np.ptp(np.asarray(half.weight)) > 0.1
    assert (np.asarray(none.weight) == 1).all()


def test_adaptive_follows_losses_that_change():
    sampler, config = (
        sampler_of('adaptive', adaptive_bins=8, adaptive_memory=40.0),
        TimestepsConfig(adaptive_bins=8),
    )
    state = norms_of(np.ones(8))
    rng = np.random.default_rng(0)
    loss = np.where(np.arange(STEPS) < 20, 4.0, 1.0)
    for _ in range(60):
        t = rng.integers(0, STEPS, 64)
        state = sampler.update(
            state, jnp.asarray(t, jnp.int32), jnp.asarray(loss[t], jnp.float32), jnp.full(64, 3.0)
        )
    p = np.asarray(gradient_norm_probabilities(state, config, STEPS))
    assert p[0] / p[-1] == pytest.approx((0.95 * 2 / 1.5 + 0.05) / (0.95 / 1.5 + 0.05), rel=0.02)
    assert (np.diff(p) <= 1e-7).all()  # straight lines between the bins


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'sampler': 'adaptiv'}, r'timesteps.sampler: expected one of .*; did you mean "adaptive"'),
        (
            {'sampler': 'adaptive', 'adaptive_bins': 2000},
            r'timesteps.adaptive_bins: 2000 is more than diffusion.steps \(1000\)',
        ),
        (
            {'sampler': 'policy', 'policy_probes': 2000},
            r'timesteps.policy_probes: 2000 is more than diffusion.steps \(1000\)',
        ),
        (
            {'adaptive_correction': 2.0},
            r'timesteps.adaptive_correction: expected 0 to 1, found 2.0',
        ),
        ({'policy_every': 0}, r'timesteps.policy_every: expected more than 0, found 0'),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(UserError, match=message):
        resolve(to_dict(Config().replace(timesteps=fields)))
