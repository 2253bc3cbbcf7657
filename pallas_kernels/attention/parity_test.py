"""The attention kernels against the float64 oracle.

A CPU simulates the small cases; a GPU runs all. XLA runs those that the kernels do not take.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention import plain
from support.mosaic import kernels_of_this_machine
from support.parity import (
    DTYPES,
    assert_parity,
    assert_runs_are_identical,
    draw,
    types_in_turn,
)

from jaxunet.ops.attention.cases import ADM, AWKWARD, CASES, ELEPHANTS64, Case
from pallas_kernels.attention.vjp import attention


@pytest.fixture(autouse=True, scope='module')
def _kernels():
    with kernels_of_this_machine():
        yield


def check(case: Case, dtype: str, batch: int):
    shape = (case.batch or batch, case.tokens, 3 * case.heads * case.width)
    assert_parity(
        lambda qkv: attention(qkv, num_heads=case.heads),
        plain(case.heads),
        {'qkv': (draw(shape, dtype), dtype)},
    )


# One block of tokens, two, more than a ring has slots; and a call that XLA runs.
SMALL = (
    Case(64, 2, 32, batch=2),
    Case(128, 1, 64, batch=1),
    Case(192, 2, 32, batch=1),
    AWKWARD[0],
)


@pytest.mark.parametrize(('case', 'dtype'), types_in_turn(SMALL, ('bfloat16', 'float16')))
def test_awkward_shapes(case, dtype):
    check(case, dtype, 2)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize(
    'case',
    [Case(64, 3, 64), Case(128, 1, 32), Case(192, 2, 64), Case(320, 5, 32)],
    ids=lambda c: c.name,
)
def test_cases_for_hopper(case, dtype):
    """One block of tokens, as many as a ring has slots, and more."""
    check(case, dtype, 3)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('width', [32, 64])
def test_gradients_of_large_logits(width, dtype):
    """Whole numbers whose exponentials overflow: gradients are finite, and as exact as the type
    allows at the scale of the summands. If one key has all the weight, the sums cancel almost
    completely.
    """
    values = np.round(draw((2, 128, 3 * width), 'bfloat16', scale=10))

    def gradient(call):
        return jax.grad(lambda qkv: jnp.sum(call(qkv).astype(jnp.float32)))

    found = jax.jit(gradient(lambda qkv: attention(qkv, num_heads=1)))(jnp.asarray(values, dtype))
    cpu = jax.local_devices(backend='cpu')[0]
    with jax.default_device(cpu), jax.enable_x64(True):
        exact = np.asarray(gradient(plain(1))(jnp.asarray(values)))
    summed = np.abs(values).max() ** 2 * width**0.5  # the largest k, times a row's Σ |dO·v|
    difference = np.abs(np.asarray(found, np.float64) - exact).max()
    assert difference <= float(jnp.finfo(dtype).eps) * summed


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', [*ELEPHANTS64, *ADM[:2]], ids=lambda c: c.name)
def test_runs_are_identical(case, dtype):
    qkv = draw((32, case.tokens, 3 * case.heads * case.width), dtype)
    assert_runs_are_identical(
        lambda qkv: attention(qkv, num_heads=case.heads), {'qkv': (qkv, dtype)}
    )
