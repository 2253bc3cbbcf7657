"""The largest error of the activation inside the convolutions, evaluated in float64 from PTX's
error bound for tanh.approx. The numbers are the ones in activation.cuh.
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
