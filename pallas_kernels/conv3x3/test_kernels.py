"""The Hopper convolution and its weight gradient, simulated on the CPU with many tiles.

Rings neither deadlock nor overwrite what is still read, and results are those of `lax.conv`.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.mosaic import simulated
from support.parity import draw

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3 import reference
from jaxunet.ops.conv3x3.operands import Convolution
from pallas_kernels.conv3x3 import dispatch, hopper, schedule
from pallas_kernels.conv3x3 import hopper_weight_gradient as weights
from pallas_kernels.conv3x3.hopper_weight_gradient_plan import Tile as WeightTile
from pallas_kernels.conv3x3.schedule import Tile


@pytest.fixture(autouse=True, scope='module', params=['early', 'late'])
def _simulated(request):
    with simulated(late=request.param == 'late'):
        yield


@pytest.fixture(autouse=True)
def _two_programs(monkeypatch):
    """A program computes several tiles, one after the other."""
    monkeypatch.setattr(schedule, 'multiprocessors', lambda: 2)


def drawn(shape: tuple[int, ...], scale: float = 1.0, dtype: str = 'bfloat16') -> jax.Array:
    return jnp.asarray(draw(shape, dtype, scale=scale), dtype)


def assert_close(found: jax.Array, wanted: jax.Array, dtype: str) -> None:
    """Compares results of operands of `dtype`; float32 is three bfloat16 products, about 2⁻¹⁷."""
    share = 2**-15 if dtype == 'float32' else 2**-7
    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=share * np.abs(wanted).max())


def check(
    image: tuple[int, int, int],
    channels: tuple[int, ...],
    features: int,
    tile: Tile | None,
    *,
    residual: tuple[int, ...] = (),
    activated: bool = False,
    flipped: bool = False,
    dtype: str = 'bfloat16',
) -> None:
    """Compares one call with the reference."""
    total = sum(channels)
    parts = tuple(drawn((*image, c), dtype=dtype) for c in channels)
    kernel = drawn((3, 3, total, features), (9 * total) ** -0.5, dtype)
    shift = drawn((image[0], features), dtype='float32')
    added = tuple(drawn((*image, c), dtype=dtype) for c in residual)
    shortcut = None
    if residual and residual != (features,):
        shortcut = drawn((sum(residual), features), sum(residual) ** -0.5, dtype)
    conv = Convolution(
        image=Activation(parts),
        kernel=kernel,
        shift=shift,
        residual=Activation(added) if added else None,
        shortcut=shortcut,
    )
    x, affine = conv.image.value, None
    if activated:
        a, b = affine = tuple(drawn((image[0], total), dtype='float32') for _ in range(2))
        x = jax.nn.silu(a[:, None, None] * x.astype(jnp.float32) + b[:, None, None]).astype(dtype)
    wanted = reference.conv3x3(conv.of(x))
    if flipped:
        conv = dataclasses.replace(conv, kernel=dispatch.flip(kernel))
    found = hopper.forward(hopper.Call(conv, affine, flipped), tile)
    assert_close(found, wanted.value, dtype)


def named(tile: Tile) -> str:
    return f'{tile.groups}x{tile.slots}-{tile.taps}-{tile.ring}'


TILES = [
    *(
        Tile(8, 64, groups, slots, taps, ring)
        for groups in (1, 2, 3)
        for slots in (2, 3)
        for taps, ring in ((3, 2), (3, 4), (1, 2), (1, 5))
        if (groups, slots, taps, ring) != (3, 3, 3, 4)  # does not fit
    ),
    Tile(8, 64, 1, 2, 9, 2),
    *(Tile(8, 64, groups, slots, 9, 0) for groups in (1, 2) for slots in (2, 3)),
]


@pytest.mark.parametrize(
    'tile',
    [pytest.param(t, marks=pytest.mark.long if n % 3 else ()) for n, t in enumerate(TILES)],
    ids=named,
)
def test_every_ring(tile):
    """One step and several, with and without a residual's steps and activators."""
    for activated, (chunks, extras) in zip(
        itertools.cycle((False, True)), ((1, 0), (1, 1), (2, 1)), strict=False
    ):
        if tile.ring == 0 and chunks + extras > 2:
            continue  # resident weights do not fit
        check((5, 8, 8), (64 * chunks,), 64, tile, residual=(64,) * extras, activated=activated)


@pytest.mark.parametrize(
    ('image', 'channels', 'features', 'tile', 'options'),
    [
        ((2, 16, 16), (64,), 64, Tile(16, 64, taps=9, ring=0, transposed=True), {}),
        ((2, 16, 8), (64,), 72, Tile(16, 64, transposed=True), {'flipped': True}),
        ((1, 16, 8), (128, 64), 96, Tile(8, 96, taps=1, ring=4), {'residual': (96,)}),
        ((1, 16, 16), (64,), 64, Tile(8, 64, activators=2), {'activated': True}),
        ((1, 5, 20), (64,), 64, Tile(4, 64, transposed=True), {'residual': (64,)}),
        (
            (3, 9, 7),
            (64, 24),
            40,
            None,
            {'residual': (32, 8), 'dtype': 'float16', 'activated': True},
        ),
        ((2, 8, 8), (64,), 64, None, {'residual': (64,), 'dtype': 'float32', 'activated': True}),
    ],
    ids=str,
)
def test_shapes(image, channels, features, tile, options):
    check(image, channels, features, tile, **options)


@pytest.mark.parametrize(
    ('image', 'tile', 'dtype'),
    [
        ((2, 8, 8), WeightTile(8, 1, 1), 'bfloat16'),
        ((3, 9, 7), WeightTile(8, 2, 2), 'float16'),
        ((2, 20, 16), WeightTile(16, 2, 3, taps=3), 'bfloat16'),
        ((1, 8, 20), WeightTile(8, 2, 2), 'float32'),
    ],
    ids=str,
)
def test_weight_gradient(image, tile, dtype):
    parts = tuple(drawn((*image, c), dtype=dtype) for c in (64, 128))
    dy = drawn((*image, 64), dtype=dtype)

    def convolve(kernel: jax.Array) -> jax.Array:
        shift = jnp.zeros((1, 64), jnp.float32)
        x = Activation(tuple(part.astype(jnp.float32) for part in parts))
        return reference.conv3x3(Convolution(image=x, kernel=kernel, shift=shift)).value

    _, pull = jax.vjp(convolve, jnp.zeros((3, 3, 192, 64), jnp.float32))
    found = weights.weight_gradient(parts, dy, tile=tile)
    assert found.dtype == jnp.float32
    assert_close(found, pull(dy.astype(jnp.float32))[0], dtype)
