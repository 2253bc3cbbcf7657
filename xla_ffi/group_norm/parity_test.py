"""The GroupNorm handlers against the float64 oracle: those of the CPU (awkward cases), those of the GPU (all cases)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import DTYPES, assert_parity, assert_runs_are_identical

from pallas_kernels.features import Features, channel_moments
from pallas_kernels.group_norm import reference
from pallas_kernels.group_norm.cases import AWKWARD, CASES, ELEPHANTS64, Case
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


FLOWS = (  # large enough, and enough of them, to take two kernels
    Case(64, 64, (64,), batch=16),
    Case(33, 35, (128, 64), batch=13, silu=False),
    Case(57, 57, (33, 30), groups=9, batch=16),
    Case(22, 21, (256, 192), batch=15, per_sample=True),
    Case(48, 45, (96,), batch=16, mean=1000.0),
)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [*DTYPES, 'float16'])
@pytest.mark.parametrize('case', FLOWS, ids=lambda c: c.name)
def test_large_images(case, dtype):
    check(case, dtype, case.batch)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('case', ELEPHANTS64[::4], ids=lambda c: c.name)
def test_runs_are_identical(case, dtype):
    assert_runs_are_identical(op(vjp.group_norm, case), inputs(case, dtype, 32))


@pytest.mark.parametrize('case', AWKWARD[:4], ids=lambda c: c.name)
def test_the_backward_pass_writes_the_activation_again(case):
    """The same numbers as forward, to a rounding or two: both compute in float32 or more."""
    drawn = {name: jnp.asarray(value, dtype) for name, (value, dtype) in inputs(case, 'float32', case.batch or 2).items()}
    parts = tuple(value for name, value in drawn.items() if name.startswith('x'))
    x, scale, offset = Features(parts, (None,) * len(parts)), drawn['scale'], drawn['offset']
    y = vjp.group_norm(x, scale, offset, groups=case.groups, silu=case.silu)
    norm = vjp.statistics(x, scale, offset, groups=case.groups, eps=1e-5)
    options = {'groups': case.groups, 'silu': case.silu}
    found = vjp.gradient(parts, jnp.ones_like(y), scale, offset, norm.mean, norm.inverse, activation=True, **options)
    np.testing.assert_allclose(found.active, y, rtol=0, atol=4e-7 * float(jnp.max(jnp.abs(y))))
    plain = vjp.gradient(parts, jnp.ones_like(y), scale, offset, norm.mean, norm.inverse, **options)
    assert plain.active is None
    for a, b in zip((*found.dx, found.scale, found.offset), (*plain.dx, plain.scale, plain.offset), strict=True):
        np.testing.assert_array_equal(a, b)


def by_tiles(x: np.ndarray) -> jnp.ndarray:
    """Mean and mean squared deviation of every tile of 8 × 8 pixels, as convolutions hand them out."""
    tiles = [x[:, top : top + 8, left : left + 8] for top in range(0, x.shape[1], 8) for left in range(0, x.shape[2], 8)]
    return jnp.asarray(np.stack([np.stack([t.mean(axis=(1, 2)), t.var(axis=(1, 2))], axis=-1) for t in tiles], axis=1), jnp.float32)


def check_combine(case: Case, batch: int):
    """Statistics from moments, of tiles and of whole images, against the oracle's; twice the same bits."""
    exact = {name: value for name, (value, _) in inputs(case, 'float32', batch).items()}
    parts = [value for name, value in exact.items() if name.startswith('x')]
    scale, offset = (jnp.asarray(exact[name], jnp.float32) for name in ('scale', 'offset'))
    cpu = jax.local_devices(backend='cpu')[0]
    with jax.enable_x64(True), jax.default_device(cpu):
        known = jnp.concatenate([channel_moments(jnp.asarray(p)) for p in parts], axis=1)
        affine = (jnp.asarray(exact['scale']), jnp.asarray(exact['offset']))
        want = [np.asarray(w) for w in reference.combine(known, *affine, groups=case.groups, eps=1e-5)]
    tiled = [by_tiles(p) for p in parts]
    whole = [jnp.asarray(np.stack([p.mean(axis=(1, 2)), p.var(axis=(1, 2))], axis=-1), jnp.float32) for p in parts]
    images = tuple(jnp.asarray(p, jnp.float32) for p in parts)
    for moments in (tiled, whole, [*whole[:1], *tiled[1:]]):
        run = jax.jit(functools.partial(vjp.statistics, groups=case.groups, eps=1e-5))
        found = run(Features(images, tuple(moments)), scale, offset)
        # The mean of a group is as exact as its size allows; b is a difference of numbers of that size.
        size = max(case.mean, 1.0)
        for got, exactly, name in zip(found, want, ('a', 'b', 'mean', 'inverse'), strict=True):
            far = 1e-5 * (size if name in ('b', 'mean') else 1) * np.max(np.abs(want[0] if name == 'b' else exactly))
            np.testing.assert_allclose(got, exactly, rtol=0, atol=max(far, 1e-5), err_msg=name)
        for got, again in zip(found, run(Features(images, tuple(moments)), scale, offset), strict=True):
            np.testing.assert_array_equal(got, again)


@pytest.mark.parametrize('case', AWKWARD, ids=lambda c: c.name)
def test_statistics_of_moments(case):
    check_combine(case, case.batch or 2)


@pytest.mark.gpu
@pytest.mark.parametrize('case', [*CASES, Case(40, 33, (300, 300), groups=2), Case(16, 16, (1200,), groups=1)], ids=lambda c: c.name)
def test_statistics_of_moments_in_every_case(case):
    check_combine(case, case.batch or 3)


@pytest.mark.parametrize('shape', [(2, 16, 2), (2, 5, 8, 2), (1, 6, 8, 2), (2, 6, 8)])
def test_moments_of_another_shape_are_refused(shape):
    x = Features.of(jnp.zeros((2, 9, 17, 8)), jnp.zeros(shape))
    with pytest.raises(ValueError, match=r'x\.moments\[0\]: shape .* expected \[2, 8, 2\] or \[2, 6, 8, 2\]'):
        vjp.group_norm(x, jnp.ones((1, 8)), jnp.zeros((1, 8)), groups=4)
