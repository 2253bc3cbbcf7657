"""InfoNoise: on Gaussian data, whose rate of information is known, and its limits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from support.turns import in_turn

from jaxunet.config import Config, LossConfig, TimestepsConfig, resolve, to_dict
from jaxunet.diffusion.information_rate import (
    Errors,
    add_losses,
    information_probabilities,
    log_errors,
    make_levels,
    onset,
    start,
)
from jaxunet.diffusion.process import make_diffusion
from jaxunet.diffusion.timesteps import make_sampler
from jaxunet.runtime.errors import UserError

VARIANCE = 0.09  # of the Gaussian data
OBJECTIVES = ('epsilon', 'x0', 'v', 'edm', 'flow')
LOSSES = {  # of a prediction, per squared error of x_0
    'epsilon': lambda s: 1 / s**2,
    'x0': np.ones_like,
    'v': lambda s: (1 + s**2) / s**2,
    'edm': lambda s: (s**2 + 0.25) / (0.5 * s) ** 2,
    'flow': lambda s: ((1 + s) / s) ** 2,
}
WEIGHTS = {  # of the loss of ε
    'uniform': lambda s: None,
    'min_snr': lambda s: np.minimum(s**-2, 5) * s**2,
    'p2': lambda s: 1 / (1 + s**-2),
}


def config_of(objective='edm', weighting='uniform', steps=1000, **fields) -> Config:
    options = {'sampler': 'infonoise', 'infonoise_warmup': 0, 'infonoise_uniform': 0.0, **fields}
    diffusion = {'objective': objective, 'steps': steps}
    return Config().replace(diffusion=diffusion, loss={'weighting': weighting}, timesteps=options)


def levels_of(config: Config):
    return make_levels(config.timesteps, config.loss, make_diffusion(config.diffusion))


def least_error(sigma):
    """The least mean squared error of Gaussian x_0 at x_0 + σ ε."""
    return VARIANCE * sigma**2 / (VARIANCE + sigma**2)


def target(config: Config, sigma, pivot=None):
    """p by the paper's equations 13 to 15, each per σ, on the grid of the timesteps."""
    if pivot is None:
        grid = np.geomspace(0.002, 200, 20_001)
        rate = least_error(grid) / grid**3
        pivot = grid[rate / rate.max() >= 0.002].max()
    weight = LOSSES[config.diffusion.objective](sigma)
    if config.loss.weighting != 'uniform':
        weight = WEIGHTS[config.loss.weighting](sigma) / sigma**2
    rate = least_error(sigma) / sigma**3 * sigma**3 / (sigma**3 + pivot**3)
    p = rate / weight * np.gradient(np.log(sigma)) * sigma
    return p / p.sum()


def losses(config: Config, sigma):
    return least_error(sigma) * LOSSES[config.diffusion.objective](sigma)


@pytest.mark.parametrize(
    ('weighting', 'objective'),
    in_turn({name: name for name in WEIGHTS}, *((name,) for name in OBJECTIVES)),
)
def test_gaussian_data_give_the_density_of_the_paper(weighting, objective):
    config = config_of(objective, weighting)
    levels = levels_of(config)
    sigma, steps = np.exp(levels.log_sigma), len(levels.log_sigma)
    loss = jnp.asarray(losses(config, sigma), jnp.float32)
    state = add_losses(start(levels), jnp.arange(steps, dtype=jnp.int32), loss, levels, 1.0)
    found = np.asarray(information_probabilities(state, levels, config.timesteps))
    expected = target(config, sigma)
    assert found.sum() == pytest.approx(1, rel=1e-5)
    np.testing.assert_allclose(found, expected, rtol=0.12)
    assert np.abs(found - expected).sum() < 0.03


def test_all_objectives_move_the_weights_to_one_density():
    """p w per ln σ, in bins of ln σ that all of them have."""
    bins, densities = np.linspace(-2.5, 2, 10), []
    for objective in OBJECTIVES:
        config = config_of(objective)
        sigma = np.exp(levels_of(config).log_sigma)
        weights = target(config, sigma) * LOSSES[objective](sigma)
        density = np.histogram(np.log(sigma), bins, weights=weights)[0]
        densities.append(density / density.sum())
    np.testing.assert_allclose(densities, np.broadcast_to(densities[0], (5, 9)), atol=0.02)


@pytest.mark.parametrize('objective', ['edm', pytest.param('flow', marks=pytest.mark.long)])
def test_it_finds_the_density_from_the_losses_of_its_own_draws(objective):
    config = config_of(objective, infonoise_warmup=100, infonoise_uniform=0.05)
    diffusion = make_diffusion(config.diffusion)
    sampler, levels = make_sampler(config, diffusion), levels_of(config)
    sigma = np.exp(levels.log_sigma)
    mean = jnp.asarray(losses(config, sigma), jnp.float32)

    def step(state, key):
        keys = jax.random.split(key, 129)
        got = sampler.draw(state, keys[:128], jnp.arange(128), jnp.zeros((128, 1, 1, 1)))
        noisy = mean[got.t] * jax.random.exponential(keys[128], (128,))
        state = sampler.update(state, got.t, noisy, jnp.ones(128))
        return state, information_probabilities(state, levels, config.timesteps)

    keys = jax.random.split(jax.random.key(0), 600)
    state, path = jax.lax.scan(step, sampler.init(), keys)
    np.testing.assert_allclose(path[:99], 1 / 1000, rtol=1e-6)
    expected = 0.95 * target(config, sigma) + 0.05 / 1000
    assert np.abs(np.mean(path[300:], axis=0) - expected).sum() < 0.05
    got = jax.jit(sampler.draw)(
        state,
        jax.random.split(jax.random.key(1), 20_000),
        jnp.arange(20_000),
        jnp.zeros((20_000, 1, 1, 1)),
    )
    p = np.asarray(path[-1], np.float64)
    counts = np.bincount(got.t, minlength=1000).reshape(100, 10).sum(1)
    assert stats.chisquare(counts, 20_000 * p.reshape(100, 10).sum(1) / p.sum()).pvalue > 1e-3
    assert (np.asarray(got.weight) == 1).all()  # the effective weights move with p
    np.testing.assert_allclose(got.importance, 1 / (1000 * p[np.asarray(got.t)]), rtol=1e-4)


def errors_of(levels, value=1.0, visited=None) -> Errors:
    ones = jnp.ones(levels.bin_count, jnp.float32)
    visited = ones if visited is None else visited
    return Errors(visited, value * ones, jnp.asarray(10, jnp.int32))


@pytest.mark.parametrize(
    'config',
    [
        *map(config_of, OBJECTIVES),
        # Levels below 0.002, at which m/σ³ is larger still.
        config_of('edm').replace(diffusion={'edm_std': 2.0}),
    ],
    ids=[*OBJECTIVES, 'wide edm'],
)
def test_the_pivot_does_not_depend_on_the_range_of_levels(config):
    """m = s² σ²/(s² + σ²): m/σ³ is 0.002 of its value at 0.002 where σ (1 + σ²/s²) = 1."""
    levels = levels_of(config)
    sigma = np.exp(levels.log_sigma)
    error = least_error(sigma) * (1 + sigma**2) / sigma**2
    found = float(onset(jnp.asarray(np.log(error), jnp.float32), levels))
    (root,) = (r.real for r in np.roots([1 / VARIANCE, 0, 1, -1]) if abs(r.imag) < 1e-9)
    # Within the next levels; for flow, s² is not what m/σ² is at its lowest level, 0.037.
    assert np.exp(found) == pytest.approx(root, rel=0.03)


def test_the_onset_rule_where_every_level_is_below_its_range():
    levels = levels_of(config_of('edm').replace(diffusion={'edm_mean': -10.0, 'edm_std': 0.5}))
    log_error = jnp.zeros(len(levels.log_sigma), jnp.float32)
    # The error of v is 1, so the rate is 1/σ: above 0.002 of 1/0.002 everywhere.
    assert float(onset(log_error, levels)) == pytest.approx(levels.log_sigma[-1])


def test_a_given_pivot_replaces_the_onset_rule():
    config = config_of(infonoise_pivot=0.2)
    levels = levels_of(config)
    sigma = np.exp(levels.log_sigma)
    error = least_error(sigma) * (1 + sigma**2) / sigma**2
    means = np.bincount(levels.bins, weights=error) / np.bincount(levels.bins)
    state = errors_of(levels, jnp.asarray(means, jnp.float32))
    found = np.asarray(information_probabilities(state, levels, config.timesteps))
    assert np.abs(found - target(config, sigma, 0.2)).sum() < 0.03
    other = information_probabilities(state, levels, TimestepsConfig(infonoise_warmup=0))
    assert np.abs(found - other).sum() > 0.1


def test_it_is_uniform_in_the_warmup_and_until_every_bin_was_visited():
    config = config_of(infonoise_warmup=11)
    levels, options = levels_of(config), config.timesteps
    state = errors_of(levels)
    now, then = (
        np.asarray(
            information_probabilities(state._replace(updates=jnp.asarray(n)), levels, options)
        )
        for n in (10, 11)
    )
    np.testing.assert_allclose(now, 1e-3, rtol=1e-6)
    assert then.max() > 2e-3
    missing = state._replace(weight=state.weight.at[3].set(0), updates=jnp.asarray(20))
    np.testing.assert_allclose(information_probabilities(missing, levels, options), 1e-3, rtol=1e-6)


def test_errors_of_networks_that_err_much_count_as_those_of_a_linear_estimate():
    levels = levels_of(config_of('epsilon'))
    np.testing.assert_array_equal(log_errors(errors_of(levels, 1e6), levels), 0.0)
    np.testing.assert_allclose(log_errors(errors_of(levels, 0.25), levels), np.log(0.25), rtol=1e-6)


@pytest.mark.parametrize(('steps', 'bins'), [(40, 32), (40, 1), (1000, 32), (1000, 1000)])
def test_bins_without_a_timestep_are_left_out(steps, bins):
    """The first timesteps of DDPM are further apart than bins are wide."""
    config = config_of('epsilon', steps=steps, infonoise_bins=bins)
    levels = levels_of(config)
    assert 1 <= levels.bin_count <= bins
    assert set(levels.bins) == set(range(levels.bin_count))
    t = jnp.arange(steps, dtype=jnp.int32)
    loss = jnp.full(steps, 1e-3)
    state = add_losses(start(levels), t, loss, levels, 300.0)
    counts = np.bincount(levels.bins)
    np.testing.assert_allclose(state.weight, 1 - np.exp(-counts / 300), rtol=1e-4)
    p = np.asarray(information_probabilities(state, levels, config.timesteps))
    assert (p > 0).all()


def test_a_very_wide_range_of_levels():
    config = config_of('edm').replace(diffusion={'edm_std': 20.0})
    with np.errstate(all='ignore'):  # from the tables for samplers
        levels = levels_of(config)
    p = np.asarray(information_probabilities(errors_of(levels), levels, config.timesteps))
    assert np.isfinite(p).all()
    assert p.sum() == pytest.approx(1, rel=1e-5)
    middle = np.abs(levels.log_sigma) < 5
    assert p[middle].sum() > 0.9


def test_a_weight_of_zero_draws_nothing():
    config = config_of('epsilon', 'speed').replace(loss={'speed_lambda': 0.0})
    levels = levels_of(config)
    p = np.asarray(information_probabilities(errors_of(levels), levels, config.timesteps))
    assert np.isfinite(p).all()
    assert (p == 0).sum() == 1


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'diffusion': {'learn_sigma': True}},
            r'sampler: infonoise reads .* diffusion.learn_sigma',
        ),
        ({'diffusion': {'kl_loss': True}}, r'sampler: infonoise reads .* diffusion.kl_loss'),
        ({'loss': {'weighting': 'uncertainty'}}, r'sampler: infonoise divides by a fixed weight'),
        ({'timesteps': {'infonoise_bins': 2000}}, r'infonoise_bins: 2000 is more than'),
        ({'timesteps': {'infonoise_pivot': -1.0}}, r'infonoise_pivot: expected 0 or more'),
        ({'timesteps': {'infonoise_uniform': 1.5}}, r'infonoise_uniform: expected 0 to 1'),
        (
            {'diffusion': {'objective': 'edm', 'steps': 1}, 'timesteps': {'infonoise_bins': 1}},
            r'infonoise needs diffusion.steps of 2 or more, found 1',
        ),
    ],
)
def test_what_it_cannot_do_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        resolve(to_dict(config_of('epsilon').replace(**changes)))


def test_weightings_of_the_network_s_own_loss_are_divided_out():
    """`speed` multiplies the network's own loss, not that of ε."""
    loss = LossConfig(weighting='speed')
    diffusion = make_diffusion(config_of('v').diffusion)
    plain, speed = (
        make_levels(TimestepsConfig(), weighting, diffusion).density
        for weighting in (LossConfig(), loss)
    )
    ratio = plain / speed
    np.testing.assert_allclose(ratio[700:], ratio[-1], rtol=1e-5)
    assert (ratio[:700] < ratio[-1]).all()
