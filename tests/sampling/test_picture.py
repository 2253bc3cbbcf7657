"""Pictures that are changed or completed, on Gaussian data whose right answer is known."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.samples import redrawn, sample
from support.tiny import tiny_config

from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import DiffusionConfig
from jaxunet.data.images import to_pixels
from jaxunet.diffusion import objectives
from jaxunet.diffusion import process as d
from jaxunet.runtime.errors import UserError
from jaxunet.sampling import picture as p
from jaxunet.sampling import sampler as s
from jaxunet.sampling.generator import Generator
from jaxunet.sampling.options import SamplerConfig

# Pixels of a row: Gaussian, correlated with their neighbours.
PIXELS = 8
PLACES = np.arange(PIXELS)
COVARIANCE = 0.09 * np.exp(-np.abs(PLACES[:, None] - PLACES) / 4)
MEAN = np.linspace(-0.3, 0.3, PIXELS)
SHAPE = (1, PIXELS, 1)
PICTURE = np.array([200, 90, 160, 20, 240, 130, 40, 100], np.uint8).reshape(SHAPE)
KNOWN = (PICTURE.ravel() / 127.5 - 1).astype(np.float64)
REDRAW = np.array([[False, False, True, True, True, False, False, False]])


@functools.cache
def process(objective, **fields):
    return d.make_diffusion(DiffusionConfig(objective=objective, schedule='cosine', **fields))


def network(diffusion):
    """The ideal network of the data above, for any objective."""
    values, vectors = np.linalg.eigh(COVARIANCE)
    vectors, mean = jnp.asarray(vectors, jnp.float32), jnp.asarray(MEAN, jnp.float32)

    def denoise(seen, time):
        x = seen / d.network_input(diffusion, jnp.ones_like(seen), time)
        signal, noise = d.signal_at(diffusion, time), d.noise_at(diffusion, time)
        row, alpha, sigma = (array.reshape(len(x), -1) for array in (x, signal, noise))
        spectrum = jnp.asarray(values, jnp.float32)[None, :]
        gain = alpha * spectrum / (alpha**2 * spectrum + sigma**2)
        x0 = mean[None, :] + (((row - alpha * mean[None, :]) @ vectors) * gain) @ vectors.T
        x0 = x0.reshape(x.shape)
        return objectives.prediction_target(diffusion, x0, time, (x - signal * x0) / noise)

    return denoise


def draw(picture, objective='v', count=2000, denoise=None, diffusion=None, **options):
    """Float samples of shape (count, PIXELS)."""
    diffusion = diffusion or process(objective)
    sampler = s.make_sampler(SamplerConfig(**({'clip': False} | options)), diffusion)
    keys = s.sample_keys(3, range(count))
    found = redrawn(denoise or network(diffusion), keys, sampler, picture)
    return np.asarray(found).reshape(count, PIXELS)


def deviations(samples, mean, covariance):
    """Largest error of a mean, in standard deviations, and the relative error of the covariance."""
    scale = np.sqrt(covariance.diagonal().mean())
    difference = np.cov(samples.T) - covariance
    return (
        np.abs(samples.mean(axis=0) - mean).max() / scale,
        np.linalg.norm(difference) / np.linalg.norm(covariance),
    )


@pytest.mark.parametrize(
    ('objective', 'options'),
    [
        ('epsilon', {'name': 'ddpm', 'steps': 250}),
        ('x0', {'name': 'ddim', 'steps': 250}),
        ('v', {'name': 'ddim', 'steps': 250, 'eta': 1.0}),
        ('v', {'name': 'dpmpp_2m', 'steps': 40}),
        ('edm', {'name': 'heun', 'steps': 30}),
        ('edm', {'name': 'heun', 'steps': 60, 'churn': 20.0}),
        ('edm', {'name': 'ddpm', 'steps': 250}),
        ('edm', {'name': 'dpmpp_2m', 'steps': 40}),
        ('flow', {'name': 'heun', 'steps': 30}),
        ('flow', {'name': 'ddim', 'steps': 250}),
        ('flow', {'name': 'dpmpp_2m', 'steps': 40}),
    ],
)
def test_pictures_change_as_the_strength_says(objective, options):
    """From x = signal · picture + noise · ε, a sampler goes to a known Gaussian.

    The deterministic ones scale each principal component by its standard deviation, and the others
    draw from the posterior.
    """
    picture = p.Picture(PICTURE, strength=0.6)
    samples = draw(picture, objective, **options)
    sampler = s.make_sampler(SamplerConfig(**options), process(objective))
    schedule = p.make_schedule(sampler, picture)
    signal, noise = schedule.signal[0], schedule.noise[0]
    assert schedule.sampler.evaluations < sampler.evaluations
    assert np.arctan2(noise, signal) * 2 / np.pi == pytest.approx(0.6, abs=0.04)
    values, vectors = np.linalg.eigh(COVARIANCE)
    total = signal**2 * values + noise**2
    random = options['name'] == 'ddpm' or options.get('eta') or options.get('churn')
    gain = signal * values / total if random else np.sqrt(values / total)
    spread = gain**2 * noise**2 + (values * noise**2 / total if random else 0)
    mean = MEAN + vectors @ (gain * signal * (vectors.T @ (KNOWN - MEAN)))
    covariance = vectors @ np.diag(spread) @ vectors.T
    if options.get('churn'):  # between the two
        assert np.abs(samples.mean(axis=0) - mean).max() < 0.05
        return
    wrong_mean, wrong_covariance = deviations(samples, mean, covariance)
    assert wrong_mean < 0.12
    assert wrong_covariance < 0.12


def test_little_strength_keeps_the_picture_and_all_of_it_forgets():
    options = {'name': 'dpmpp_2m', 'steps': 40}
    weak, strong = (
        np.abs(draw(p.Picture(PICTURE, strength=x), **options) - KNOWN).mean() for x in (0.05, 0.8)
    )
    assert weak < 0.12
    assert strong > 0.25
    diffusion = process('v')
    sampler = s.make_sampler(SamplerConfig(clip=False, **options), diffusion)
    plain = sample(network(diffusion), s.sample_keys(3, range(20)), SHAPE, sampler)
    forgotten = draw(p.Picture(PICTURE, strength=1.0), count=20, **options)
    np.testing.assert_allclose(forgotten, np.asarray(plain).reshape(20, PIXELS), atol=1e-5)


def conditional():
    """Mean and covariance of the redrawn pixels, given the others."""
    redrawn, kept = REDRAW[0], ~REDRAW[0]
    gain = COVARIANCE[np.ix_(redrawn, kept)] @ np.linalg.inv(COVARIANCE[np.ix_(kept, kept)])
    return (
        MEAN[redrawn] + gain @ (KNOWN - MEAN)[kept],
        COVARIANCE[np.ix_(redrawn, redrawn)] - gain @ COVARIANCE[np.ix_(kept, redrawn)],
    )


@pytest.mark.parametrize(
    ('objective', 'options', 'resample'),
    [
        ('epsilon', {'name': 'ddpm', 'steps': 100}, 8),
        pytest.param('x0', {'name': 'ddim', 'steps': 50}, 16, marks=pytest.mark.long),
        ('v', {'name': 'dpmpp_2m', 'steps': 20}, 16),
        pytest.param('edm', {'name': 'heun', 'steps': 20}, 16, marks=pytest.mark.long),
        pytest.param(
            'edm', {'name': 'heun', 'steps': 20, 'churn': 10.0}, 16, marks=pytest.mark.long
        ),
        ('flow', {'name': 'heun', 'steps': 40}, 16),
        pytest.param('flow', {'name': 'dpmpp_2m', 'steps': 20}, 16, marks=pytest.mark.long),
    ],
)
def test_what_is_redrawn_follows_what_is_kept(objective, options, resample):
    """Repeated stretches approach the exact conditional distribution; once each does not."""
    found = {}
    for times in (1, resample):
        picture = p.Picture(PICTURE, REDRAW, resample=times, jump_length=1)
        samples = draw(picture, objective, count=800, **options)
        kept = samples[:, ~REDRAW[0]]
        np.testing.assert_array_equal(
            to_pixels(kept, np.dtype(np.uint8))[7], PICTURE.ravel()[~REDRAW[0]]
        )
        assert (kept == kept[0]).all()
        found[times] = deviations(samples[:, REDRAW[0]], *conditional())
    assert found[1][0] > 0.4
    assert found[resample][0] < 0.28
    assert found[resample][1] < min(0.28, found[1][1])


def test_kept_pixels_are_exact_for_every_value():
    pixels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    redraw = np.zeros((16, 16), bool)
    redraw[0, 0] = True
    canvas = p.Canvas.of(p.Picture(pixels, redraw))
    sampler = s.make_sampler(SamplerConfig(name='ddim', steps=2), process('v'))
    schedule = p.make_schedule(sampler, p.Picture(pixels, redraw, resample=1))
    keys = s.sample_keys(0, [0])
    x = jnp.full((1, 16, 16, 1), 0.3)
    last = p.after_evaluation(x, keys, schedule, canvas, jnp.asarray(1))
    np.testing.assert_array_equal(to_pixels(last, np.dtype(np.uint8))[0][~redraw], pixels[~redraw])
    assert last[0, 0, 0, 0] == x[0, 0, 0, 0]


@pytest.mark.parametrize('truncate', [True, None])
def test_images_have_the_kept_pixels(truncate):
    """Dark ones would lose 1 if truncated, because in [−1, 1] they are a little too small."""
    config = tiny_config()
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    redraw = np.zeros((8, 8), bool)
    redraw[6:] = True
    generator = Generator(
        config,
        SamplerConfig(name='ddim', steps=2, truncate=truncate),
        batch_size=2,
        devices=jax.devices()[:1],
        picture=p.Picture(pixels, redraw),
    )
    params = generator.put(fresh_state(config).params)
    images = generator(params, seed=0, indices=np.arange(2))
    assert images.dtype == np.uint8
    for image in images:
        np.testing.assert_array_equal(image[:6], pixels[:6])
        assert (image[6:] != pixels[6:]).any()


def visited(picture, **options):
    schedule = p.make_schedule(s.make_sampler(SamplerConfig(**options), process('v')), picture)
    return schedule, [int(t) for t in schedule.sampler.timesteps]


def test_jumps_repeat_stretches():
    picture = p.Picture(PICTURE, REDRAW, resample=3, jump_length=2)
    schedule, timesteps = visited(picture, name='ddim', steps=6)
    all_of_them = sorted(set(timesteps), reverse=True)
    assert [all_of_them.index(t) for t in timesteps] == [
        *(0, 1, 2, *(1, 2) * 2),
        *(3, 4, *(3, 4) * 2),
        5,
    ]
    # A jump has the variance that leads from one noise level to the other.
    jumps = np.flatnonzero(schedule.raised)
    assert list(jumps) == [2, 4, 8, 10]
    for k in jumps:
        arrived = all_of_them.index(timesteps[k]) + 1
        signal, noise = (
            getattr(process('v'), name)[all_of_them[arrived]] for name in ('signal', 'noise')
        )
        then = schedule.signal[k + 1], schedule.noise[k + 1]
        assert schedule.scale[k] * signal == pytest.approx(then[0], rel=1e-6)
        total = (schedule.scale[k] * noise) ** 2 + schedule.raised[k] ** 2
        assert total == pytest.approx(then[1] ** 2, rel=1e-6)
    # Heun's steps have two evaluations, the last has one.
    _, timesteps = visited(
        p.Picture(PICTURE, REDRAW, resample=2, jump_length=1), name='heun', steps=3
    )
    a, b, c = sorted(set(timesteps), reverse=True)
    assert timesteps == [a, b, a, b, b, c, b, c, c]
    # At a lower strength, jumps stay below the start.
    schedule, timesteps = visited(
        p.Picture(PICTURE, REDRAW, 0.5, resample=2, jump_length=1), name='ddim', steps=6
    )
    assert max(timesteps) == timesteps[0] < 600
    assert schedule.strength == 0.5


def test_defaults():
    options = {'name': 'ddim', 'steps': 50}
    changed, _ = visited(p.Picture(PICTURE), **options)
    assert (changed.strength, changed.resample) == (p.STRENGTH, 1)
    redrawn, _ = visited(p.Picture(PICTURE, REDRAW), **options)
    assert (redrawn.strength, redrawn.resample, redrawn.jump_length) == (1.0, p.RESAMPLE, 2)
    _, timesteps = visited(p.Picture(PICTURE, REDRAW), name='ddim', steps=1)
    assert len(timesteps) == 1


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'strength': 0.0}, 'strength: expected more than 0 and at most 1, found 0.0'),
        ({'strength': 1.5}, 'strength: expected more than 0 and at most 1, found 1.5'),
        ({'strength': float('nan')}, 'strength: expected more than 0'),
        ({'redraw': REDRAW, 'resample': 0}, 'resample: expected 1 .* or more, found 0'),
        ({'redraw': REDRAW, 'jump_length': 10}, 'jump_length: expected 1 to 9, as 10 steps'),
        ({'resample': 2}, 'resample: 2 needs a mask'),
        (
            {'redraw': REDRAW, 'resample': 2, 'strength': 0.01},
            'resample: 2 has nothing to repeat, as one step starts at this strength',
        ),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UserError, match=message):
        visited(p.Picture(PICTURE, **options), name='ddim', steps=10)


def test_a_learned_variance_goes_through_repeated_steps():
    """With the values that mean the smallest variance, it equals `fixed_small`."""
    learned = process('epsilon', learn_sigma=True, steps=30)
    plain = process('epsilon', steps=30)

    def with_values(x, t):
        return jnp.concatenate([network(plain)(x, t), jnp.full_like(x, -1)], axis=-1)

    picture = p.Picture(PICTURE, REDRAW, resample=3, jump_length=2)
    a = draw(picture, count=50, diffusion=learned, denoise=with_values, name='ddpm')
    b = draw(picture, count=50, diffusion=plain, name='ddpm', variance='fixed_small')
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_what_determines_the_samples():
    """`jaxunet.sample` continues an interrupted output only if this is the same."""
    options = {'name': 'ddim', 'steps': 50}
    other, less = 255 - PICTURE, REDRAW & (PLACES < 4)[None]
    pictures = [
        p.Picture(PICTURE),
        p.Picture(other),
        p.Picture(PICTURE, strength=0.7),
        p.Picture(PICTURE, REDRAW),
        p.Picture(PICTURE, less),
        p.Picture(PICTURE, REDRAW, 0.7),
        p.Picture(PICTURE, REDRAW, resample=2),
        p.Picture(PICTURE, REDRAW, jump_length=3),
    ]
    found = [visited(picture, **options)[0].identity for picture in pictures]
    assert all(a != b for i, a in enumerate(found) for b in found[:i])
    assert (
        visited(p.Picture(PICTURE.copy(), strength=p.STRENGTH), **options)[0].identity == found[0]
    )
