"""Samplers of EDM and rectified flow: the papers' algorithms, and data whose denoiser is known."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.samples import sample
from support.turns import in_turn

from jaxunet.config import DiffusionConfig
from jaxunet.diffusion import process as d
from jaxunet.runtime.errors import UserError
from jaxunet.sampling import sampler as s
from jaxunet.sampling.guidance import guided
from jaxunet.sampling.options import SamplerConfig

DATA = 0.5  # σ_d
OBJECTIVES = pytest.mark.parametrize('objective', ['edm', 'flow'])


def process(objective):
    return d.make_diffusion(DiffusionConfig(objective=objective))


def denoised(x, sigma, variance=0.04, mean=0.6):
    """E[x_0 | x_0 + σ ε = x] of an even mixture of N(±mean, variance)."""
    total = variance + sigma**2
    centre = mean * jnp.tanh(mean * x / total)
    return centre + variance * (x - centre) / total


def network(objective, data=denoised):
    """The ideal network: from what it sees and its time to what it should predict."""

    def edm(seen, time):
        sigma = jnp.exp(time / 250)[:, None, None, None]
        total = sigma**2 + DATA**2
        x = seen * jnp.sqrt(total)
        return (data(x, sigma) - DATA**2 / total * x) * jnp.sqrt(total) / (sigma * DATA)

    def flow(seen, time):
        t = (time / 1000)[:, None, None, None]
        # At t = 1 the image is not in what the network sees: its mean, 0.
        known = jnp.minimum(t, 1 - 1e-12)
        x0 = jnp.where(t < 1, data(seen / (1 - known), known / (1 - known)), 0)
        return (seen - x0) / t

    return edm if objective == 'edm' else flow


def run(objective, noise, **options):
    """Samples in float64 from `noise` of unit variance."""
    sampler = s.make_sampler(SamplerConfig(clip=False, **options), process(objective))
    with jax.enable_x64(True):
        x = sampler.initial * jnp.asarray(noise).reshape(-1, 1, 1, 1)
        state = s.State(x, jnp.zeros_like(x) if sampler.memory else None)
        keys = s.sample_keys(0, range(len(noise)))
        found = jax.jit(lambda state: s.run(network(objective), state, keys, sampler))(state)
    return np.asarray(found.x).ravel()


def edm_heun(x, sigmas, denoise):
    """EDM algorithm 1; `sigmas` descend to 0."""
    for now, then in itertools.pairwise(sigmas):
        slope = (x - denoise(x, now)) / now
        euler = x + (then - now) * slope
        if then:
            x = x + (then - now) * (slope + (euler - denoise(euler, then)) / then) / 2
        else:
            x = euler
    return x


def edm_euler(x, sigmas, denoise):
    """EDM eq. 4 in Euler's steps, which are those of DDIM."""
    for now, then in itertools.pairwise(sigmas):
        x = x + (then - now) * (x - denoise(x, now)) / now
    return x


def edm_dpmpp_2m(x, sigmas, denoise):
    """Lu et al. (arXiv 2211.01095) algorithm 2, with α = 1; both ends are of first order."""
    earlier = None
    for i, (now, then) in enumerate(itertools.pairwise(sigmas)):
        x0 = denoise(x, now)
        if then == 0:
            return x0
        h, mixed = np.log(now / then), x0
        if earlier is not None:
            ratio = np.log(sigmas[i - 1] / now) / h
            mixed = x0 + (x0 - earlier) / (2 * ratio)
        x, earlier = then / now * x - np.expm1(-h) * mixed, x0
    return x


def flow_steps(x, times, velocity, *, heun):
    """Euler's or Heun's method for dx/dt = velocity(x, t); `times` descend to 0."""
    for now, then in itertools.pairwise(times):
        slope = velocity(x, now)
        euler = x + (then - now) * slope
        x = x + (then - now) * (slope + velocity(euler, then)) / 2 if heun and then else euler
    return x


KARRAS = np.linspace(80 ** (1 / 7), 0.002 ** (1 / 7), 18) ** 7  # EDM eq. 5
LOG_SNR = np.geomspace(80, 0.002, 20)


@pytest.mark.parametrize(
    ('name', 'algorithm', 'sigmas'),
    [
        ('heun', edm_heun, KARRAS),
        ('ddim', edm_euler, KARRAS),
        ('dpmpp_2m', edm_dpmpp_2m, LOG_SNR),
    ],
)
def test_edm_steps_are_those_of_the_papers(name, algorithm, sigmas):
    noise = np.random.default_rng(0).standard_normal(7)
    with jax.enable_x64(True):
        expected = np.asarray(algorithm(80 * noise, [*sigmas, 0.0], denoised))
    found = run('edm', noise, name=name, steps=len(sigmas))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    assert expected.std() > 0.3


@pytest.mark.parametrize('name', ['ddim', 'heun'])
def test_flow_steps_in_t_are_those_of_the_paper(name):
    """DDIM's step, in these coordinates, is Euler's in t."""
    noise = np.random.default_rng(1).standard_normal(7)
    predict = network('flow')
    with jax.enable_x64(True):

        def velocity(x, t):
            return np.asarray(predict(jnp.asarray(x)[:, None, None, None], jnp.full(7, 1000 * t)))[
                :, 0, 0, 0
            ]

        expected = flow_steps(noise, np.linspace(1, 0, 13), velocity, heun=name == 'heun')
    found = run('flow', noise, name=name, steps=12)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    assert expected.std() > 0.3


@pytest.mark.parametrize(
    ('objective', 'name', 'spacing', 'order'),
    [
        ('edm', 'ddim', 'karras', 1),
        ('edm', 'heun', 'karras', 2),
        ('edm', 'dpmpp_2m', 'log_snr', 2),
        ('flow', 'ddim', 'linear', 1),
        ('flow', 'heun', 'linear', 2),
        ('flow', 'heun', 'karras', 2),
        ('flow', 'dpmpp_2m', 'log_snr', 2),
    ],
)
def test_order_of_convergence(objective, name, spacing, order):
    """Against 2,000 steps; EDM's last step, from σ = 0.002, is the same for all."""
    noise = np.linspace(-2, 2, 9)
    options = {'name': name, 'skip_schedule': spacing}
    ends = {steps: run(objective, noise, steps=steps, **options) for steps in (40, 80, 160, 2000)}
    errors = np.array([np.abs(ends[n] - ends[2000]).max() for n in (40, 80, 160)])
    np.testing.assert_allclose(np.log2(errors[:-1] / errors[1:]), order, atol=0.45)


FIXED_LARGE = {'variance': 'fixed_large', 'skip_schedule': 'log_snr'}


@pytest.mark.parametrize(
    ('options', 'objective'),
    in_turn(
        {
            'default': {},
            'ddpm': {'name': 'ddpm', 'steps': 250},
            'ddpm-fixed_large': {'name': 'ddpm', 'steps': 250} | FIXED_LARGE,
            'ddim-1.0': {'name': 'ddim', 'steps': 250, 'eta': 1.0},
            'ddim': {'name': 'ddim', 'steps': 120},
            'heun': {'name': 'heun', 'steps': 40},
            'dpmpp_2m': {'name': 'dpmpp_2m', 'steps': 16},
        },
        ('edm',),
        ('flow',),
    ),
)
def test_samples_have_the_distribution_of_the_data(objective, options):
    """N(0.3, 0.25²) for every pixel: mean and deviation of 16,384 of them."""

    def gaussian(x, sigma):
        return (0.0625 * x + sigma**2 * 0.3) / (0.0625 + sigma**2)

    def biased(seen, time):
        # The mean of the data, where the network of a mixture knows 0.
        t = (time / 1000)[:, None, None, None]
        return jnp.where(t < 1, network('flow', gaussian)(seen, time), seen - 0.3)

    predict = network('edm', gaussian) if objective == 'edm' else biased
    sampler = s.make_sampler(SamplerConfig(**options), process(objective))
    images = sample(predict, s.sample_keys(0, range(64)), (16, 16, 1), sampler)
    assert np.mean(images) == pytest.approx(0.3, abs=0.012)
    assert np.std(images) == pytest.approx(0.25, rel=0.06)


@pytest.mark.parametrize(
    ('name', 'objective'),
    in_turn({name: name for name in ('heun', 'ddim', 'dpmpp_2m', 'ddpm')}, ('edm',), ('flow',)),
)
def test_guidance_moves_the_mean_of_a_class(objective, name):
    """Classes are N(±0.2, 0.1²) pixels, and all images N(0, 0.1²) to the network without labels.

    Its prediction is linear in the mean, so a scale of 2.5 draws from N(±0.5, 0.1²).
    """
    means = jnp.asarray([-0.2, 0.2, 0.0], jnp.float32)  # the last for label −1

    def denoise(seen, time, labels):
        mean = means[labels][:, None, None, None]

        def data(x, sigma):
            return (0.01 * x + sigma**2 * mean) / (0.01 + sigma**2)

        if objective == 'edm':
            return network('edm', data)(seen, time)
        t = (time / 1000)[:, None, None, None]
        return jnp.where(t < 1, network('flow', data)(seen, time), seen - mean)

    steps = 250 if name == 'ddpm' else 100
    options = SamplerConfig(name=name, steps=steps, guidance_scale=2.5)
    sampler = s.make_sampler(options, process(objective), num_classes=2)
    labels = jnp.arange(64, dtype=jnp.int32) % 2
    keys = s.sample_keys(0, range(64))
    images = sample(guided(denoise, labels, 2.5), keys, (16, 16, 1), sampler)
    for label, mean in enumerate((-0.5, 0.5)):
        pixels = np.asarray(images)[label::2]
        assert pixels.mean() == pytest.approx(mean, abs=0.012)
        assert pixels.std() == pytest.approx(0.1, rel=0.08)


def test_churn_adds_noise_and_keeps_the_distribution():
    def gaussian(x, sigma):
        return 0.0625 * x / (0.0625 + sigma**2)

    options = {'name': 'heun', 'steps': 60, 'churn': 20.0, 'churn_range': (0.01, 50.0)}
    sampler = s.make_sampler(SamplerConfig(**options), process('edm'))
    plain = s.make_sampler(SamplerConfig(name='heun', steps=60), process('edm'))
    assert sampler.coefficients.draw.any()
    raised = sampler.times[2::2] - sampler.times[1::2]
    np.testing.assert_allclose(np.exp(raised[raised > 0] / 250), 1 + 20 / 60, rtol=1e-6)
    np.testing.assert_allclose(sampler.times[1::2], plain.times[1::2])
    images = sample(network('edm', gaussian), s.sample_keys(0, range(64)), (16, 16, 1), sampler)
    assert np.std(images) == pytest.approx(0.25, rel=0.05)


@OBJECTIVES
def test_one_step_leads_to_an_image(objective):
    assert np.isfinite(run(objective, np.array([0.5, -1.0]), name='ddim', steps=1)).all()


@pytest.mark.parametrize(
    ('objective', 'options', 'message'),
    [
        ('edm', {'skip_schedule': 'linear'}, 'skip_schedule: expected one of karras, log_snr with'),
        ('edm', {'respacing': '20'}, "respacing: '20' picks timesteps, which"),
        (
            'flow',
            {'name': 'heun', 'churn': 1.0, 'skip_schedule': 'linear'},
            'churn: raises noise levels in σ, but skip_schedule=linear begins at pure noise',
        ),
        ('flow', {'variance': 'learned', 'name': 'ddpm'}, 'variance: learned needs a model'),
        ('edm', {'steps': 0}, 'steps: expected 1 or more'),
    ],
)
def test_options_without_meaning_are_refused(objective, options, message):
    with pytest.raises(UserError, match=message):
        s.make_sampler(SamplerConfig(**options), process(objective))


@pytest.mark.parametrize(
    ('objective', 'name', 'evaluations'),
    [('epsilon', 'ddpm', 1000), ('x0', 'ddpm', 1000), ('v', 'dpmpp_2m', 20),
     ('edm', 'dpmpp_2m', 20), ('flow', 'heun', 39)],
)  # fmt: skip
def test_the_default_sampler_follows_the_objective(objective, name, evaluations):
    sampler = s.make_sampler(SamplerConfig(), process(objective))
    assert (sampler.config.name, sampler.evaluations) == (name, evaluations)
