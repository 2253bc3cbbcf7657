"""The Hopper weight gradient: its index arithmetic against NumPy, its lowering for CUDA, the
operands that it rejects, and on a GPU its values.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.parity import assert_parity, draw

from jaxunet.ops.activation import at_least_float32
from pallas_kernels.conv3x3 import hopper_weight_gradient as hopper
from pallas_kernels.conv3x3.hopper_weight_gradient import (
    SplitKGrid,
    Tile,
    candidates,
    default_tile,
    supports,
    weight_gradient,
)

# Batch, height, width; channels of the parts; output channels; tile.
CALLS = {
    'one part': ((2, 64, 64), (64,), 64, 'bfloat16', Tile(16, 5, 7)),
    'two parts': ((2, 32, 32), (192, 128), 128, 'bfloat16', None),
    'small image': ((4, 8, 8), (128,), 64, 'float16', Tile(8, 8, 3)),
    'one split': ((1, 8, 8), (64,), 128, 'bfloat16', Tile(8, 2, 1)),
    'odd image': ((3, 9, 21), (64, 64), 64, 'bfloat16', None),
    'tall strips': ((1, 40, 8), (64,), 64, 'float16', Tile(24, 2, 2)),
    'a row of taps': ((3, 12, 20), (64, 128), 128, 'bfloat16', Tile(8, 8, 5, 3)),
    'a row of taps, tall': ((2, 20, 9), (64,), 64, 'float32', Tile(16, 2, 3, 3)),
    'float32': ((2, 12, 20), (64, 128), 64, 'float32', None),
}
BFLOAT16 = jnp.dtype(jnp.bfloat16)


def shapes(
    image: tuple[int, ...], channels: tuple[int, ...], features: int, dtype: str
) -> tuple[tuple, jax.ShapeDtypeStruct]:
    return tuple(jax.ShapeDtypeStruct((*image, c), dtype) for c in channels), jax.ShapeDtypeStruct(
        (*image, features), dtype
    )


def reference(x: jax.Array, dy: jax.Array) -> jax.Array:
    """Returns XLA's gradient of the kernel, computed in the operands' type, as float32."""

    def conv(kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=('NHWC', 'HWIO', 'NHWC')
        )

    kernel = jnp.zeros((3, 3, x.shape[-1], dy.shape[-1]), x.dtype)
    (gradient,) = jax.vjp(conv, kernel)[1](dy)
    return gradient.astype(at_least_float32(x.dtype))


def box(image: np.ndarray, row: int, column: int, height: int, width: int) -> np.ndarray:
    """Returns the window (rows, columns, channels) that TMA copies, zero outside the image."""
    padded = np.pad(image, ((1, height), (1, width), (0, 0)))
    return padded[row + 1 : row + 1 + height, column + 1 : column + 1 + width]


def emulate(grid: SplitKGrid, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Returns the partial sums of every CTA, computed with the kernel's own index arithmetic."""
    rows, columns, block = grid.tile.rows, hopper.STRIP + 2, hopper.BLOCK
    out = np.full((grid.tile.splits, 9, x.shape[-1], dy.shape[-1]), np.nan)
    for cta in range(grid.tiles * grid.tile.splits):
        split, c, f, tap_row = grid.cta(cta)
        first, count = grid.share(split)
        taps = grid.tile.taps // 3
        totals = np.zeros((hopper.TAP_ROWS, block, taps * block))
        for strip in range(first, first + count):
            sample, row, column = grid.strip_origin(strip)
            slot = np.zeros((grid.box_rows, columns, block))
            slot[: grid.x_rows] = box(
                x[sample, :, :, c : c + block],
                grid.first_row(row, tap_row),
                column - 1,
                grid.x_rows,
                columns,
            )
            left = box(dy[sample, :, :, f : f + block], row, column, rows, hopper.STRIP).reshape(
                -1, block
            )
            for warpgroup in range(hopper.TAP_ROWS):
                box_row, box_column, _ = grid.of_warpgroup(warpgroup, tap_row)
                strides = [8 * s for s in hopper.inline.tap_strides(columns, block)]
                right = np.lib.stride_tricks.as_strided(
                    slot[box_row:, box_column:], (rows, taps, 8, block), strides, writeable=False
                )
                totals[warpgroup] += left.T @ right.transpose(0, 2, 1, 3).reshape(-1, taps * block)
        for warpgroup in range(hopper.TAP_ROWS):
            for tap in range(taps):
                target = out[
                    split,
                    grid.of_warpgroup(warpgroup, tap_row)[2] + tap,
                    c : c + block,
                    f : f + block,
                ]
                assert np.isnan(target).all(), 'two CTAs write the same sums'
                target[...] = totals[warpgroup][:, tap * block : (tap + 1) * block].T
    return out


@pytest.mark.parametrize('name', [name for name in CALLS if name not in ('one part', 'two parts')])
def test_index_arithmetic(name: str) -> None:
    image, channels, features, dtype, tile = CALLS[name]
    rng = np.random.default_rng(0)
    x, dy = (
        rng.integers(-3, 4, (*image, sum(channels))).astype(float),
        rng.integers(-3, 4, (*image, features)).astype(float),
    )
    parts = shapes(image, channels, features, dtype)
    grid = SplitKGrid.of(*parts, tile or default_tile(*parts))
    _, height, width = image
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    want = [
        np.tensordot(padded[:, i : i + height, j : j + width], dy, ((0, 1, 2), (0, 1, 2)))
        for i in range(3)
        for j in range(3)
    ]
    np.testing.assert_array_equal(emulate(grid, x, dy).sum(axis=0), np.stack(want))


@pytest.mark.parametrize('splits', [1, 3, 7, 128])
def test_splits_share_the_strips_evenly(splits: int) -> None:
    grid = SplitKGrid.of(*shapes((32, 16, 16), (64,), 64, 'bfloat16'), Tile(8, 8, splits))
    shares = [grid.share(split) for split in range(splits)]
    assert [strip for first, count in shares for strip in range(first, first + count)] == list(
        range(grid.strips)
    )
    assert max(count for _, count in shares) - min(count for _, count in shares) <= 1


def test_traced_arithmetic_is_the_same() -> None:
    grid = SplitKGrid.of(*shapes((3, 20, 12), (64, 128), 128, 'bfloat16'), Tile(8, 8, 5))
    for method, count in (
        (grid.cta, grid.tiles * 5),
        (grid.share, 5),
        (grid.strip_origin, grid.strips),
    ):
        traced = jax.vmap(method)(jnp.arange(count, dtype=jnp.int32))
        np.testing.assert_array_equal(np.stack(traced, axis=1), [method(i) for i in range(count)])


@pytest.mark.parametrize('x64', [False, True])
@pytest.mark.parametrize('name', CALLS)
def test_lowers_to_one_kernel(name: str, x64: bool) -> None:
    image, channels, features, dtype, tile = CALLS[name]
    with jax.enable_x64(x64):
        call = jax.jit(functools.partial(weight_gradient, tile=tile))
        exported = jax.export.export(call, platforms=['cuda'])(
            *shapes(image, channels, features, dtype)
        )
    (out,) = exported.out_avals
    assert (out.shape, out.dtype) == ((3, 3, sum(channels), features), jnp.float32)
    calls = [
        line for line in exported.mlir_module().splitlines() if 'custom_call @mosaic_gpu' in line
    ]
    assert len(calls) == 1
    assert hopper.NAME in calls[0]


def test_parts_are_not_joined() -> None:
    text = str(jax.make_jaxpr(weight_gradient)(*shapes((2, 32, 32), (192, 128), 128, 'bfloat16')))
    assert 'concatenate' not in text
    assert 'dynamic_slice' not in text


def test_float32_is_split_into_two_bfloat16() -> None:
    x = jnp.asarray(draw((2, 3, 5, 7), 'float32'), jnp.float32)
    high, low = jnp.split(jax.jit(hopper.split_float32)(x), 2)
    assert high.dtype == low.dtype == BFLOAT16
    both = np.asarray(high, np.float64) + np.asarray(low, np.float64)
    # 8 bits each, and the sign of the second adds one bit.
    np.testing.assert_allclose(both, np.asarray(x, np.float64), rtol=2.0**-17, atol=0)
    assert np.abs(np.asarray(low, np.float64)).max() > 0


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.parametrize(
    ('image', 'channels', 'features'),
    [
        ((32, 64, 64), (64,), 64),
        ((32, 32, 32), (192, 128), 128),
        ((32, 16, 16), (384,), 768),
        ((1, 8, 8), (64,), 64),
        ((256, 8, 8), (512,), 256),
    ],
)
def test_tiles_fit(
    image: tuple[int, ...], channels: tuple[int, ...], features: int, dtype: str
) -> None:
    operands = shapes(image, channels, features, dtype)
    tiles = candidates(*operands)
    assert tiles[0] == default_tile(*operands)
    assert len(set(tiles)) == len(tiles)
    assert all(supports(*operands, tile) is None for tile in tiles)
    assert (
        min(SplitKGrid.of(*operands, tiles[0]).strips, 8)
        <= tiles[0].splits * SplitKGrid.of(*operands, tiles[0]).tiles
    )


GOOD = shapes((2, 16, 16), (64, 64), 128, 'bfloat16')


def changed(part: jax.ShapeDtypeStruct, **fields: object) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(**{'shape': part.shape, 'dtype': part.dtype} | fields)


@pytest.mark.parametrize(
    ('parts', 'dy', 'tile', 'message'),
    [
        ((), GOOD[1], None, 'parts: expected at least one'),
        (
            GOOD[0],
            changed(GOOD[1], shape=(2, 256, 128)),
            None,
            r'dy: expected \(batch, height, width, features\)',
        ),
        (
            GOOD[0],
            changed(GOOD[1], dtype=jnp.int8),
            None,
            'dy: expected bfloat16, float16 or float32, found int8',
        ),
        (
            GOOD[0],
            changed(GOOD[1], shape=(2, 16, 16, 96)),
            None,
            'dy: expected features in multiples of 64, found 96',
        ),
        (
            GOOD[0],
            changed(GOOD[1], shape=(2, 16, 8, 128)),
            None,
            r'parts\[0\]: expected batch, height and width',
        ),
        (
            (GOOD[0][0], changed(GOOD[0][1], dtype=jnp.float16)),
            GOOD[1],
            None,
            r'parts\[1\]: expected the dtype of dy, bfloat16',
        ),
        (
            (changed(GOOD[0][0], shape=(2, 16, 16, 3)),),
            GOOD[1],
            None,
            r'parts\[0\]: expected channels in multiples of 64, found 3',
        ),
        (*GOOD, Tile(12, 4, 1), 'tile.rows: expected a multiple of 8'),
        (*GOOD, Tile(16, 6, 1), 'tile.stages=6: expected'),
        (*GOOD, Tile(8, 0, 1), 'tile.stages=0: expected at least 1'),
        (*GOOD, Tile(8, 8, 1, 1), 'tile.taps: expected 3 or 9, found 1'),
        (*GOOD, Tile(8, 8, 9), r'tile.splits: expected from 1 to 8 \(the strips\), found 9'),
    ],
)
def test_says_what_is_wrong(
    parts: tuple, dy: jax.ShapeDtypeStruct, tile: Tile | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(weight_gradient, tile=tile), parts, dy)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
@pytest.mark.parametrize('name', CALLS)
def test_parity(name: str, dtype: str) -> None:
    image, channels, features, _, tile = CALLS[name]
    if tile is not None and dtype == 'float32':
        tile = dataclasses.replace(tile, stages=2 if tile.rows <= 16 else 1)
    x, dy = draw((*image, sum(channels)), dtype), draw((*image, features), dtype)
    cuts = np.cumsum(channels)[:-1].tolist()

    def kernel(x: jax.Array, dy: jax.Array) -> jax.Array:
        return weight_gradient(tuple(jnp.split(x, cuts, axis=-1)), dy, tile=tile)

    assert_parity(kernel, reference, {'x': (x, dtype), 'dy': (dy, dtype)}, gradients=False)
    call = jax.jit(kernel)
    arguments = (
        jnp.asarray(x, jnp.float32).astype(dtype),
        jnp.asarray(dy, jnp.float32).astype(dtype),
    )
    np.testing.assert_array_equal(call(*arguments), call(*arguments))
