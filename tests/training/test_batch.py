"""The noise of a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxunet.training.batch import draw_noise

SHAPE = (6, 6, 3)


def images(count: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (count, *SHAPE)).astype(np.float32)


def test_an_image_gets_the_nearest_of_its_noises():
    x0, keys = images(5), jax.random.split(jax.random.key(1), 5)
    found = jax.jit(draw_noise, static_argnums=2)(keys, x0, 4)
    for image, key, noise in zip(x0, keys, found, strict=True):
        candidates = np.asarray(jax.random.normal(key, (4, *SHAPE)))
        distances = np.linalg.norm((candidates - image).reshape(4, -1), axis=1)
        np.testing.assert_array_equal(noise, candidates[distances.argmin()])


def test_the_nearest_of_many_is_nearer_and_almost_normal():
    x0, keys = images(400), jax.random.split(jax.random.key(2), 400)
    draw = jax.jit(draw_noise, static_argnums=2)
    plain, near = (np.asarray(draw(keys, x0, count)) for count in (1, 8))
    products = [np.mean(np.sum(noise * x0, axis=(1, 2, 3))) for noise in (plain, near)]
    assert products[1] > products[0] + 3
    assert abs(near.mean()) < 0.02
    assert 0.9 < near.std() < 1  # small noises are near to all images, the more so small ones


def test_noise_depends_on_the_key_of_the_image_alone():
    x0, keys = jnp.asarray(images(4)), jax.random.split(jax.random.key(3), 4)
    np.testing.assert_array_equal(draw_noise(keys, x0, 3)[2:], draw_noise(keys[2:], x0[2:], 3))
