"""EDM and rectified flow: their levels and losses against the papers' own coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods_golden import SIGMAS, noisy
from scipy import stats
from support.peer_values import FIXTURES

from jaxunet.config import Config, DiffusionConfig, LossConfig, resolve, to_dict
from jaxunet.diffusion import levels, objectives, weighting
from jaxunet.diffusion import process as d
from jaxunet.runtime.errors import UserError

EDM = DiffusionConfig(objective='edm')
FLOW = DiffusionConfig(objective='flow')
CONFIGS = pytest.mark.parametrize('config', [EDM, FLOW], ids=lambda c: c.objective)


def network(xp, x, time):
    """A function of what a network sees, of NumPy arrays or PyTorch tensors."""
    return xp.sin(3 * x) + 0.1 * xp.cos(time / 100) * x


def edm_loss(xp, x0, noise, sigma, data=0.5):
    """EDM eq. 7 and 8 and table 1: λ(σ) ‖D(x_0 + σ ε; σ) − x_0‖², for images as rows."""
    total = sigma**2 + data**2
    c_skip, c_out, c_in = data**2 / total, sigma * data / total**0.5, 1 / total**0.5
    x = x0 + sigma * noise
    denoised = c_skip * x + c_out * network(xp, c_in * x, 1000 * xp.log(sigma) / 4)
    return (total / (sigma * data) ** 2 * (denoised - x0) ** 2).mean(1)


def flow_loss(xp, x0, noise, t):
    """Liu et al. eq. 1, with noise at t = 1: ‖u(x_t, t) − (ε − x_0)‖²."""
    return ((network(xp, (1 - t) * x0 + t * noise, 1000 * t) - (noise - x0)) ** 2).mean(1)


@pytest.mark.parametrize('library', ['numpy', 'torch'])
@CONFIGS
def test_loss_is_that_of_the_paper(config, library):
    if library == 'torch':
        xp = pytest.importorskip('torch')
        array = xp.from_numpy
    else:
        xp, array = np, np.asarray
    rng = np.random.default_rng(0)
    x0, noise = rng.uniform(-1, 1, (5, 12)), rng.standard_normal((5, 12))
    level = np.array([[0.002], [0.1], [0.5], [3.0], [80.0]])
    level = level if config.objective == 'edm' else level / (1 + level)
    loss = edm_loss if config.objective == 'edm' else flow_loss
    expected = np.asarray(loss(xp, array(x0), array(noise), array(level)))

    process = d.make_diffusion(config)
    with jax.enable_x64(True):
        images, noise = (jnp.asarray(a).reshape(5, 2, 2, 3) for a in (x0, noise))
        time = 250 * np.log(level) if config.objective == 'edm' else 1000 * level
        time = jnp.asarray(time[:, 0])
        xt = d.q_sample(process, images, time, noise)
        seen = d.network_input(process, xt, time)
        output = network(jnp, seen, time[:, None, None, None])
        got = objectives.per_sample_loss(process, output, images, xt, time, noise)
    np.testing.assert_allclose(got, expected, rtol=1e-10)


def test_network_sees_and_means_what_it_does_in_edms_code():
    golden = np.load(FIXTURES / 'methods_golden.npz')
    time = 250 * np.log(SIGMAS)
    y = np.moveaxis(noisy() / np.sqrt(1 + SIGMAS**2)[:, None, None, None], 1, -1)
    process = d.make_diffusion(EDM)
    with jax.enable_x64(True):
        xt, times = jnp.asarray(y), jnp.asarray(time)
        seen = d.network_input(process, xt, times)
        image, _ = d.predict_x0_and_noise(process, jnp.sin(3 * seen), xt, times)
    for found, name in ((seen, 'edm_input'), (image, 'edm_denoised')):
        np.testing.assert_allclose(np.moveaxis(found, -1, 1), golden[name], atol=1e-6)
    np.testing.assert_allclose(time / 1000, golden['edm_time'], rtol=1e-6)  # their float32


@CONFIGS
def test_the_exact_prediction_gives_image_and_noise(config):
    process = d.make_diffusion(config)
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        x0, noise = jnp.asarray(rng.standard_normal((2, 6, 2, 2, 1)))
        # From pure noise, which flow has at t = 1, to almost none.
        levels_of = {'edm': np.log([0.002, 0.02, 0.5, 1, 20, 80]) * 250}
        times = levels_of.get(config.objective, np.array([2.0, 20, 300, 500, 999, 1000]))
        xt = d.q_sample(process, x0, jnp.asarray(times), noise)
        target = objectives.prediction_target(process, x0, jnp.asarray(times), noise)
        got = d.predict_x0_and_noise(process, target, xt, jnp.asarray(times))
    for found, expected in zip(got, (x0, noise), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-9)


@CONFIGS
def test_signal_and_noise_keep_the_variance(config):
    time = np.linspace(-1500, 1100, 50) if config.objective == 'edm' else np.linspace(0, 1000, 50)
    signal, noise = levels.signal_and_noise(config, time)
    np.testing.assert_allclose(signal**2 + noise**2, 1, rtol=1e-14)
    sigma = np.exp(time / 250) if config.objective == 'edm' else time / (1000 - time + 1e-300)
    np.testing.assert_allclose(levels.time_of_sigma(config, sigma[1:]), time[1:], rtol=1e-12)
    np.testing.assert_allclose(noise[:-1] / signal[:-1], sigma[:-1], rtol=1e-12)


@CONFIGS
def test_times_are_drawn_from_the_distribution_of_the_paper_within_their_slice(config):
    process = d.make_diffusion(config)
    keys = jax.random.split(jax.random.key(0), 4000)
    t = jax.random.randint(jax.random.key(1), (4000,), 0, 1000)
    times = np.asarray(jax.jit(lambda t, keys: d.draw_times(process, t, keys))(t, keys), np.float64)
    normal = (
        (times / 250 + 1.2) / 1.2
        if config.objective == 'edm'
        else np.log(times / 1000) - np.log1p(-times / 1000)
    )
    assert stats.kstest(normal, 'norm').pvalue > 1e-3
    slices = stats.norm.cdf(normal) * 1000
    assert np.abs(slices - np.asarray(t) - 0.5).max() < 0.51
    middles = np.asarray(d.middle_time(process, jnp.arange(1000, dtype=jnp.int32)))
    assert (np.diff(middles) > 0).all()
    np.testing.assert_allclose(middles[500], times[np.argmin(np.abs(slices - 500.5))], rtol=0.05)


@pytest.mark.parametrize(
    ('schedule', 'ends'), [('linear', (0.01, 157.41)), ('cosine', (6.425e-3, 20_291))]
)
def test_v_is_tuned_at_the_levels_of_its_schedule(schedule, ends):
    teacher = d.make_diffusion(DiffusionConfig(objective='v', schedule=schedule))
    config = DiffusionConfig(objective='consistency', consistency_of='v', schedule=schedule)
    timesteps = np.arange(1000)
    for array in (np.asarray, lambda x: jnp.asarray(x, jnp.float32)):
        signal, noise = levels.signal_and_noise(config, array(timesteps.astype(np.float64)))
        np.testing.assert_allclose(signal, teacher.signal, rtol=1e-5)
        np.testing.assert_allclose(noise, teacher.noise, rtol=1e-5)
        # Between two timesteps ln σ is a line; beyond the ends there is no level.
        sigma = (teacher.noise_to_signal[:-1] * teacher.noise_to_signal[1:]) ** 0.5
        between = levels.time_of_sigma(config, array(np.array([1e-9, *sigma, 1e9])))
        np.testing.assert_allclose(between, [0, *(timesteps[:-1] + 0.5), 999], atol=1e-2)
    np.testing.assert_allclose(teacher.noise_to_signal[[0, -1]], ends, rtol=1e-4)
    quantiles = (np.arange(5000) + 0.5) / 5000
    times = np.asarray(levels.time_of_quantile(config, jnp.asarray(quantiles)), np.float64)
    drawn = np.log(np.divide(*reversed(levels.signal_and_noise(config, times))))
    a, b = ((np.log(end) + 1.1) / 2 for end in ends)
    assert stats.kstest(drawn, stats.truncnorm(a, b, -1.1, 2).cdf).statistic < 2e-3
    process = d.make_diffusion(config)
    assert process.betas.min() > 0


@CONFIGS
def test_quantiles_at_the_ends_are_finite(config):
    times = levels.time_of_quantile(config, jnp.array([0.0, 1.0]))
    assert np.isfinite(times).all()


@pytest.mark.parametrize('name', ['min_snr', 'soft_min_snr', 'p2'])
@CONFIGS
def test_weightings_define_the_same_problem(config, name):
    """A weight times the error of the prediction is the published weight times that of ε."""
    process = d.make_diffusion(config)
    snr = process.alphas_cumprod / (1 - process.alphas_cumprod)
    published = {
        'min_snr': np.minimum(snr, 5) / snr,
        'soft_min_snr': 1 / (1 + 0.25 * snr),
        'p2': 1 / (1 + snr),
    }[name]
    with jax.enable_x64(True):
        time = jnp.asarray(levels.middle_times(config))
        one = jnp.ones((1000, 1, 1, 1))
        xt = jnp.zeros_like(one)
        at_0, at_1 = (d.predict_x0_and_noise(process, p * one, xt, time)[1] for p in (0.0, 1.0))
    noise_error = np.asarray(at_1 - at_0)[:, 0, 0, 0] ** 2  # if the prediction errs by 1
    weight = weighting.fixed_table(LossConfig(weighting=name), process)
    np.testing.assert_allclose(weight, published * noise_error, rtol=1e-9)


@pytest.mark.parametrize(
    ('section', 'fields', 'message'),
    [
        (
            'diffusion',
            {'schedule': 'cosine'},
            'diffusion.schedule: cosine belongs to the objective',
        ),
        ('diffusion', {'learn_sigma': True}, 'diffusion.learn_sigma: needs the timesteps'),
        (
            'timesteps',
            {'sampler': 'policy'},
            'timesteps.sampler: policy is defined by the timestep',
        ),
        ('timesteps', {'sampler': 'speed'}, 'timesteps.sampler: speed is defined by the timesteps'),
        ('loss', {'weighting': 'speed'}, 'loss.weighting: speed is defined by the timesteps'),
        ('diffusion', {'edm_std': 0.0}, 'diffusion.edm_std: expected more than 0'),
        ('evaluation', {'skip_schedule': 'linear'}, 'evaluation.skip_schedule: linear spaces'),
    ],
)
def test_what_needs_timesteps_is_refused(section, fields, message):
    values = to_dict(Config())
    values['diffusion']['objective'] = 'edm'
    values[section] |= fields
    with pytest.raises(UserError, match=message):
        resolve(values)


def test_the_earlier_name_of_the_objective_still_reads():
    values = to_dict(Config())
    del values['diffusion']['objective']
    values['diffusion']['prediction'] = 'v'
    assert resolve(values).diffusion.objective == 'v'
