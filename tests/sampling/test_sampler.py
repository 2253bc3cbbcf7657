"""Samplers, on denoisers whose right answer is known."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.diffusion import process, toy
from support.samples import sample
from support.turns import in_turn

from jaxunet.diffusion import objectives
from jaxunet.diffusion import process as d
from jaxunet.runtime.errors import UserError
from jaxunet.sampling import sampler as s
from jaxunet.sampling.options import VARIANCES
from jaxunet.sampling.subsets import timestep_subset

PREDICTIONS = ('epsilon', 'x0', 'v')
EACH_PREDICTION = tuple((prediction,) for prediction in PREDICTIONS)
SHAPE = (4, 4, 3)


def denoiser(diffusion, mean_x0, values=None):
    """A network that knows E[x_0 | x_t] = mean_x0(x_t, ᾱ_t), and variance values by time step."""
    alphas = jnp.asarray(diffusion.alphas_cumprod.astype(np.float32))

    def denoise(x, t):
        x0 = mean_x0(x, alphas[t][:, None, None, None])
        output = objectives.prediction_target(
            diffusion, x0, t, d.noise_from_x0(diffusion, x0, x, t)
        )
        if values is None:
            return output
        return jnp.concatenate(
            [output, jnp.broadcast_to(jnp.asarray(values)[t][:, None, None, None], x.shape)],
            axis=-1,
        )

    return denoise


def draw(config, diffusion, denoise, count=64, shape=(16, 16, 1), seed=0):
    sampler = s.make_sampler(config, diffusion)
    return np.asarray(sample(denoise, s.sample_keys(seed, range(count)), shape, sampler))


def gaussian(mean, variance):
    """E[x_0 | x_t] for pixels that are N(mean, variance)."""
    return lambda x, alpha: (
        mean
        + variance * jnp.sqrt(alpha) * (x - jnp.sqrt(alpha) * mean) / (alpha * variance + 1 - alpha)
    )


@pytest.mark.parametrize(
    ('options', 'prediction'),
    in_turn(
        {
            'ddpm-fixed_small': {'name': 'ddpm', 'variance': 'fixed_small', 'steps': 500},
            'ddpm-fixed_large': {'name': 'ddpm', 'variance': 'fixed_large', 'steps': 500},
            'ddim': {'name': 'ddim', 'steps': 250},
            'ddim-1.0': {'name': 'ddim', 'eta': 1.0, 'steps': 500},
            'ddim-quadratic': {'name': 'ddim', 'skip_schedule': 'quadratic', 'steps': 100},
            'dpmpp_2m': {'name': 'dpmpp_2m', 'steps': 20},
            'heun': {'name': 'heun', 'steps': 30},
            'heun-20.0': {'name': 'heun', 'churn': 20.0, 'steps': 50},
        },
        *EACH_PREDICTION,
    ),
)
def test_gaussian_data(prediction, options):
    """Mean and variance of 16,384 pixels, of which 1.1% of the variance is chance."""
    diffusion = process(steps=500, objective=prediction)
    config = s.SamplerConfig(clip=False, **options)
    pixels = draw(config, diffusion, denoiser(diffusion, gaussian(0.3, 0.04)))
    assert pixels.mean() == pytest.approx(0.3, abs=5 * 0.2 / 128)
    # Beyond chance: with T steps the fixed variances are off by O(1/T), and the start N(0, 1) is
    # not exactly x_T.
    assert pixels.var() == pytest.approx(0.04, rel=0.08)


def test_learned_variance_is_exact_with_few_steps():
    """With the true reverse variance β̃ + c² Var[x_0 | x_t] ten steps give the data's variance,
    which the fixed ones miss widely.
    """
    diffusion = process(learn_sigma=True)
    data_variance = 0.04
    timesteps = timestep_subset(diffusion.alphas_cumprod, 10, 'quadratic')
    spaced = d.respace(diffusion, timesteps)
    alphas = spaced.alphas_cumprod
    conditional = data_variance * (1 - alphas) / (alphas * data_variance + 1 - alphas)
    log_small = spaced.posterior_log_variance.astype(np.float64)
    log_true = np.log(np.exp(log_small) + spaced.posterior_x0.astype(np.float64) ** 2 * conditional)
    values = np.zeros(1000, np.float32)
    values[timesteps] = 2 * (log_true - log_small) / (np.log(spaced.betas) - log_small) - 1
    denoise = denoiser(diffusion, gaussian(-0.2, data_variance), values)
    config = s.SamplerConfig('ddpm', steps=10, skip_schedule='quadratic', clip=False)
    # The last step returns the mean: its part of the variance is known and missing.
    missing = conditional[0]
    assert missing < 0.005 * data_variance
    pixels = draw(config, diffusion, denoise)
    assert pixels.mean() == pytest.approx(-0.2, abs=5 * 0.2 / 128)
    assert pixels.var() == pytest.approx(data_variance - missing, rel=0.045)
    small, large = (
        draw(dataclasses.replace(config, variance=v), diffusion, denoise).var()
        for v in ('fixed_small', 'fixed_large')
    )
    assert small < 0.85 * data_variance
    assert large > 1.15 * data_variance


@pytest.mark.parametrize(
    ('options', 'prediction'),
    in_turn(
        {
            'ddpm': {'name': 'ddpm'},
            'ddim': {'name': 'ddim'},
            'ddim-0.5': {'name': 'ddim', 'eta': 0.5},
            'dpmpp_2m': {'name': 'dpmpp_2m'},
            'heun': {'name': 'heun'},
        },
        *EACH_PREDICTION,
    ),
)
def test_two_point_data(prediction, options):
    """Pixels that are 0.8 with probability 0.7, else -0.8, end there in this proportion, x_0 being
    clipped.
    """
    diffusion = process(objective=prediction, schedule='cosine', steps=200)

    def mean_x0(x, alpha):
        return 0.8 * jnp.tanh(jnp.sqrt(alpha) * 0.8 * x / (1 - alpha) + 0.5 * math.log(0.7 / 0.3))

    pixels = draw(s.SamplerConfig(steps=100, **options), diffusion, denoiser(diffusion, mean_x0))
    # The cosine schedule's first β, where nothing is left to decide, is 1e-4 or so: all but the
    # last stragglers have arrived.
    assert (np.abs(np.abs(pixels) - 0.8) < 0.05).mean() > 0.99
    assert (pixels > 0).mean() == pytest.approx(0.7, abs=0.025)


@pytest.mark.parametrize(
    'options',
    [
        {'name': 'ddim'},
        {'name': 'ddim', 'eta': 1.0},
        {'name': 'dpmpp_2m'},
        {'name': 'heun', 'churn': 1.0},
        *({'name': 'ddpm', 'variance': v} for v in VARIANCES),
    ],
    ids=str,
)
def test_the_last_step_returns_x0_without_noise_clipped_unless_told_otherwise(options):
    diffusion = process(objective='x0', learn_sigma=True)
    for clip, expected in ((True, 1), (False, 5)):
        config = s.SamplerConfig(steps=3, clip=clip, **options)
        pixels = draw(
            config, diffusion, lambda x, t: jnp.full((*x.shape[:3], 2), 5, jnp.float32), count=2
        )
        np.testing.assert_allclose(pixels, expected, rtol=1e-6)


@pytest.mark.parametrize('prediction', PREDICTIONS)
@pytest.mark.parametrize('clip', [True, False])
def test_ddim_with_eta_1_is_ddpm_step_by_step(prediction, clip):
    """They agree on all steps and the same noise: DDIM section 4.1."""
    diffusion = process(steps=50, objective=prediction)
    ddpm = s.make_sampler(s.SamplerConfig('ddpm', variance='fixed_small', clip=clip), diffusion)
    ddim = s.make_sampler(s.SamplerConfig('ddim', eta=1.0, clip=clip), diffusion)
    keys = s.sample_keys(3, range(2))
    steps = [
        jax.jit(lambda x, k, a=a: s.run(toy, s.State(x), keys, a, start=k, stop=k + 1).x)
        for a in (ddpm, ddim)
    ]
    x = s.initial_noise(keys, SHAPE)
    for k in range(50):
        after = [step(x, jnp.int32(k)) for step in steps]
        np.testing.assert_allclose(*after, rtol=1e-4, atol=1e-4 * float(jnp.abs(x).max()))
        assert np.abs(after[0] - x).max() > 1e-4
        x = after[0]


def test_ancestral_step_is_the_papers():
    """One step of each variance on a respaced process, from DDPM eq. 6–7 in float64 and the noise
    that the keys stand for.
    """
    diffusion = process(learn_sigma=True)
    timesteps = timestep_subset(diffusion.alphas_cumprod, 7, 'linear')
    alphas = diffusion.alphas_cumprod[timesteps]
    keys = s.sample_keys(5, range(2))
    x = s.initial_noise(keys, SHAPE)
    values = 0.4
    k, i = 2, 4
    alpha, previous = alphas[i], alphas[i - 1]
    beta = 1 - alpha / previous
    small = beta * (1 - previous) / (1 - alpha)
    std = {
        'fixed_small': small**0.5,
        'fixed_large': beta**0.5,
        'learned': math.exp(0.35 * math.log(beta) + 0.15 * math.log(small)),
    }
    eps = np.asarray(toy(x, jnp.full(2, timesteps[i], jnp.int32)), np.float64)
    x0 = np.clip((np.asarray(x) - math.sqrt(1 - alpha) * eps) / math.sqrt(alpha), -1, 1)
    mean = (
        math.sqrt(previous) * beta * x0 + math.sqrt(1 - beta) * (1 - previous) * np.asarray(x)
    ) / (1 - alpha)
    results = {}
    for variance, expected in std.items():
        sampler = s.make_sampler(s.SamplerConfig('ddpm', steps=7, variance=variance), diffusion)
        np.testing.assert_array_equal(sampler.timesteps, timesteps[::-1])
        after = s.run(
            lambda x, t: jnp.concatenate([toy(x, t), jnp.full_like(x, values)], axis=-1),
            s.State(x),
            keys,
            sampler,
            start=k,
            stop=k + 1,
        ).x
        results[variance] = (np.asarray(after) - mean) / expected
    np.testing.assert_allclose(results['fixed_small'], results['fixed_large'], atol=1e-5)
    np.testing.assert_allclose(results['fixed_small'], results['learned'], atol=1e-5)
    # And what was added is noise of its own: standard normal in size, not the initial one.
    assert 0.75 < results['learned'].std() < 1.25
    assert abs(np.corrcoef(results['learned'].ravel(), np.asarray(x).ravel())[0, 1]) < 0.4


def test_deterministic_ddim_step_is_the_papers():
    """DDIM eq. 12 in float64, with ε made consistent with the clipped x_0."""
    diffusion = process(objective='v', schedule='cosine')
    sampler = s.make_sampler(s.SamplerConfig('ddim', steps=20, eta=0.0), diffusion)
    keys = s.sample_keys(1, range(3))
    x = s.initial_noise(keys, SHAPE)
    after = s.run(toy, s.State(x), keys, sampler, start=12, stop=13).x
    alpha, previous = diffusion.alphas_cumprod[sampler.timesteps[12:14]]
    v = np.asarray(toy(x, jnp.full(3, sampler.timesteps[12], jnp.int32)), np.float64)
    x0 = np.clip(math.sqrt(alpha) * np.asarray(x) - math.sqrt(1 - alpha) * v, -1, 1)
    eps = (np.asarray(x) - math.sqrt(alpha) * x0) / math.sqrt(1 - alpha)
    np.testing.assert_allclose(
        after, math.sqrt(previous) * x0 + math.sqrt(1 - previous) * eps, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize('eta', [0.2, 0.5, 1.0])
def test_stochastic_ddim_step_is_the_papers(eta):
    """DDIM eq. 12 with σ of eq. 16 in float64; the noise is what ddpm's step adds with the same
    keys.
    """
    diffusion = process(objective='x0')
    ddim = s.make_sampler(s.SamplerConfig('ddim', steps=20, eta=eta), diffusion)
    ddpm = s.make_sampler(s.SamplerConfig('ddpm', steps=20), diffusion)
    keys = s.sample_keys(1, range(3))
    x = s.initial_noise(keys, SHAPE)
    alpha, previous = diffusion.alphas_cumprod[ddim.timesteps[12:14]]
    # With x = 0 and x_0 = 0 a step of ddpm is β̃^½ times the noise.
    silent = s.run(
        lambda x, t: jnp.zeros_like(x), s.State(jnp.zeros_like(x)), keys, ddpm, start=12, stop=13
    ).x
    draw = np.asarray(silent, np.float64) / math.sqrt(
        (1 - alpha / previous) * (1 - previous) / (1 - alpha)
    )
    x0 = np.asarray(toy(x, jnp.full(3, ddim.timesteps[12], jnp.int32)), np.float64)
    eps = (np.asarray(x) - math.sqrt(alpha) * x0) / math.sqrt(1 - alpha)
    sigma = eta * math.sqrt((1 - previous) / (1 - alpha)) * math.sqrt(1 - alpha / previous)
    expected = math.sqrt(previous) * x0 + math.sqrt(1 - previous - sigma**2) * eps + sigma * draw
    np.testing.assert_allclose(
        s.run(toy, s.State(x), keys, ddim, start=12, stop=13).x, expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    'options',
    [
        {'name': 'ddpm'},
        {'name': 'ddim', 'eta': 0.7},
        {'name': 'dpmpp_2m'},
        {'name': 'heun', 'churn': 3.0},
    ],
    ids=str,
)
def test_same_images_whatever_the_batch_size_or_devices(options):
    diffusion = process()
    config = s.SamplerConfig(steps=6, **options)
    sampler = s.make_sampler(config, diffusion)
    program = jax.jit(lambda keys: sample(toy, keys, SHAPE, sampler))
    together = np.asarray(program(s.sample_keys(7, range(8))))
    for parts in ([3, 5], [1] * 8):
        bounds = np.cumsum([0, *parts])
        pieces = [program(s.sample_keys(7, range(a, b))) for a, b in itertools.pairwise(bounds)]
        np.testing.assert_array_equal(np.concatenate(pieces), together)
    mesh = jax.make_mesh(
        (4,), ('data',), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )
    spread = jax.device_put(s.sample_keys(7, range(8)), jax.NamedSharding(mesh, jax.P('data')))
    images = program(spread)
    np.testing.assert_array_equal(images, together)
    # Another seed, another sample: all different.
    others = np.concatenate([together, program(s.sample_keys(8, range(8)))]).reshape(16, -1)
    assert len(np.unique(others, axis=0)) == 16


def test_noise_is_fresh_at_every_step_and_for_every_sample():
    diffusion = process(objective='x0')
    sampler = s.make_sampler(s.SamplerConfig(steps=5), diffusion)
    keys = s.sample_keys(0, range(3))
    zero = s.State(jnp.zeros((3, 16, 16, 1), jnp.float32))
    draws = [s.initial_noise(keys, (16, 16, 1))]
    # From x = 0 with x_0 = 0 a step returns its noise alone.
    draws += [
        s.run(lambda x, t: jnp.zeros_like(x), zero, keys, sampler, start=k, stop=k + 1).x
        for k in range(4)
    ]
    rows = np.concatenate([np.asarray(v).reshape(3, -1) for v in draws])
    correlation = np.corrcoef(rows)
    assert np.abs(correlation - np.eye(15)).max() < 0.3
    np.testing.assert_array_equal(
        s.run(lambda x, t: jnp.zeros_like(x), zero, keys, sampler, start=4, stop=5).x, 0
    )


@pytest.mark.parametrize(
    'options',
    [
        {'name': 'ddpm'},
        {'name': 'ddim', 'eta': 0.7},
        {'name': 'ddim'},
        {'name': 'dpmpp_2m'},
        {'name': 'heun', 'churn': 9.0},
    ],
    ids=str,
)
def test_stretches_equal_one_run(options):
    """One compiled function with traced bounds, called for uneven stretches, gives what one
    run gives.
    """
    sampler = s.make_sampler(s.SamplerConfig(steps=11, **options), process())
    keys = s.sample_keys(2, range(3))
    traces = []

    def stretch(state, start, stop):
        traces.append(1)
        return s.run(toy, state, keys, sampler, start=start, stop=stop)

    compiled = jax.jit(stretch)
    state = s.initial_state(keys, SHAPE, sampler)
    for start, stop in ((0, 4), (4, 4), (4, 9), (9, sampler.evaluations)):
        state = compiled(state, start, stop)
    np.testing.assert_array_equal(
        state.x, compiled(s.initial_state(keys, SHAPE, sampler), 0, sampler.evaluations).x
    )
    assert len(traces) == 1
    assert state.x.dtype == jnp.float32
    want = sample(toy, keys, SHAPE, sampler)
    np.testing.assert_allclose(state.x, want, atol=1e-6)  # two programs may round differently
    beyond = sampler.evaluations + 1
    with pytest.raises(ValueError, match=rf'4\.\.{beyond} are not within 0\.\.{beyond - 1}'):
        s.run(toy, state, keys, sampler, start=4, stop=beyond)


def test_a_bfloat16_network_has_a_float32_state():
    sampler = s.make_sampler(s.SamplerConfig(steps=4), process())
    seen = []

    def denoise(x, t):
        seen.append((x.dtype, t.dtype, t.shape))
        return toy(x, t).astype(jnp.bfloat16)

    assert sample(denoise, s.sample_keys(0, range(2)), SHAPE, sampler).dtype == jnp.float32
    assert set(seen) == {(jnp.dtype('float32'), jnp.dtype('int32'), (2,))}


@pytest.mark.parametrize('seed', [-1, 2**32])
def test_seed_out_of_range(seed):
    with pytest.raises(UserError, match='seed: expected 0 to 4294967295'):
        s.sample_keys(seed, range(2))
    assert len(np.unique(jax.random.key_data(s.sample_keys(2**32 - 1, range(2))))) == 4
