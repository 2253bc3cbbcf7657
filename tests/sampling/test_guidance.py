"""Guidance of every prediction, by the unconditional one and by a weaker model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.diffusion import process, toy
from support.tiny import tiny_config

from jaxunet.config import DiffusionConfig
from jaxunet.diffusion import process as d
from jaxunet.runtime.errors import UserError
from jaxunet.sampling import sampler as s
from jaxunet.sampling.guidance import Weaker, check_weaker, guided

PREDICTIONS = ('epsilon', 'x0', 'v')
SHAPE = (4, 4, 3)


def labelled(channels):
    """Output depends on state, step and label; `calls` records the batches that the network saw."""
    calls = []

    def denoise(x, t, labels):
        calls.append(len(x))
        shift = (labels.astype(jnp.float32) + 2)[:, None, None, None]
        mean = toy(x, t) * shift
        return jnp.concatenate([mean, jnp.cos(mean) * shift], axis=-1)[..., :channels]

    return denoise, calls


@pytest.mark.parametrize('channels', [3, 6])
def test_guidance(channels):
    denoise, calls = labelled(channels)
    labels = jnp.asarray([4, -1, 0, 9, 2], jnp.int32)
    dropped = jnp.full(5, -1, jnp.int32)
    x = s.initial_noise(s.sample_keys(0, range(5)), SHAPE)
    t = jnp.asarray([0, 1, 500, 998, 999], jnp.int32)
    conditional, unconditional = (
        np.asarray(denoise(x, t, labels)),
        np.asarray(denoise(x, t, dropped)),
    )
    assert np.abs(conditional - unconditional)[[0, 2, 3, 4]].max(axis=(1, 2, 3)).min() > 0.1
    np.testing.assert_array_equal(guided(denoise, labels, 1.0)(x, t), conditional)
    np.testing.assert_array_equal(guided(denoise, labels, 0.0)(x, t), unconditional)
    del calls[:]
    for scale in (0.5, 1 + 1e-6, 1e-6, 3.5):
        got = guided(denoise, labels, scale)(x, t)
        assert got.shape == conditional.shape
        expected = unconditional + scale * (conditional - unconditional)
        np.testing.assert_allclose(got[..., :3], expected[..., :3], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got[..., 3:], conditional[..., 3:], rtol=1e-6, atol=1e-6)
    assert calls == [10] * 4  # one doubled batch each


@pytest.mark.parametrize('prediction', [*PREDICTIONS, 'edm', 'flow'])
def test_guidance_of_any_prediction_guides_epsilon(prediction):
    """Guiding x0, v, or what edm and flow predict is guiding the ε that it stands for."""
    diffusion = process(objective=prediction)
    denoise, _ = labelled(3)
    labels = jnp.asarray([4, 0], jnp.int32)
    x = s.initial_noise(s.sample_keys(0, range(2)), SHAPE)
    t = d.middle_time(diffusion, jnp.asarray([300, 600], jnp.int32))

    def eps(output):
        return d.predict_x0_and_noise(diffusion, output, x, t)[1]

    conditional, unconditional = (
        eps(denoise(x, t, labels)),
        eps(denoise(x, t, jnp.full_like(labels, -1))),
    )
    mixed = eps(guided(denoise, labels, 2.5)(x, t))
    np.testing.assert_allclose(
        mixed, unconditional + 2.5 * (conditional - unconditional), rtol=1e-4, atol=1e-4
    )


EDM = d.make_diffusion(DiffusionConfig(objective='edm'))


def gaussian(variance):
    """Returns EDM's network for data N(label + 1, `variance`), exactly."""

    def denoise(x, time, labels):
        sigma = jnp.exp(time / 250)[:, None, None, None]
        total = jnp.sqrt(sigma**2 + 0.25)
        mean = (labels.astype(x.dtype) + 1)[:, None, None, None]
        noisy = x * total  # the network sees x / √(σ² + σ_data²)
        x0 = mean + variance * (noisy - mean) / (variance + sigma**2)
        return (x0 - 0.25 / total**2 * noisy) / (0.5 * sigma / total)

    return denoise


def guided_image(scale, limits, x, sigmas, strong, weak):
    """Euler's method in σ, written out, for data N(1, strong) guided by N(1, weak)."""
    low, high = limits
    for sigma, end in zip(sigmas, [*sigmas[1:], 0.0], strict=True):
        x0 = 1 + strong * (x - 1) / (strong + sigma**2)
        if low < sigma <= high:
            other = 1 + weak * (x - 1) / (weak + sigma**2)
            x0 = other + scale * (x0 - other)
        x = x + (end - sigma) * (x - x0) / sigma
    return x


@pytest.mark.parametrize('limits', [None, (0.2, 3.0)])
def test_autoguidance_of_gaussian_data(limits):
    """Karras et al. 2024, eq. 3, where both denoisers are linear; Kynkäänniemi et al.: in a range
    of noise levels.
    """
    options = {'steps': 12, 'skip_schedule': 'karras', 'clip': False, 'guidance_scale': 2.5}
    sampler = s.make_sampler(
        s.SamplerConfig('ddim', **options, guidance_range=limits), EDM, num_classes=3
    )
    keys, labels = s.sample_keys(0, range(3)), jnp.zeros(3, jnp.int32)
    strong, weak = gaussian(0.04), gaussian(0.2)
    state = s.initial_state(keys, SHAPE, sampler)
    images = jax.jit(
        lambda state: (
            s.run(
                guided(strong, labels, 2.5, weak),
                state,
                keys,
                sampler,
                unguided=guided(strong, labels, 1.0),
            ).x
        )
    )(state)
    sigmas = np.exp(np.asarray(sampler.times) / 250)
    start = np.asarray(state.x, np.float64) * np.sqrt(1 + sigmas[0] ** 2)
    expected = guided_image(2.5, limits or (0, np.inf), start, sigmas, 0.04, 0.2)
    np.testing.assert_allclose(images, expected, atol=2e-4)
    assert (sampler.guided is None) == (limits is None)
    unguided = guided_image(1.0, (0, np.inf), start, sigmas, 0.04, 0.2)
    assert np.abs(expected - unguided).max() > 0.05


def test_a_range_without_an_evaluation_is_an_error():
    options = s.SamplerConfig('heun', steps=5, guidance_scale=2.0, guidance_range=(100.0, 200.0))
    with pytest.raises(UserError, match=r'no evaluation lies above 100 and up to 200; .* 0.002 to'):
        s.make_sampler(options, EDM, num_classes=3)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'data': {'image_size': (16, 8)}}, 'images of 8x8x1, .* found 16x8x1'),
        ({'model': {'num_classes': 4}}, 'model.num_classes 3, .* found 4'),
        ({'diffusion': {'objective': 'v'}}, 'diffusion.objective epsilon, .* found v'),
        ({'diffusion': {'schedule': 'cosine'}}, 'diffusion.schedule linear, .* found cosine'),
    ],
)
def test_a_guide_of_another_kind_is_an_error(changes, message):
    config = tiny_config(model={'num_classes': 3}, diffusion={'schedule': 'linear'})
    with pytest.raises(UserError, match=f'guide: expected a model with {message}'):
        check_weaker(Weaker(config.replace(**changes), {}, ''), config, 2.0)
    smaller = config.replace(model={'base_channels': 64, 'num_classes': 0})
    check_weaker(Weaker(smaller, {}, ''), config, 2.0)
    with pytest.raises(UserError, match='guide: has no effect with guidance_scale=1'):
        check_weaker(Weaker(smaller, {}, ''), config, 1.0)
