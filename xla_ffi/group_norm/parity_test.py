"""The GroupNorm handlers against the float64 oracle.

The CPU's handlers run the awkward cases; the GPU's run all cases.
"""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.group_norm import inputs, op
from support.parity import DTYPES, assert_parity, assert_runs_are_identical, types_in_turn

from jaxunet.ops.activation import Activation
from jaxunet.ops.backends import XLA
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


@pytest.mark.parametrize(('case', 'dtype'), types_in_turn(AWKWARD, (*DTYPES, 'float16')))
def test_awkward_shapes(case, dtype):
    check(case, dtype, 2)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)


def check_copies(case: Case, dtype: str, copies: int):
    """The gradients of the copies, random cotangents, are added to x's own."""
    ops = (
        op(group_norm, case, copies=copies)
        for group_norm in (vjp.group_norm_and_input, XLA.group_norm_and_input)
    )
    assert_parity(*ops, inputs(case, dtype, case.batch or 3))


@pytest.mark.parametrize('copies', [1, 2])
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', [AWKWARD[2], AWKWARD[3]], ids=lambda c: c.name)
def test_gradients_of_other_readers_are_added(case, dtype, copies):
    check_copies(case, dtype, copies)


FLOWS = (  # large enough, and enough of them, to take two kernels
    Case(64, 64, (64,), batch=16),
    Case(33, 35, (128, 64), batch=13, silu=False),
    Case(57, 57, (33, 30), groups=9, batch=16),
    Case(34, 33, (256, 192), batch=15, per_sample=True),
    Case(48, 45, (96,), batch=16, mean=1000.0),
)
# More pixels than the shared memory of a cluster holds.
LONG = Case(61, 41, (128, 64), groups=1, batch=2)
# Backward: one block fills the shared memory; a cluster shares an odd number of pixels.
RESIDENT = (Case(32, 31, (64, 64), batch=40), Case(31, 33, (192,), batch=2, per_sample=True))


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', [*FLOWS, LONG, *RESIDENT], ids=lambda c: c.name)
def test_large_images(case, dtype):
    check(case, dtype, case.batch)


@pytest.mark.gpu
@pytest.mark.parametrize('copies', [1, 2])
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', [*FLOWS[:4], LONG, *RESIDENT, *CASES[::3]], ids=lambda c: c.name)
def test_gradients_of_other_readers_are_added_by_every_kernel(case, dtype, copies):
    check_copies(case, dtype, copies)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', ELEPHANTS64[::4], ids=lambda c: c.name)
def test_runs_are_identical(case, dtype):
    assert_runs_are_identical(op(vjp.group_norm, case), inputs(case, dtype, 32))


@pytest.mark.gpu
def test_threads_launch_one_kernel_with_different_shared_memory():
    """A launch never finds a limit that another thread has set lower since."""

    def run(side):
        x = jax.random.normal(jax.random.key(side), (2, side, side, 64), jnp.bfloat16)
        row = jnp.ones((1, 64))
        op = jax.jit(lambda x: vjp.group_norm(Activation.of(x), row, row, groups=8))
        first = op(x)
        return all(bool(jnp.array_equal(op(x), first)) for _ in range(500))

    with concurrent.futures.ThreadPoolExecutor() as threads:
        assert all(threads.map(run, [4, 8, 16, 32] * 2))


@pytest.mark.parametrize('case', AWKWARD[:4], ids=lambda c: c.name)
def test_the_backward_pass_writes_the_activation_again(case):
    """The same numbers as forward, to a rounding or two: both compute in float32 or more."""
    drawn = {
        name: jnp.asarray(value, dtype)
        for name, (value, dtype) in inputs(case, 'float32', case.batch or 2).items()
    }
    parts = tuple(value for name, value in drawn.items() if name.startswith('x'))
    x, scale, offset = Activation(parts), drawn['scale'], drawn['offset']
    y = vjp.group_norm(x, scale, offset, groups=case.groups, silu=case.silu)
    norm = vjp.statistics(x, scale, offset, groups=case.groups, eps=1e-5)
    options = {'groups': case.groups, 'silu': case.silu}
    found = vjp.gradient(
        parts, jnp.ones_like(y), scale, offset, norm.mean, norm.inverse, activation=True, **options
    )
    (active,) = found.active
    np.testing.assert_allclose(active, y, rtol=0, atol=4e-7 * float(jnp.max(jnp.abs(y))))
    plain = vjp.gradient(parts, jnp.ones_like(y), scale, offset, norm.mean, norm.inverse, **options)
    assert plain.active == ()
    for a, b in zip((*found.dx, *found.norm), (*plain.dx, *plain.norm), strict=True):
        np.testing.assert_array_equal(a, b)


def test_there_are_at_most_two_copies():
    x, row = Activation.of(jnp.ones((1, 2, 2, 8))), jnp.ones((1, 8))
    for variant in (vjp.group_norm_and_input, XLA.group_norm_and_input):
        assert len(variant(x, row, row, groups=4, copies=2).copies) == 2
        for copies in (0, 3):
            with pytest.raises(
                ValueError, match=f'group_norm_and_input: copies={copies}; expected 1 to 2'
            ):
                variant(x, row, row, groups=4, copies=copies)
