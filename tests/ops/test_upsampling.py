"""Nearest-neighbour upsampling of every type and number of channels, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxunet.ops.conv3x3.upsampling import nearest


def image(dtype, channels):
    return jax.random.normal(jax.random.key(channels), (2, 3, 5, channels), dtype)


@pytest.mark.parametrize('channels', [1, 3, 8])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
def test_every_pixel_is_repeated_bit_for_bit(dtype, channels):
    x = image(dtype, channels).at[0, 0, 0, 0].set(jnp.nan)
    want = np.repeat(np.repeat(np.asarray(x), 2, axis=1), 2, axis=2)
    for call in (nearest, jax.jit(nearest), jax.vmap(lambda one: nearest(one[None])[0])):
        got = np.asarray(call(x))
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize('channels', [3, 8])
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_the_gradient_of_a_pixel_is_the_sum_of_four(dtype, channels):
    x, dy = image(dtype, channels), jnp.repeat(jnp.repeat(image(dtype, channels), 2, 1), 2, 2)
    (got,) = jax.vjp(jax.checkpoint(nearest), x)[1](dy)
    np.testing.assert_array_equal(got, 4 * x)  # exact, because the four are equal
    tangent = jax.jvp(nearest, (x,), (x,))[1]
    np.testing.assert_array_equal(tangent, nearest(x))
