"""The diffusion process against independent computations in float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from support.diffusion import PREDICTIONS, batch

from jaxunet.config import DiffusionConfig
from jaxunet.diffusion import objectives
from jaxunet.diffusion import process as d
from jaxunet.runtime.errors import UserError


def test_linear_schedule_known_values():
    betas = d.make_betas('linear', 1000)
    assert betas.dtype == np.float64
    np.testing.assert_allclose(betas[[0, 999]], [1e-4, 0.02], rtol=1e-12)
    np.testing.assert_allclose(np.diff(betas), (0.02 - 1e-4) / 999, rtol=1e-9)
    # Ho et al., section 4: about 4e-5 of the signal's variance is left.
    assert 4.0e-5 < d.make_diffusion(DiffusionConfig()).alphas_cumprod[-1] < 4.1e-5
    # Fewer steps end at about the same noise.
    np.testing.assert_allclose(d.make_betas('linear', 250)[[0, -1]], [4e-4, 0.08], rtol=1e-12)


def test_cosine_schedule_known_values():
    betas = d.make_betas('cosine', 1000)
    assert betas[-1] == 0.999
    assert (np.diff(betas) >= 0).all()

    def f(t):
        return math.cos((t / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2

    alphas_cumprod = np.cumprod(1 - betas)
    for t in (0, 1, 250, 499, 900, 998):
        assert alphas_cumprod[t] == pytest.approx(f(t + 1) / f(0), rel=1e-9)
    # Halfway the two differ as IDDPM's figure 5 shows: cosine keeps half the variance, linear
    # almost nothing.
    assert alphas_cumprod[499] == pytest.approx(0.494, abs=1e-3)
    assert np.cumprod(1 - d.make_betas('linear', 1000))[499] == pytest.approx(0.0786, abs=1e-3)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (
            {'schedule': 'cosin'},
            r'diffusion.schedule: expected one of linear, cosine, found \'cosin\'; did you mean '
            r'"cosine"',
        ),
        (
            {'objective': 'eps'},
            r'diffusion.objective: expected one of epsilon, .*, flow, consistency, found \'eps\'',
        ),
        ({'steps': 20}, r'diffusion.steps: the linear schedule needs more than 20 steps, found 20'),
        ({'steps': 0, 'schedule': 'cosine'}, r'diffusion.steps: expected 1 or more, found 0'),
    ],
)
def test_wrong_settings_are_named(change, message):
    with pytest.raises(UserError, match=message):
        d.make_diffusion(DiffusionConfig(**change))


@pytest.mark.parametrize(
    ('schedule', 'steps'),
    [('linear', 21), ('linear', 1000), ('cosine', 1), ('cosine', 2), ('cosine', 4000)],
)
def test_tables_are_finite(schedule, steps):
    diffusion = d.make_diffusion(DiffusionConfig(schedule=schedule, steps=steps))
    assert diffusion.steps == steps
    for field in dataclasses.fields(diffusion):
        value = getattr(diffusion, field.name)
        if isinstance(value, np.ndarray):
            assert value.shape == (steps,)
            assert np.isfinite(value).all(), field.name
            with pytest.raises(ValueError, match='read-only'):
                value[0] = 0


@pytest.mark.parametrize('schedule', ['linear', 'cosine'])
def test_closed_form_is_the_iterated_step(schedule):
    """Mean and variance of x_t, one step q(x_t | x_{t−1}) after the other (DDPM eq. 2), are those
    of q_sample.
    """
    config = DiffusionConfig(schedule=schedule, steps=100)
    diffusion = d.make_diffusion(config)
    x0 = jnp.ones((100, 1, 1, 1), jnp.float32)
    t = jnp.arange(100, dtype=jnp.int32)
    mean = d.q_sample(diffusion, x0, t, jnp.zeros_like(x0))[:, 0, 0, 0]
    std = d.q_sample(diffusion, jnp.zeros_like(x0), t, x0)[:, 0, 0, 0]
    expected_mean, expected_variance = 1.0, 0.0
    for i, beta in enumerate(d.make_betas(schedule, 100)):
        expected_mean, expected_variance = (
            math.sqrt(1 - beta) * expected_mean,
            (1 - beta) * expected_variance + beta,
        )
        assert float(mean[i]) == pytest.approx(expected_mean, rel=1e-5)
        assert float(std[i]) ** 2 == pytest.approx(expected_variance, rel=1e-5)


@pytest.mark.parametrize('schedule', ['linear', 'cosine'])
def test_posterior_is_the_product_of_two_gaussians(schedule):
    """q(x_{t−1} | x_t, x_0) ∝ q(x_t | x_{t−1}) q(x_{t−1} | x_0), multiplied on a fine grid of
    x_{t−1} and normalised numerically.
    """
    diffusion = d.make_diffusion(DiffusionConfig(schedule=schedule, steps=100))
    betas = d.make_betas(schedule, 100)
    alphas = np.cumprod(1 - betas)
    x0, xt = 0.4, -0.3
    for t in (1, 2, 37, 98):
        # The grid spans 12 standard deviations of the narrower factor's reach on both sides of each
        # factor's centre.
        centre1, std1 = xt / math.sqrt(1 - betas[t]), math.sqrt(betas[t] / (1 - betas[t]))
        centre2, std2 = math.sqrt(alphas[t - 1]) * x0, math.sqrt(1 - alphas[t - 1])
        grid = np.linspace(
            min(centre1 - 12 * std1, centre2 - 12 * std2),
            max(centre1 + 12 * std1, centre2 + 12 * std2),
            400_001,
        )
        log_density = scipy.stats.norm.logpdf(grid, centre1, std1) + scipy.stats.norm.logpdf(
            grid, centre2, std2
        )
        weight = np.exp(log_density - log_density.max())
        weight /= weight.sum()
        mean = (weight * grid).sum()
        variance = (weight * (grid - mean) ** 2).sum()
        got_mean, got_log_variance = d.posterior(
            diffusion,
            jnp.full((1, 1, 1, 1), x0, jnp.float32),
            jnp.full((1, 1, 1, 1), xt, jnp.float32),
            jnp.array([t], jnp.int32),
        )
        assert float(got_mean[0, 0, 0, 0]) == pytest.approx(mean, rel=1e-4, abs=1e-6)
        assert math.exp(float(got_log_variance[0, 0, 0, 0])) == pytest.approx(variance, rel=1e-4)


def test_posterior_at_the_first_step():
    """A point at x_0, whose log variance is clipped to the next step's."""
    diffusion = d.make_diffusion(DiffusionConfig())
    x0, xt = batch(0)
    zero = jnp.zeros(4, jnp.int32)
    mean, log_variance = d.posterior(diffusion, x0, xt, zero)
    np.testing.assert_array_equal(mean, x0)
    np.testing.assert_array_equal(log_variance, d.posterior(diffusion, x0, xt, zero + 1)[1])


def test_respacing_keeps_alphas_and_is_exact_over_the_skipped_steps():
    diffusion = d.make_diffusion(DiffusionConfig(objective='v', learn_sigma=True, vlb_weight=0.5))
    timesteps = np.array([0, 10, 400, 999])
    spaced = d.respace(diffusion, timesteps)
    assert (spaced.objective, spaced.learn_sigma, spaced.vlb_weight) == ('v', True, 0.5)
    np.testing.assert_array_equal(spaced.signal, diffusion.signal[timesteps])
    np.testing.assert_allclose(
        np.cumprod(1 - spaced.betas), diffusion.alphas_cumprod[timesteps], rtol=1e-12
    )
    # The variance that steps 11..400 add to x_10, one by one.
    variance = 0.0
    for beta in d.make_betas('linear', 1000)[11:401]:
        variance = (1 - beta) * variance + beta
    assert spaced.betas[2] == pytest.approx(variance, rel=1e-9)
    np.testing.assert_allclose(
        d.respace(diffusion, np.arange(1000)).betas, d.make_betas('linear', 1000), rtol=1e-9
    )


@pytest.mark.parametrize('prediction', PREDICTIONS)
@pytest.mark.parametrize('schedule', ['linear', 'cosine'])
def test_predictions_convert_back_and_forth(prediction, schedule):
    """From the exact target, every prediction gives the x_0 and ε that made x_t."""
    diffusion = d.make_diffusion(DiffusionConfig(objective=prediction, schedule=schedule))
    x0, noise = batch(1, count=50)
    t = jnp.asarray(np.linspace(0, 900, 50).astype(np.int32))
    xt = d.q_sample(diffusion, x0, t, noise)
    target = objectives.prediction_target(diffusion, x0, t, noise)
    got_x0, got_noise = d.predict_x0_and_noise(diffusion, target, xt, t)
    # Rounding of x_t in float32 grows by 1/√ᾱ on the way to x_0 and by 1/√(1 − ᾱ) on the way to ε.
    for got, expected, amplification in (
        (got_x0, x0, diffusion.inverse_signal),
        (got_noise, noise, 1 / diffusion.noise),
    ):
        bound = 4 * np.finfo(np.float32).eps * 4 * amplification[np.asarray(t)]
        assert (np.abs(got - expected).max(axis=(1, 2, 3)) <= bound).all()
    # The other way: whatever the network outputs, its x_0 and ε reproduce x_t and the output.
    output = jax.random.normal(jax.random.key(0), x0.shape, jnp.float32)
    got_x0, got_noise = d.predict_x0_and_noise(diffusion, output, xt, t)
    np.testing.assert_allclose(d.q_sample(diffusion, got_x0, t, got_noise), xt, atol=2e-5)
    np.testing.assert_allclose(
        objectives.prediction_target(diffusion, got_x0, t, got_noise), output, atol=2e-5
    )
    np.testing.assert_allclose(
        d.noise_from_x0(diffusion, got_x0, xt, t)[5:], got_noise[5:], atol=2e-4
    )


def test_v_interpolates_between_noise_and_image():
    diffusion = d.make_diffusion(DiffusionConfig(objective='v', schedule='cosine'))
    x0, noise = batch(2, count=2)
    v = objectives.prediction_target(diffusion, x0, jnp.array([0, 999], jnp.int32), noise)
    np.testing.assert_allclose(v[0], noise[0], atol=0.05)
    np.testing.assert_allclose(v[1], -x0[1], atol=1e-3)
