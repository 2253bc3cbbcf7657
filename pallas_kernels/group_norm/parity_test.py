"""The GroupNorm kernels against the float64 oracle.

A CPU simulates the small cases; a GPU runs all. XLA runs those that the kernels do not take.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.group_norm import inputs, op
from support.mosaic import kernels_of_this_machine
from support.parity import DTYPES, assert_parity, types_in_turn

from jaxunet.ops.group_norm import reference
from jaxunet.ops.group_norm.cases import AWKWARD, CASES, ELEPHANTS64, Case
from pallas_kernels.group_norm import vjp

# Special cases of the Hopper kernels: pixels that two register tiles share, more groups than a warp
# has lanes, a mean far from zero.
FOR_HOPPER = (
    Case(9, 7, (96, 32), groups=8, per_sample=True),
    Case(28, 28, (64, 128), groups=64),
    Case(64, 64, (64,), mean=1000.0),
)


# XLA runs the last, whose channels are not multiples of 32.
SMALL = (
    Case(8, 4, (32, 64), silu=False),
    Case(9, 7, (96, 32), groups=8, per_sample=True),
    Case(9, 9, (64,), batch=1, mean=1000.0),
    Case(4, 4, (128,), groups=64, batch=3),
    AWKWARD[3],
)


@pytest.fixture(autouse=True, scope='module')
def _kernels():
    with kernels_of_this_machine():
        yield


def check(case: Case, dtype: str, batch: int = 2):
    if case.mean and dtype != 'float32':
        pytest.skip('such a mean leaves no deviations in 16 bits')
    values = inputs(case, dtype, case.batch or batch)
    assert_parity(op(vjp.group_norm, case), op(reference.group_norm, case), values)


@pytest.mark.parametrize(
    ('case', 'dtype'), types_in_turn(SMALL, ('bfloat16', 'float16', 'float32'))
)
def test_awkward_shapes(case, dtype):
    check(case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', FOR_HOPPER, ids=lambda c: c.name)
def test_cases_for_hopper(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('case', FOR_HOPPER + ELEPHANTS64[::3], ids=lambda c: c.name)
def test_float32(case):
    check(case, 'float32', 3)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', ELEPHANTS64[::4], ids=lambda c: c.name)
def test_runs_are_identical(case, dtype):
    arrays = {
        name: jnp.asarray(value, jnp.float32).astype(of)
        for name, (value, of) in inputs(case, dtype, 32).items()
    }
    call = op(vjp.group_norm, case)
    gradient = jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(call(**a).astype(jnp.float32)))))
    first = jax.tree.map(np.asarray, gradient(arrays))
    for _ in range(5):
        jax.tree.map(
            np.testing.assert_array_equal, first, jax.tree.map(np.asarray, gradient(arrays))
        )
