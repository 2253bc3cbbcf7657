"""The convolution kernels against the float64 oracle.

A CPU simulates the awkward cases; a GPU runs all cases.
"""

import jax
import jax.numpy as jnp
import pytest
from support.conv3x3 import inputs, op
from support.mosaic import kernels_of_this_machine
from support.parity import DTYPES, assert_parity, types_in_turn

from jaxunet.ops.conv3x3 import reference
from jaxunet.ops.conv3x3.cases import AWKWARD, CASES, Case
from pallas_kernels.conv3x3 import vjp


@pytest.fixture(autouse=True, scope='module')
def _kernels():
    with kernels_of_this_machine():
        yield


def check(case: Case, dtype: str, batch: int):
    assert_parity(op(vjp, case), op(reference, case), inputs(case, dtype, case.batch or batch))


@pytest.mark.parametrize(('case', 'dtype'), types_in_turn(AWKWARD))
def test_awkward_shapes(case, dtype):
    check(case, dtype, 2)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize(
    'case',
    [
        Case(64, 64, (3,), 64, norm=False),
        Case(64, 64, (64,), 3),
        Case(32, 32, (96, 32), 96, (3, 12), per_sample=True),
        Case(33, 35, (1,), 5, (5,), norm=False),
        Case(16, 16, (32,), 3, groups=8, batch=9),
    ],
    ids=lambda c: c.name,
)
def test_padded_channels(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('case', CASES[1:36:11], ids=lambda c: c.name)
def test_a_batch_of_32(case):
    """Training has more strips of pixels than multiprocessors."""
    check(case, 'bfloat16', 32)


@pytest.mark.gpu
def test_runs_are_identical():
    case = CASES[3]
    arrays = {
        name: jnp.asarray(value, kind)
        for name, (value, kind) in inputs(case, 'bfloat16', 4).items()
    }
    pull = jax.jit(
        lambda a: jax.vjp(lambda a: op(vjp, case)(**a), a)[1](
            jnp.ones((4, 64, 64, 64), jnp.bfloat16)
        )
    )
    first, second = pull(arrays), pull(arrays)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), first, second)))
