"""The largest errors of SiLU and its derivative by tanh.approx, evaluated in float64 from PTX's
error bound. The numbers are the ones in activation.cuh and in group_norm/gradient.cuh.
"""

import jax.numpy as jnp
import numpy as np
import pytest

TANH_ERROR = 2.0**-11  # relative error of tanh.approx.f32
Z = np.linspace(-16, 16, 64001)
SILU = Z / (1 + np.exp(-Z))
BOUND = np.abs(Z / 2 * np.tanh(Z / 2)) * TANH_ERROR  # error of h + h * tanh(h), h = z / 2
NORMAL = np.exp(-(Z**2) / 2) / np.exp(-(Z**2) / 2).sum()


def rms(error):
    """Root mean square for normally distributed z of deviation 1."""
    return np.sqrt(np.sum(NORMAL * error**2))


def test_the_formula_is_silu():
    h = Z / 2
    np.testing.assert_allclose(h + h * np.tanh(h), SILU, atol=1e-14)


def test_the_error_is_small_beside_the_input():
    assert np.all(np.abs(Z) * 2.0**-12 >= BOUND)
    # With the largest possible error of tanh, the sum stays within the bound.
    h = Z / 2
    for sign in (-1, 1):
        off = h + h * np.tanh(h) * (1 + sign * TANH_ERROR) - SILU
        assert np.all(np.abs(off) <= BOUND + 1e-14)


def test_it_exceeds_a_share_of_the_result_only_where_that_is_small():
    share = BOUND[Z != 0] / np.abs(SILU[Z != 0])
    z = Z[Z != 0]
    assert z[share > 0.01].max() == pytest.approx(-3.7, abs=0.05)
    assert z[share > 1].max() == pytest.approx(-8.3, abs=0.05)
    assert np.abs(SILU[Z < -8.3]).max() < 0.0021


@pytest.mark.parametrize(('dtype', 'share'), [('bfloat16', 0.16), ('float16', 1.27)])
def test_its_root_mean_square_beside_that_of_rounding(dtype, share):
    rounded = np.asarray(jnp.asarray(SILU, jnp.float32).astype(dtype).astype(jnp.float32))
    assert rms(BOUND) / rms(rounded - SILU) == pytest.approx(share, abs=0.005)


def test_the_error_of_the_derivative_beside_that_of_rounding_dy():
    h, t = Z / 2, np.tanh(Z / 2)
    derivative = (1 + t) * (1 + h - h * t) / 2
    s = 1 / (1 + np.exp(-Z))
    np.testing.assert_allclose(derivative, s + Z * s * (1 - s), atol=1e-14)
    bound = np.abs(t * (1 - 2 * h * t)) / 2 * TANH_ERROR
    for sign in (-1, 1):
        off = t * (1 + sign * TANH_ERROR)
        error = (1 + off) * (1 + h - h * off) / 2 - derivative
        assert np.all(np.abs(error) <= bound + np.abs(h) * TANH_ERROR**2)  # h * off^2 is quadratic
    dy = np.random.default_rng(0).standard_normal(2**18)
    rounded = np.asarray(jnp.asarray(dy, jnp.float32).astype('bfloat16').astype(jnp.float32))
    rounding = np.sqrt(np.mean((rounded - dy) ** 2)) * rms(derivative)
    assert rms(bound) / rounding == pytest.approx(0.064, abs=0.001)
