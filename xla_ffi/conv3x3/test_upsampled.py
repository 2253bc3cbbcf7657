"""The convolution of an upsampled image, by phases and composed, against the float64 oracle."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.parity import assert_parity, assert_runs_are_identical, draw

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3 import reference
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.runtime import device
from xla_ffi.conv3x3 import upsampled


class Case(NamedTuple):
    """One call: the sizes of the small image, and whether every sample has its own shift."""

    batch: int
    height: int
    width: int
    channels: int
    features: int
    per_sample: bool = False

    @property
    def name(self) -> str:
        """The case's name in tests."""
        return f'{self.height}x{self.width}_{self.channels}to{self.features}_b{self.batch}'


SMALL = (
    Case(3, 4, 4, 64, 128, per_sample=True),
    Case(2, 5, 7, 128, 64),
)
# Calls that convolve the upsampled image: channels that are not whole chunks, few rows, float32.
COMPOSED = (
    (Case(2, 4, 4, 72, 64), 'bfloat16'),
    (Case(2, 4, 5, 64, 24, per_sample=True), 'float16'),
    (Case(1, 3, 8, 64, 64), 'bfloat16'),
    (Case(1, 4, 4, 64, 64), 'float32'),
)
# The shapes of our networks, and sizes that are not multiples of a strip.
OF_NETWORKS = (
    Case(5, 4, 4, 256, 256, per_sample=True),
    Case(3, 8, 8, 256, 256, per_sample=True),
    Case(2, 16, 16, 256, 256),
    Case(3, 16, 16, 192, 192, per_sample=True),
    Case(2, 32, 32, 128, 128),
    Case(3, 32, 32, 64, 64, per_sample=True),
    Case(3, 12, 20, 64, 192, per_sample=True),
    Case(1, 9, 6, 192, 128),
    Case(7, 4, 13, 128, 64, per_sample=True),
    Case(40, 32, 32, 64, 64),  # draws its tiles from a counter, forward
)
# These batches reach every tile of kPhaseTiles (hopper/tile_choices_test.cc), forward or flipped.
TILES = (
    Case(17, 9, 13, 64, 64),
    Case(3, 9, 13, 64, 192),
    Case(1, 4, 4, 64, 64),
    Case(17, 6, 7, 64, 128, per_sample=True),
    Case(17, 6, 7, 64, 256),
    Case(37, 6, 7, 64, 192, per_sample=True),
    Case(7, 9, 13, 128, 192),
    Case(9, 9, 13, 64, 256, per_sample=True),
    Case(67, 4, 4, 64, 128, per_sample=True),
    Case(17, 4, 4, 64, 128, per_sample=True),
    Case(67, 9, 13, 64, 64),
    Case(17, 9, 13, 128, 64),
    Case(67, 6, 7, 128, 64),
    Case(67, 6, 7, 256, 64),
    Case(59, 9, 13, 192, 64),
    Case(17, 12, 20, 192, 64),
    Case(59, 9, 13, 256, 64),
    Case(67, 4, 4, 128, 64),
    Case(259, 4, 4, 256, 64),
)


def op(module):
    def call(x, kernel, shift):
        conv = Convolution(image=Activation.of(x), kernel=kernel, shift=shift)
        return module.upsample_conv3x3(conv).value

    return call


BY_PHASES, REFERENCE = op(upsampled), op(reference)


def inputs(case: Case, dtype: str):
    batch, height, width, channels, features, per_sample = case
    return {
        'x': (draw((batch, height, width, channels), dtype), dtype),
        'kernel': (draw((3, 3, channels, features), dtype, scale=(9 * channels) ** -0.5), dtype),
        'shift': (draw((batch if per_sample else 1, features), 'float32'), 'float32'),
    }


def handlers(case: Case, dtype: str) -> str:
    """Returns the lowered program of a call and its gradients."""
    shapes = {
        name: jax.ShapeDtypeStruct(value.shape, kind)
        for name, (value, kind) in inputs(case, dtype).items()
    }

    def loss(arrays):
        return jnp.sum(BY_PHASES(**arrays).astype(jnp.float32))

    return jax.jit(jax.grad(loss)).lower(shapes).as_text()


@pytest.mark.extension
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('case', SMALL, ids=lambda c: c.name)
def test_by_phases(case, dtype):
    assert ('jaxunet_conv3x3_upsampled' in handlers(case, dtype)) == (not device.portable())
    assert_parity(BY_PHASES, REFERENCE, inputs(case, dtype))


@pytest.mark.extension
@pytest.mark.parametrize(('case', 'dtype'), COMPOSED, ids=lambda c: getattr(c, 'name', c))
def test_other_calls_convolve_the_upsampled_image(case, dtype):
    assert 'jaxunet_conv3x3_upsampled' not in handlers(case, dtype)
    assert_parity(BY_PHASES, REFERENCE, inputs(case, dtype))


@pytest.mark.parametrize('kernels', ['portable', 'ada'])
def test_portable_kernels_convolve_the_upsampled_image(kernels, monkeypatch):
    monkeypatch.setenv(device.VARIABLE, kernels)
    assert not upsampled.supports(jnp.zeros((1, 8, 8, 64), jnp.bfloat16), 64)


def test_taps_are_sums_of_the_rows_and_columns_that_meet_the_same_pixel():
    kernel = np.random.default_rng(0).standard_normal((3, 3, 2, 3)).astype(np.float32)
    taps = np.asarray(upsampled.phase_kernels(jnp.asarray(kernel)))
    rows = ((slice(0, 1), slice(1, 3)), (slice(0, 2), slice(2, 3)))
    for a, b, u, v in np.ndindex(2, 2, 2, 2):
        want = kernel[rows[a][u], rows[b][v]].sum((0, 1))
        np.testing.assert_allclose(taps[a, b, u, v], want, rtol=1e-6)


@pytest.mark.extension
def test_a_mapped_call_is_one_launch():
    case = Case(6, 4, 4, 64, 64, per_sample=True)
    arrays = {name: jnp.asarray(v, t) for name, (v, t) in inputs(case, 'bfloat16').items()}
    split = arrays | {n: arrays[n].reshape(3, 2, *arrays[n].shape[1:]) for n in ('x', 'shift')}
    axes = {'x': 0, 'kernel': None, 'shift': 0}
    mapped = jax.jit(jax.vmap(lambda a: BY_PHASES(**a), in_axes=(axes,)))
    lowered = mapped.lower(split)
    assert 'stablehlo.while' not in lowered.as_text()
    got, want = lowered.compile()(split), jax.jit(lambda a: BY_PHASES(**a))(arrays)
    np.testing.assert_array_equal(got.reshape(want.shape), want)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('case', OF_NETWORKS + TILES, ids=lambda c: c.name)
def test_every_tile(case, dtype):
    assert_parity(BY_PHASES, REFERENCE, inputs(case, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize('case', [Case(32, 16, 16, 192, 192), Case(64, 4, 4, 256, 256)],
                         ids=lambda c: c.name)  # fmt: skip
def test_runs_are_identical(case):
    assert_runs_are_identical(BY_PHASES, inputs(case, 'bfloat16'))
