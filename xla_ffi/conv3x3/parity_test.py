"""The convolution handlers against the float64 oracle: those of the CPU (awkward cases), those of the GPU (all cases)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import DTYPES, assert_parity_in_some_draw, assert_runs_are_identical

from pallas_kernels.conv3x3 import reference
from pallas_kernels.conv3x3.cases import AWKWARD, CASES, Case
from pallas_kernels.conv3x3.parity_test import inputs, op
from pallas_kernels.features import Features
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


def tile_moments(y: np.ndarray) -> np.ndarray:
    """Mean and mean squared deviation of every tile of 8 × 8 pixels of (batch, height, width, features), in float64."""
    rows = [y[:, top : top + 8, left : left + 8] for top in range(0, y.shape[1], 8) for left in range(0, y.shape[2], 8)]
    return np.stack([np.stack([tile.mean(axis=(1, 2)), tile.var(axis=(1, 2))], axis=-1) for tile in rows], axis=1)


def check_moments(case: Case, dtype: str, batch: int):
    """Those that a convolution hands out are those of what it stored, but for float32 sums; twice the same bits."""
    drawn = {name: jnp.asarray(value, kind) for name, (value, kind) in inputs(case, dtype, batch).items()}

    @jax.jit
    def run(arrays: dict[str, jax.Array]) -> Features:
        found = []

        def keep(name: str):
            def call(*operands, **options):
                found.append(getattr(vjp, name)(*operands, **options, moments=True))
                return found[0]

            return call

        op(type('Kept', (), {name: staticmethod(keep(name)) for name in ('conv3x3', 'norm_silu_conv3x3')}), case)(**arrays)
        return found[0]

    out, again = run(drawn), run(drawn)
    (moments,) = out.moments
    if not vjp.hands_out_moments(out.parts[0], case.features):
        assert moments is None
        return
    want = tile_moments(np.asarray(out.value.astype(jnp.float32), np.float64))
    got = np.asarray(moments, np.float64)
    assert got.shape == want.shape
    deviation = np.sqrt(want[..., 1])
    assert np.all(np.abs(got[..., 0] - want[..., 0]) <= 5e-6 * (np.abs(want[..., 0]) + deviation))
    assert np.all(np.abs(got[..., 1] - want[..., 1]) <= 3e-5 * want[..., 1] + 1e-12)
    np.testing.assert_array_equal(moments, again.moments[0])


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
@pytest.mark.parametrize('case', AWKWARD, ids=lambda c: c.name)
def test_moments_of_awkward_shapes(case, dtype, monkeypatch):
    monkeypatch.setattr(vjp, 'FUSED_PIXELS', 0)
    check_moments(case, dtype, 2)


LARGE = (  # tiles of the product one way and the other, edges within a tile, strips of two samples in a block
    *(case for case in CASES if case.height * case.width >= vjp.FUSED_PIXELS),
    Case(35, 43, (64,), 64, (64,)),
    Case(33, 60, (64, 40), 72, (64, 8), groups=8),
    Case(32, 32, (192,), 128, norm=False),
    Case(35, 37, (64,), 192, (192,), norm=False),
    Case(40, 33, (128,), 256, (64, 64), norm=False),
    Case(37, 64, (3,), 64, norm=False),
    Case(41, 34, (20,), 72, norm=False),
)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('case', LARGE, ids=lambda c: c.name)
def test_moments(case, dtype):
    check_moments(case, dtype, 3)
