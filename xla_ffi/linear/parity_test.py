"""The linear layer's handlers against the float64 oracle.

The CPU handlers run the awkward cases, the GPU handlers all cases.
"""

import jax.numpy as jnp
import pytest
from support.parity import DTYPES, assert_parity, assert_runs_are_identical, draw

from jaxunet.ops.linear import reference
from jaxunet.ops.linear.cases import AWKWARD, CASES, ELEPHANTS64, Case
from xla_ffi.linear import vjp


def inputs(case: Case, dtype: str, batch: int, weights: str):
    image = (batch, case.height, case.width)
    shapes = {
        'x': ((*image, case.channels), dtype),
        'kernel': ((case.channels, case.features), weights),
    }
    shapes['bias'] = ((1, case.features), 'float32')
    if case.residual:
        shapes['residual'] = ((*image, case.features), dtype)
    scales = {'kernel': case.channels**-0.5}
    return {
        name: (draw(shape, kind, scale=scales.get(name, 1.0)), kind)
        for name, (shape, kind) in shapes.items()
    }


def check(case: Case, dtype: str, batch: int):
    """Compares with the reference; the weights have the type of x, as in the UNet."""
    assert_parity(vjp.linear, reference.linear, inputs(case, dtype, case.batch or batch, dtype))


@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', AWKWARD, ids=lambda c: c.name)
def test_awkward_shapes(case, dtype):
    check(case, dtype, 2)


def test_gradients_have_the_type_of_their_parameter():
    """A float32 weight gets an unrounded gradient even if x has 16 bits."""
    assert_parity(vjp.linear, reference.linear, inputs(AWKWARD[1], 'bfloat16', 5, 'float32'))


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('case', ELEPHANTS64, ids=lambda c: c.name)
def test_a_batch_of_32(case):
    """As in training, there are more strips of pixels than one block sums."""
    check(case, 'bfloat16', 32)


@pytest.mark.parametrize('dtype', DTYPES)
def test_awkward_runs_are_identical(dtype):
    assert_runs_are_identical(vjp.linear, inputs(AWKWARD[1], dtype, 5, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', ELEPHANTS64, ids=lambda c: c.name)
def test_runs_are_identical(case, dtype):
    assert_runs_are_identical(vjp.linear, inputs(case, dtype, 32, dtype))


X = (2, 3, 4, 8)


@pytest.mark.parametrize(
    ('shapes', 'message'),
    [
        ({'x': (2, 12, 8)}, r'x: shape \[2, 12, 8\]; expected \[batch, height, width, channels\]'),
        ({'x': (2, 3, 4, 0), 'kernel': (0, 5)}, r'x: shape \[2, 3, 4, 0\]'),
        ({'kernel': (9, 5)}, r'kernel: shape \[9, 5\]; expected \[8, features\]'),
        ({'kernel': (1, 1, 8, 5)}, r'kernel: shape \[1, 1, 8, 5\]'),
        ({'bias': (5,)}, r'bias: shape \[5\]; expected \[1, 5\]'),
        ({'bias': (2, 5)}, r'bias: shape \[2, 5\]; expected \[1, 5\]'),
        (
            {'residual': (2, 3, 4, 8)},
            r'residual is float32\[2, 3, 4, 8\]; expected float32\[2, 3, 4, 5\]',
        ),
    ],
)
def test_wrong_calls_say_what_is_expected(shapes, message):
    arrays = {
        name: jnp.zeros(shape)
        for name, shape in ({'x': X, 'kernel': (8, 5), 'bias': (1, 5)} | shapes).items()
    }
    with pytest.raises(ValueError, match=f'linear: {message}'):
        vjp.linear(**arrays)


def test_wrong_types_say_what_is_expected():
    x, kernel, bias = jnp.zeros(X, jnp.bfloat16), jnp.zeros((8, 5)), jnp.zeros((1, 5))
    with pytest.raises(ValueError, match=r'linear: x: int8; expected bfloat16, float16 or float32'):
        vjp.linear(x.astype(jnp.int8), kernel, bias)
    with pytest.raises(
        ValueError,
        match=r'linear: residual is float32\[2, 3, 4, 5\]; expected bfloat16\[2, 3, 4, 5\]',
    ):
        vjp.linear(x, kernel, bias, residual=jnp.zeros((2, 3, 4, 5)))
