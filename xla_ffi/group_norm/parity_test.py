"""The GroupNorm handlers against the float64 oracle: those of the CPU (awkward cases), those of the GPU (all cases)."""

import jax.numpy as jnp
import numpy as np
import pytest
from parity import DTYPES, assert_parity, assert_runs_are_identical
from support.group_norm import inputs, op

from jaxunet.ops.activation import Activation, passing
from jaxunet.ops.group_norm import reference
from jaxunet.ops.group_norm.cases import AWKWARD, CASES, ELEPHANTS64, Case
from xla_ffi.group_norm import vjp


def check(case: Case, dtype: str, batch: int):
    if case.mean and dtype != 'float32':
        pytest.skip('such a mean leaves no deviations in 16 bits')
    assert_parity(
        op(vjp.group_norm, case),
        op(reference.group_norm, case),
        inputs(case, dtype, case.batch or batch),
    )


@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', AWKWARD, ids=lambda c: c.name)
def test_awkward_shapes(case, dtype):
    check(case, dtype, 2)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)


def check_passing(case: Case, dtype: str, times: int):
    """The gradients that x has besides, of random cotangents, are added to its own."""
    ops = (
        op(group_norm, case, passing=times)
        for group_norm in (vjp.group_norm, passing(reference.group_norm))
    )
    assert_parity(*ops, inputs(case, dtype, case.batch or 3))


@pytest.mark.parametrize('times', [1, 2])
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', [AWKWARD[2], AWKWARD[3]], ids=lambda c: c.name)
def test_gradients_of_other_readers_are_added(case, dtype, times):
    check_passing(case, dtype, times)


FLOWS = (  # large enough, and enough of them, to take two kernels
    Case(64, 64, (64,), batch=16),
    Case(33, 35, (128, 64), batch=13, silu=False),
    Case(57, 57, (33, 30), groups=9, batch=16),
    Case(22, 21, (256, 192), batch=15, per_sample=True),
    Case(48, 45, (96,), batch=16, mean=1000.0),
)
LONG = Case(
    61, 41, (128, 64), groups=1, batch=2
)  # more pixels than the shared memory of a cluster holds


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', [*FLOWS, LONG], ids=lambda c: c.name)
def test_large_images(case, dtype):
    check(case, dtype, case.batch)


@pytest.mark.gpu
@pytest.mark.parametrize('times', [1, 2])
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', [*FLOWS[:4], LONG, *CASES[::3]], ids=lambda c: c.name)
def test_gradients_of_other_readers_are_added_by_every_kernel(case, dtype, times):
    check_passing(case, dtype, times)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', ELEPHANTS64[::4], ids=lambda c: c.name)
def test_runs_are_identical(case, dtype):
    assert_runs_are_identical(op(vjp.group_norm, case), inputs(case, dtype, 32))


@pytest.mark.parametrize('case', AWKWARD[:4], ids=lambda c: c.name)
def test_the_backward_pass_writes_the_activation_again(case):
    """The same numbers as forward, to a rounding or two: both compute in float32 or more."""
    drawn = {
        name: jnp.asarray(value, dtype)
        for name, (value, dtype) in inputs(case, 'float32', case.batch or 2).items()
    }
    parts = tuple(value for name, value in drawn.items() if name.startswith('x'))
    x, scale, offset = Activation(parts, (None,) * len(parts)), drawn['scale'], drawn['offset']
    y = vjp.group_norm(x, scale, offset, groups=case.groups, silu=case.silu)
    norm = vjp.statistics(x, scale, offset, groups=case.groups, eps=1e-5)
    options = {'groups': case.groups, 'silu': case.silu}
    found = vjp.gradient(
        parts, jnp.ones_like(y), scale, offset, norm.mean, norm.inverse, activation=True, **options
    )
    np.testing.assert_allclose(found.active, y, rtol=0, atol=4e-7 * float(jnp.max(jnp.abs(y))))
    plain = vjp.gradient(parts, jnp.ones_like(y), scale, offset, norm.mean, norm.inverse, **options)
    assert plain.active is None
    for a, b in zip(
        (*found.dx, found.scale, found.offset), (*plain.dx, plain.scale, plain.offset), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_x_is_passed_on_at_most_twice():
    x, row = Activation.of(jnp.ones((1, 2, 2, 8)), jnp.ones((1, 8, 2))), jnp.ones((1, 8))
    assert [
        again.moments[0] is x.moments[0]
        for again in vjp.group_norm(x, row, row, groups=4, passing=2)[1:]
    ] == [True, True]
    with pytest.raises(ValueError, match='group_norm: passing=3; expected 0 to 2'):
        vjp.group_norm(x, row, row, groups=4, passing=3)
