"""The convolution handlers against the float64 oracle: those of the CPU (awkward cases), those of the GPU (all cases)."""

import pytest
from parity import DTYPES, assert_parity_in_some_draw, assert_runs_are_identical

from pallas_kernels.conv3x3 import reference
from pallas_kernels.conv3x3.cases import AWKWARD, CASES, Case
from pallas_kernels.conv3x3.parity_test import inputs, op
from xla_ffi.conv3x3 import vjp


def check(case: Case, dtype: str, batch: int):
    """In some draw: through the norm of a small group, a single element's rounding to 16 bits can be the largest error of a gradient."""
    assert_parity_in_some_draw(op(vjp, case), op(reference, case), lambda: inputs(case, dtype, case.batch or batch))


@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', AWKWARD, ids=lambda c: c.name)
def test_awkward_shapes(case, dtype):
    check(case, dtype, 2)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('case', [c for c in AWKWARD if c.norm and all(n % 8 == 0 for n in c.parts)], ids=lambda c: c.name)
def test_activation_inside_the_convolution(case, dtype, monkeypatch):
    monkeypatch.setattr(vjp, 'FUSED_PIXELS', 0)
    check(case, dtype, 2)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', CASES[:36:7], ids=lambda c: c.name)
def test_runs_are_identical(case, dtype):
    """With more pixels than one block sums, as in training."""
    assert_runs_are_identical(op(vjp, case), inputs(case, dtype, 32))
