"""Classifier-free guidance of every prediction."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.diffusion import process, toy

from jaxunet.diffusion import process as d
from jaxunet.sampling import sampler as s

PREDICTIONS = ('epsilon', 'x0', 'v')
EACH_PREDICTION = tuple((prediction,) for prediction in PREDICTIONS)
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
    np.testing.assert_array_equal(s.guided(denoise, labels, 1.0)(x, t), conditional)
    np.testing.assert_array_equal(s.guided(denoise, labels, 0.0)(x, t), unconditional)
    del calls[:]
    for scale in (0.5, 1 + 1e-6, 1e-6, 3.5):
        got = s.guided(denoise, labels, scale)(x, t)
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
    guided = eps(s.guided(denoise, labels, 2.5)(x, t))
    np.testing.assert_allclose(
        guided, unconditional + 2.5 * (conditional - unconditional), rtol=1e-4, atol=1e-4
    )
