"""The GroupNorm kernels against the float64 oracle.

A CPU interprets the awkward cases on the Triton kernels. A GPU runs all cases; Hopper runs 16-bit
cases on its own kernels if they support the shape, in these tests even for small images.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.group_norm import inputs, op
from support.parity import DTYPES, assert_parity, types_in_turn
from support.triton import only_hopper

from jaxunet.ops.group_norm import reference
from jaxunet.ops.group_norm.cases import AWKWARD, CASES, ELEPHANTS64, Case
from jaxunet.runtime.device import Target, use
from pallas_kernels.group_norm import dispatch, vjp

# JAX warns at every lowering that it will drop its Triton backend.
pytestmark = pytest.mark.filterwarnings(
    'ignore:The Pallas Triton backend is deprecated:DeprecationWarning'
)


# Special cases of the Hopper kernels: pixels that two register tiles share, more groups than a warp
# has lanes, a mean far from zero.
FOR_HOPPER = (
    Case(9, 7, (96, 32), groups=8, per_sample=True),
    Case(28, 28, (64, 128), groups=64),
    Case(64, 64, (64,), mean=1000.0),
)


@pytest.fixture
def small_images(monkeypatch):
    """Runs Hopper's kernels for images of any size."""
    monkeypatch.setattr(dispatch, 'HOPPER_PIXELS', 0)


@pytest.fixture
def without_triton():
    """Makes the Hopper kernels take the calls that otherwise go to Triton."""
    with only_hopper():
        yield


def check(case: Case, dtype: str, batch: int = 2):
    interpret = jax.default_backend() != 'gpu'
    if case.mean and dtype != 'float32':
        pytest.skip('such a mean leaves no deviations in 16 bits')
    values = inputs(case, dtype, case.batch or batch)
    assert_parity(
        op(vjp.group_norm, case, interpret=interpret), op(reference.group_norm, case), values
    )


@pytest.mark.parametrize(('case', 'dtype'), types_in_turn(AWKWARD, (*DTYPES, 'float16')))
def test_awkward_shapes(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize(
    'case',
    [pytest.param(c, marks=pytest.mark.long if i % 3 else ()) for i, c in enumerate(AWKWARD)],
    ids=lambda c: c.name,
)
def test_awkward_shapes_in_two_passes(case, monkeypatch):
    """Images that are too large for one program, and small batches, take two passes."""
    monkeypatch.setattr(vjp, 'owns_pixels', lambda *_: False)
    check(case, 'float32')


@pytest.mark.gpu
@pytest.mark.usefixtures('small_images')
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_every_case(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(
    'case',
    [Case(96, 80, (64, 32)), Case(64, 64, (64,), mean=1000.0), *ELEPHANTS64[2:9:3]],
    ids=lambda c: c.name,
)
def test_cases_in_two_passes(case, dtype, monkeypatch):
    monkeypatch.setattr(vjp, 'owns_pixels', lambda *_: False)
    with use(Target.TRITON):
        check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.parametrize('case', ELEPHANTS64[::4], ids=lambda c: c.name)
def test_cases_on_triton(case):
    """Runs the kernels of other GPUs on Hopper, too."""
    with use(Target.TRITON):
        check(case, 'bfloat16', 3)


@pytest.mark.gpu
@pytest.mark.usefixtures('small_images')
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', FOR_HOPPER, ids=lambda c: c.name)
def test_cases_for_hopper(case, dtype):
    check(case, dtype, 3)


@pytest.mark.gpu
@pytest.mark.usefixtures('without_triton')
@pytest.mark.parametrize('case', FOR_HOPPER + ELEPHANTS64[::3], ids=lambda c: c.name)
def test_float32_on_hopper_without_triton(case):
    check(case, 'float32', 3)


@pytest.mark.gpu
@pytest.mark.usefixtures('small_images')
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
