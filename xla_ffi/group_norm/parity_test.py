"""The GroupNorm handlers against the float64 oracle: those of the CPU (awkward cases), those of the GPU (all cases)."""

import pytest
from parity import DTYPES, assert_parity

from pallas_kernels.group_norm import reference
from pallas_kernels.group_norm.cases import AWKWARD, CASES, Case
from pallas_kernels.group_norm.parity_test import inputs, op
from xla_ffi.group_norm import vjp


def check(case: Case, dtype: str, batch: int):
    if case.mean and dtype != 'float32':
        pytest.skip('such a mean leaves no deviations in 16 bits')
    assert_parity(op(vjp.group_norm, case), op(reference.group_norm, case), inputs(case, dtype, case.batch or batch))


@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', AWKWARD, ids=lambda c: c.name)
def test_awkward_shapes(case, dtype):
    check(case, dtype, 2)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)
