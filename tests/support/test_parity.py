"""The assertion that judges kernels: what it must let pass, and what it must not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import parity
from support.parity import assert_parity, draw
from support.products import with_tf32_products


def product(x, y):
    return jnp.einsum('ij,jk->ik', x, y)


def inputs(dtype):
    return {'x': (draw((16, 32), dtype), dtype), 'y': (draw((32, 8), dtype), dtype)}


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_plain_op_passes_against_itself(dtype):
    shares = assert_parity(product, product, inputs(dtype))
    assert set(shares) == {'output', 'gradient of x', 'gradient of y'}
    assert max(shares.values()) <= 0.5


def narrower(x, y):
    return product(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)).astype(x.dtype)


def biased(x, y):
    return product(x, y) * jnp.asarray(1 + 2**-5, x.dtype)


def unwritten(x, y):
    return product(x, y).at[3, 3].set(jnp.nan)


@jax.custom_vjp
def wrong_gradient(x, y):
    return product(x, y)


wrong_gradient.defvjp(
    lambda x, y: (product(x, y), (x, y)),
    lambda saved, g: (jnp.einsum('ik,jk->ij', g, saved[1]), jnp.zeros_like(saved[1])),
)


def rough(x, y):
    return (x.astype(jnp.float32) @ y.astype(jnp.float32)).astype(jnp.float32)


@pytest.mark.parametrize(
    ('wrong', 'message'),
    [
        (narrower, 'output'),
        (biased, 'output'),
        (unwritten, 'nan'),
        (wrong_gradient, 'gradient of y'),
    ],
)
def test_wrong_kernels_fail(wrong, message):
    with pytest.raises(AssertionError, match=message):
        assert_parity(wrong, product, inputs('float32'))


def one_lucky_draw(monkeypatch, later):
    """Makes the plain op's error 2⁻¹² in the first draws, and `later` in those after."""
    drawn = []

    def errors(found, exact):
        drawn.append(found)
        return dict.fromkeys(exact, 2**-12 if len(drawn) <= parity.DRAWS else later)

    monkeypatch.setattr(parity, '_errors', errors)
    monkeypatch.setattr(parity, 'FEW', 0)
    return drawn


def off(x, y):
    return product(x, y) * jnp.asarray(1 + 2**-10, x.dtype)


def test_a_near_miss_gets_the_bound_of_more_draws(monkeypatch):
    drawn = one_lucky_draw(monkeypatch, 2**-10)
    shares = assert_parity(off, product, inputs('float32'), gradients=False)
    assert len(drawn) == parity.DRAWS + 1
    assert 0.4 < shares['output'] < 0.6


def test_a_kernel_that_stays_off_fails_after_all_draws(monkeypatch):
    drawn = one_lucky_draw(monkeypatch, 2**-12)
    with pytest.raises(AssertionError, match='output'):
        assert_parity(off, product, inputs('float32'), gradients=False)
    assert len(drawn) == parity.DRAWS_OF_FEW


def test_a_kernel_that_is_far_off_gets_no_more_draws(monkeypatch):
    drawn = one_lucky_draw(monkeypatch, 1.0)
    with pytest.raises(AssertionError, match='output'):
        assert_parity(biased, product, inputs('float32'), gradients=False)
    assert len(drawn) == parity.DRAWS


def test_another_type_fails():
    with pytest.raises(AssertionError, match='expected bfloat16, found float32'):
        assert_parity(rough, product, inputs('bfloat16'), gradients=False)


def test_a_small_bias_shows_in_bfloat16():
    with pytest.raises(AssertionError, match='output'):
        assert_parity(
            biased,
            product,
            {
                'x': (draw((4, 1), 'bfloat16'), 'bfloat16'),
                'y': (draw((1, 4), 'bfloat16'), 'bfloat16'),
            },
        )


def silu_of_product(x, y):
    return jax.nn.silu(jax.remat(product)(x, y))


def test_products_as_tf32_round_their_operands_forward_and_backward():
    """Exact where ten bits of mantissa hold the operands, else within their rounding."""
    short = {
        name: jnp.asarray(value, jnp.float32) for name, (value, _) in inputs('bfloat16').items()
    }
    cotangent = jnp.asarray(draw((16, 8), 'bfloat16'), jnp.float32)
    rounded = with_tf32_products(product, gradients=True)
    out, gradients = jax.jit(rounded)(short, cotangent)
    np.testing.assert_allclose(out, product(**short), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradients['x'], cotangent @ short['y'].T, rtol=1e-6, atol=1e-6)

    long = {name: jnp.asarray(value, jnp.float32) for name, (value, _) in inputs('float32').items()}
    out, gradients = with_tf32_products(silu_of_product, gradients=True)(long, cotangent)
    want, pull = jax.vjp(silu_of_product, long['x'], long['y'])
    # A gradient has the errors of two products. The largest of 3,000 draws are 2^-10.2 and 2^-8.6.
    pairs = ((out, want, 2**-9), (gradients['x'], pull(cotangent)[0], 2**-8))
    for found, exact, most in pairs:
        error = np.abs(found - exact).max() / np.abs(exact).max()
        assert 2**-14 < error < most


def test_products_inside_a_loop_are_refused():
    def looped(x, y):
        return jax.lax.scan(lambda c, _: (product(c, y), None), x, None, 2)[0]

    arguments = {'x': jnp.ones((2, 2)), 'y': jnp.ones((2, 2))}
    with pytest.raises(NotImplementedError, match='products inside scan'):
        with_tf32_products(looped, gradients=False)(arguments, jnp.ones((2, 2)))
