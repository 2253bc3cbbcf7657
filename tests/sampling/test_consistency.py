"""The sampler of consistency models, on Gaussian data whose exact jump to the image is known."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.samples import redrawn, sample
from support.tiny import tiny_config

from jaxunet.checkpoint.load import Model as Weights
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import DiffusionConfig
from jaxunet.config.samplers import CONSISTENCY_LEVELS
from jaxunet.diffusion import process as d
from jaxunet.diffusion.levels import signal_and_noise
from jaxunet.runtime.errors import UserError
from jaxunet.sampling import picture as p
from jaxunet.sampling import sampler as s
from jaxunet.sampling.generator import Generator, sampler_of
from jaxunet.sampling.model import Model, load
from jaxunet.sampling.options import SamplerConfig
from jaxunet.weights import write_weights

MEAN = np.array([-0.4, 0.0, 0.3, 0.1], np.float32)
SPREAD = np.array([0.1, 0.5, 0.3, 0.2], np.float32)
SHAPE = (1, 4, 1)
PICTURE = np.array([200, 90, 160, 20], np.uint8).reshape(SHAPE)
KNOWN = PICTURE.ravel() / 127.5 - 1
OF = pytest.mark.parametrize('of', ['edm', 'flow', 'v'])


@functools.cache
def process(of):
    schedule = 'cosine' if of == 'v' else 'linear'  # edm and flow have none, which is the default
    fields = {'consistency_of': of, 'schedule': schedule}
    return d.make_diffusion(DiffusionConfig(objective='consistency', **fields))


def network(diffusion):
    """Jumps along the probability flow of N(MEAN, SPREAD²), for either prediction."""
    mean, spread = (jnp.asarray(row).reshape(1, *SHAPE) for row in (MEAN, SPREAD))

    def denoise(seen, time):
        x = seen / d.network_input(diffusion, jnp.ones_like(seen), time)
        signal, noise = d.signal_at(diffusion, time), d.noise_at(diffusion, time)
        x0 = mean + (x / signal - mean) * spread / jnp.sqrt(spread**2 + (noise / signal) ** 2)
        a, b = d.target_factors(diffusion, time)
        return a * x0 + b * (x - signal * x0) / noise

    return denoise


def tuned(**changes):
    diffusion = {'objective': 'consistency', 'consistency_of': 'edm'}
    return tiny_config(diffusion=diffusion, **changes)


def visited(sampler):
    """σ of the evaluations."""
    signal, noise = signal_and_noise(sampler.diffusion.config, np.asarray(sampler.times))
    return noise / signal


def draw(of, indices=range(4000), picture=None, **options):
    """Float samples of shape (indices, 4)."""
    sampler = s.make_sampler(SamplerConfig(clip=False, **options), process(of))
    keys = s.sample_keys(1, np.array(indices))
    if picture is None:
        found = sample(network(process(of)), keys, SHAPE, sampler)
    else:
        found = redrawn(network(process(of)), keys, sampler, picture)
    return np.asarray(found).reshape(-1, 4)


@OF
@pytest.mark.parametrize('steps', CONSISTENCY_LEVELS)
def test_every_number_of_evaluations_draws_from_the_data(of, steps):
    sampler = s.make_sampler(SamplerConfig(steps=steps), process(of))
    assert sampler.evaluations == steps
    samples = draw(of, steps=steps)
    np.testing.assert_allclose(samples.mean(axis=0), MEAN, atol=0.02)
    np.testing.assert_allclose(samples.std(axis=0), SPREAD, rtol=0.04)


def test_samples_depend_on_the_seed_and_the_place_alone():
    samples = draw('edm', range(6), steps=3)
    np.testing.assert_allclose(draw('edm', [4, 1], steps=3), samples[[4, 1]], rtol=1e-6)
    # The noise is that of the place: only the start is that of fewer evaluations.
    assert (draw('edm', range(6), steps=1) != samples).all()


def test_levels_may_be_chosen():
    levels = (30.0, 8.0, 2.0, 0.5)
    sampler = s.make_sampler(SamplerConfig(levels=levels), process('edm'))
    assert sampler.evaluations == 5
    np.testing.assert_allclose(visited(sampler), [80.0, *levels], rtol=1e-5)
    samples = draw('edm', levels=levels)
    np.testing.assert_allclose(samples.std(axis=0), SPREAD, rtol=0.04)


@pytest.mark.parametrize(
    ('size', 'level'),
    [((31,), 0.821), ((32,), 2.0), ((64, 32), 2.0), ((63,), 2.0), ((64,), 3.0), ((64, 128), 3.0)],
)
def test_larger_images_go_back_to_more_noise(size, level):
    sampler = sampler_of(tuned(data={'image_size': size}), SamplerConfig())
    np.testing.assert_allclose(visited(sampler), [80, level], rtol=1e-5)


def test_a_picture_begins_at_its_strength_unless_steps_are_given():
    picture = p.Picture(PICTURE, strength=0.4)
    assert p.beginning_with(picture, SamplerConfig()).levels == pytest.approx([0.72654], rel=1e-4)
    for options in (
        SamplerConfig(steps=2),
        SamplerConfig(levels=(3.0,)),
        SamplerConfig('heun'),  # which is refused later
    ):
        assert p.beginning_with(picture, options) == options
    assert p.beginning_with(p.Picture(PICTURE, strength=1.0), SamplerConfig()) == SamplerConfig()


@pytest.mark.parametrize(('part', 'levels'), [(False, [0.72654]), (True, [80, 5, 1.1, 0.4])])
def test_generators_begin_with_the_picture(part, levels):
    config = tuned()
    pixels = np.full(config.image_shape, 90, np.uint8)
    redraw = np.eye(*config.image_shape[:2]) > 0 if part else None
    picture = p.Picture(pixels, redraw, None if part else 0.4, resample=1 if part else None)
    devices = jax.devices()[:1]
    generator = Generator(config, SamplerConfig(), batch_size=1, devices=devices, picture=picture)
    np.testing.assert_allclose(visited(generator.sampler), levels, rtol=1e-4)


def test_a_part_is_redrawn_in_four_steps_unless_others_are_given():
    picture = p.Picture(PICTURE, np.array([[True, False, True, False]]))
    assert p.beginning_with(picture, SamplerConfig()) == SamplerConfig(steps=4)
    assert p.beginning_with(picture, SamplerConfig(steps=2)) == SamplerConfig(steps=2)


@OF
def test_a_picture_changes_as_the_strength_says(of):
    """From the level that is nearest to the strength, 0.821 here, in one evaluation."""
    samples = draw(of, picture=p.Picture(PICTURE, strength=0.4))
    gain = SPREAD / np.sqrt(SPREAD**2 + 0.821**2)
    np.testing.assert_allclose(samples.mean(axis=0), MEAN + gain * (KNOWN - MEAN), atol=0.02)
    np.testing.assert_allclose(samples.std(axis=0), 0.821 * gain, rtol=0.04)


def test_a_mask_keeps_the_rest_of_the_picture():
    redraw = np.array([[True, False, True, False]])
    samples = draw('edm', range(50), picture=p.Picture(PICTURE, redraw), steps=4)
    np.testing.assert_allclose(samples[:, [1, 3]], np.tile(KNOWN[[1, 3]], (50, 1)), rtol=1e-6)
    assert (np.ptp(samples[:, [0, 2]], axis=0) > 0.1).all()


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'steps': 5}, r'steps: expected 1 to 4, as many as .* noise levels for, found 5'),
        ({'steps': 0}, r'steps: expected 1 to 4, .* found 0'),
        ({'name': 'heun'}, r'sampler: expected consistency, .*=consistency, found heun'),
        ({'skip_schedule': 'karras'}, r'skip_schedule: karras .* leave it out, or set levels'),
        ({'levels': (1.0, 3.0)}, r'levels: expected falling .* below 80 .* found 1, 3'),
        ({'levels': (80.0,)}, r'levels: expected falling .* below 80 and above 0, .* found 80'),
        ({'levels': (3.0, 0.0)}, r'levels: expected falling .* found 3, 0'),
        ({'levels': (3.0,), 'steps': 3}, r'steps: expected 2, one more than levels, found 3'),
        ({'name': 'heun', 'levels': (3.0,)}, r'levels: only .* or use sampler=consistency$'),
        ({'guidance_scale': 2.0}, r'guidance_scale: .* expected 1, or 0 .*, found 2'),
        ({'eta': 1.0}, r'eta: only .*ddim.* eta=1.0 with sampler=consistency; leave eta out$'),
        ({'respacing': '10'}, r"respacing: '10' picks timesteps, .* does not have; use steps"),
    ],
)
def test_options_without_a_meaning_are_refused(options, message):
    with pytest.raises(UserError, match=message) as error:
        s.make_sampler(SamplerConfig(**options), process('edm'), num_classes=3)
    assert '\n' not in str(error.value)


def test_other_guidance_than_the_folded_is_refused():
    config = DiffusionConfig(
        objective='consistency', consistency_of='flow', consistency_guidance=1.5
    )
    guided, message = d.make_diffusion(config), 'guidance_scale: guidance 1.5 is folded into .*'
    with pytest.raises(UserError, match=f'{message}expected 1, or 0 .*, found 2') as error:
        s.make_sampler(SamplerConfig(guidance_scale=2.0), guided, num_classes=3)
    assert '\n' not in str(error.value)
    s.make_sampler(SamplerConfig(guidance_scale=0.0), guided, num_classes=3)  # without a class


def test_a_model_in_a_file_keeps_its_objective_and_draws_in_two_evaluations(tmp_path):
    config = tiny_config(
        diffusion={
            'objective': 'consistency',
            'consistency_of': 'flow',
            'consistency_guidance': 1.5,
        }
    )
    params = jax.tree.map(np.asarray, fresh_state(config).params)
    model = Model(Weights(config, params, None, 'fresh'), config)
    for extension, program in (('pt', 'guided-diffusion'), ('bin', 'unet.cu')):
        refused = re.escape(f'{program} has no such model')
        with pytest.raises(UserError, match=rf'{refused}[^§]*diffusion.objective: .*consistency'):
            write_weights(tmp_path / f'a.{extension}', params, config)
    model.save(tmp_path / 'a.safetensors')
    model = load(tmp_path / 'a.safetensors')
    assert model.config.diffusion == config.diffusion
    (images, two, one) = (
        model.sample(3, progress=False, **how) for how in ({}, {'steps': 2}, {'steps': 1})
    )
    np.testing.assert_array_equal(images, two)
    assert (images != one).any()
    with pytest.raises(UserError, match='steps: expected 1 to 4'):
        model.sample(3, steps=20, progress=False)
