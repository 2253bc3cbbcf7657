"""Losses and the variational bound against independent computations in float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from support.diffusion import PREDICTIONS, SHAPE, batch, steps_of

from jaxunet.config import DiffusionConfig
from jaxunet.diffusion import objectives
from jaxunet.diffusion import process as d


@pytest.mark.parametrize('prediction', PREDICTIONS)
def test_loss_is_the_mean_squared_error_of_the_target(prediction):
    diffusion = d.make_diffusion(DiffusionConfig(objective=prediction))
    x0, noise = batch(3)
    t = steps_of(diffusion)
    xt = d.q_sample(diffusion, x0, t, noise)
    target = objectives.prediction_target(diffusion, x0, t, noise)
    offset = jnp.asarray([0.0, 0.5, 1.0, 2.0], jnp.float32)
    loss = jax.jit(lambda o: objectives.per_sample_loss(diffusion, o, x0, xt, t, noise))(
        target + offset[:, None, None, None]
    )
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, [0, 0.25, 1, 4], rtol=1e-5)


def test_loss_is_float32_for_a_bfloat16_network():
    diffusion = d.make_diffusion(DiffusionConfig(learn_sigma=True))
    x0, noise = batch(4)
    t = steps_of(diffusion)
    xt = d.q_sample(diffusion, x0, t, noise)
    output = jnp.concatenate([noise, jnp.zeros_like(noise)], axis=-1).astype(jnp.bfloat16)
    loss = objectives.per_sample_loss(diffusion, output, x0, xt, t, noise)
    assert loss.dtype == jnp.float32
    np.testing.assert_array_equal(
        loss, objectives.per_sample_loss(diffusion, output.astype(jnp.float32), x0, xt, t, noise)
    )


@pytest.mark.parametrize(
    ('learn_sigma', 'channels', 'expected'), [(False, 2, 1), (True, 1, 2), (True, 3, 2)]
)
def test_wrong_number_of_output_channels_is_an_error(learn_sigma, channels, expected):
    diffusion = d.make_diffusion(DiffusionConfig(learn_sigma=learn_sigma))
    x0, noise = batch(5)
    with pytest.raises(ValueError, match=f'expected {expected} channels .* found {channels}'):
        objectives.per_sample_loss(
            diffusion,
            jnp.zeros((*SHAPE[:3], channels), jnp.float32),
            x0,
            x0,
            steps_of(diffusion),
            noise,
        )


def exact_bound(config, prediction_error, values, x0, noise, steps):
    """L_{t−1} in bits per dimension from the betas, in float64; the network's ε is off by
    `prediction_error`.
    """
    betas = d.make_betas(config.schedule, config.steps)
    alphas = np.cumprod(1 - betas)
    terms = []
    for i, t in enumerate(steps):
        x0_i, noise_i = x0[i].astype(np.float64), noise[i].astype(np.float64)
        xt = math.sqrt(alphas[t]) * x0_i + math.sqrt(1 - alphas[t]) * noise_i
        previous = alphas[t - 1] if t else 1.0

        def posterior_mean(x0, xt=xt, t=t, previous=previous):
            return (
                math.sqrt(previous) * betas[t] * x0 + math.sqrt(1 - betas[t]) * (1 - previous) * xt
            ) / (1 - alphas[t])

        predicted_x0 = (xt - math.sqrt(1 - alphas[t]) * (noise_i + prediction_error)) / math.sqrt(
            alphas[t]
        )
        s = max(t, 1)
        small = betas[s] * (1 - alphas[s - 1]) / (1 - alphas[s])
        w = (values[i].astype(np.float64) + 1) / 2
        std = np.exp(0.5 * (w * math.log(betas[t]) + (1 - w) * math.log(small)))
        mean, predicted = posterior_mean(x0_i), posterior_mean(predicted_x0)
        if t == 0:
            upper = np.where(x0_i > 0.999, np.inf, (x0_i + 1 / 255 - predicted) / std)
            lower = np.where(x0_i < -0.999, -np.inf, (x0_i - 1 / 255 - predicted) / std)
            nats = -np.log(
                np.maximum(scipy.stats.norm.cdf(upper) - scipy.stats.norm.cdf(lower), 1e-12)
            )
        else:
            nats = (
                np.log(std / math.sqrt(small))
                + (small + (mean - predicted) ** 2) / (2 * std**2)
                - 0.5
            )
        terms.append(nats.mean() / math.log(2))
    return np.array(terms)


@pytest.mark.parametrize('schedule', ['linear', 'cosine'])
def test_variational_bound_against_float64(schedule):
    config = DiffusionConfig(schedule=schedule, learn_sigma=True, steps=200)
    diffusion = d.make_diffusion(config)
    steps = np.array([0, 0, 1, 2, 50, 150, 198], np.int32)
    x0, noise = batch(6, count=7, channels=3)
    x0 = x0.at[0, 0, 0].set(-1.0).at[1, 0, 0].set(1.0)
    values = np.random.default_rng(7).uniform(-1.2, 1.2, x0.shape).astype(np.float32)
    t = jnp.asarray(steps)
    xt = d.q_sample(diffusion, x0, t, noise)
    output = jnp.concatenate([noise + 0.3, jnp.asarray(values)], axis=-1)
    got = objectives.variational_bound(diffusion, output, x0, xt, t)
    expected = exact_bound(config, 0.3, values, np.asarray(x0), np.asarray(noise), steps)
    np.testing.assert_allclose(got, expected, rtol=2e-3)
    # The hybrid loss with the default weight 1e-3 has guided-diffusion's T / 1000 in front of it.
    loss = objectives.per_sample_loss(diffusion, output, x0, xt, t, noise)
    np.testing.assert_allclose(loss, 0.3**2 + 200 / 1000 * expected, rtol=2e-3)


def test_bound_is_zero_for_the_true_posterior():
    """With the right ε and variance β̃ the KL vanishes; any other variance costs something."""
    diffusion = d.make_diffusion(DiffusionConfig(learn_sigma=True))
    x0, noise = batch(8)
    t = jnp.asarray([1, 10, 100, 900], jnp.int32)
    xt = d.q_sample(diffusion, x0, t, noise)

    def bound(value):
        return objectives.variational_bound(
            diffusion, jnp.concatenate([noise, jnp.full_like(noise, value)], axis=-1), x0, xt, t
        )

    np.testing.assert_allclose(bound(-1.0), 0, atol=1e-4)
    assert (np.asarray(bound(-1.0))[:2] < np.asarray(bound(0.0))[:2]).all()


def test_decoder_is_a_distribution_over_pixel_values():
    """The 256 probabilities add up to 1, also where the mean lies beyond the last bin."""
    pixels = np.arange(256, dtype=np.float32) / np.float32(127.5) - 1
    for mean, std in ((0.1, 0.02), (-1.3, 0.3), (0.9, 1.0), (1.0, 0.001)):
        x0 = jnp.asarray(pixels).reshape(1, 16, 16, 1)
        nll = objectives.discretized_gaussian_nll(
            x0, jnp.full_like(x0, mean), jnp.full_like(x0, 2 * math.log(std))
        )
        assert float(jnp.exp(-nll).sum()) == pytest.approx(1, abs=1e-5)


def test_decoder_of_16_bits_is_a_distribution_over_their_values():
    """Against float64 at every value; the outermost bins alone extend to infinity."""
    grid = np.arange(2**16) / 32767.5 - 1
    x0 = jnp.asarray(grid, jnp.float32).reshape(1, 256, 256, 1)
    edges = np.concatenate([[-np.inf], (grid[1:] + grid[:-1]) / 2, [np.inf]])
    for mean, std in ((0.1, 0.02), (-0.9999, 0.01), (0.9, 1.0)):
        nll = objectives.discretized_gaussian_nll(
            x0, jnp.full_like(x0, mean), jnp.full_like(x0, 2 * math.log(std)), bits=16
        )
        exact = np.diff(scipy.stats.norm.cdf(edges, mean, std))
        np.testing.assert_allclose(np.exp(-nll).ravel(), exact, rtol=0.01, atol=1e-6 * exact.max())


@pytest.mark.parametrize('side', [-1, 1])
def test_decoder_is_accurate_in_both_tails(side):
    """Against float64 where the mass is as small as 1e-9, on either side of the mean."""
    x0, std = np.float32(side * 0.6), 0.1
    distance = np.array([0.0, 1.0, 3.0, 5.0, 5.5])
    mean = (x0 - side * distance * std).astype(np.float32)
    exact = -np.log(
        np.diff(scipy.stats.norm.cdf([-distance - 1 / 25.5, -distance + 1 / 25.5]), axis=0)[0]
    )
    images = jnp.full((5, 1, 1, 1), x0)
    got = objectives.discretized_gaussian_nll(
        images, jnp.asarray(mean).reshape(5, 1, 1, 1), jnp.full_like(images, 2 * math.log(std))
    )
    np.testing.assert_allclose(got.ravel(), exact, rtol=1e-5)


@pytest.mark.parametrize(
    'prediction',
    [p if p == 'epsilon' else pytest.param(p, marks=pytest.mark.long) for p in PREDICTIONS],
)
def test_hybrid_loss_gradient_leaves_the_prediction_alone(prediction):
    """The prediction's gradient is that of the mean squared error alone; the variance's is that of
    the bound alone, finite everywhere.
    """
    config = DiffusionConfig(objective=prediction, learn_sigma=True)
    diffusion, plain = (
        d.make_diffusion(config),
        d.make_diffusion(dataclasses.replace(config, learn_sigma=False)),
    )
    x0, noise = batch(9, count=6)
    x0 = x0.at[0, 0, 0].set(-1.0).at[0, 1, 1].set(1.0)
    t = jnp.asarray([0, 0, 1, 3, 500, 999], jnp.int32)
    xt = d.q_sample(diffusion, x0, t, noise)
    output = jax.random.normal(jax.random.key(1), (*x0.shape[:3], 2), jnp.float32)
    gradient = jax.grad(lambda o: objectives.per_sample_loss(diffusion, o, x0, xt, t, noise).sum())(
        output
    )
    only_error = jax.grad(lambda o: objectives.per_sample_loss(plain, o, x0, xt, t, noise).sum())(
        output[..., :1]
    )
    only_bound = jax.grad(lambda o: objectives.variational_bound(diffusion, o, x0, xt, t).sum())(
        output
    )
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[..., :1], only_error)
    np.testing.assert_allclose(
        gradient[..., 1:], only_bound[..., 1:] * diffusion.vlb_weight * 1000, rtol=1e-5, atol=1e-12
    )
    # Without the stop the bound would reach the prediction, and it does reach the variance: the two
    # checks above are not of zeros.
    assert np.abs(only_bound[2:, ..., :1]).max() > 0
    assert (np.abs(gradient[2:, ..., 1:]).max(axis=(1, 2, 3)) > 0).all()


def test_variational_bound_needs_a_learned_variance():
    diffusion = d.make_diffusion(DiffusionConfig())
    x0, noise = batch(10)
    with pytest.raises(ValueError, match='learned variance'):
        objectives.variational_bound(diffusion, noise, x0, x0, steps_of(diffusion))


def test_learned_variance_ends_at_beta_and_posterior():
    diffusion = d.make_diffusion(DiffusionConfig(learn_sigma=True))
    t = jnp.asarray([1, 500], jnp.int32)
    ones = jnp.ones((2, 1, 1, 1), jnp.float32)
    np.testing.assert_allclose(
        jnp.exp(d.learned_log_variance(diffusion, ones, t))[:, 0, 0, 0],
        diffusion.betas[[1, 500]],
        rtol=1e-5,
    )
    np.testing.assert_array_equal(
        d.learned_log_variance(diffusion, -ones, t), d.posterior(diffusion, ones, ones, t)[1]
    )
