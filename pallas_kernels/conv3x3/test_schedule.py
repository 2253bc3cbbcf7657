"""The Hopper convolution's schedule, run as plain Python: its boxes hold what NumPy computes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.conv3x3.hopper_plan import Mainloop, mainloop
from pallas_kernels.conv3x3.schedule import (
    CHUNK,
    HALO_COLUMNS,
    LOADING_REGISTERS,
    SHARED_BYTES,
    STRIP_COLUMNS,
    TAPS,
    Tile,
    tap_origin,
)

RESIDENT = Tile(rows=16, features=64, groups=2, slots=2, taps=9, ring=0, transposed=True)
# Batch, height, width; channels of the parts; output channels; channels of the residual, projected
# unless they are the outputs'; tile.
SHAPES = {
    'even': ((2, 16, 16), (64,), 64, (), Tile(8, 64)),
    'resident': ((3, 32, 8), (64,), 64, (64,), RESIDENT),
    'resident shortcut': ((1, 16, 8), (64,), 64, (32, 64), RESIDENT),
    'two parts': ((1, 16, 8), (128, 64), 96, (96,), Tile(8, 96, taps=1, ring=4)),
    'shortcut': ((2, 8, 8), (128,), 192, (64, 128), Tile(8, 96)),
    'partial strips': ((3, 9, 7), (64,), 64, (64,), Tile(8, 64, groups=1)),
    'tiny image': ((5, 4, 4), (64,), 128, (), Tile(8, 64, groups=2)),
    'short strips': ((1, 5, 20), (64,), 64, (64,), Tile(4, 64, transposed=True)),
    'odd channels': ((1, 8, 8), (40, 24), 72, (72,), Tile(8, 64, groups=3, ring=2)),
    'odd shortcut': ((1, 8, 8), (40,), 72, (8, 24), Tile(8, 64)),
}


def boxed(x: np.ndarray, starts: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
    """A TMA box: what lies outside the array reads as zeros."""
    box = np.zeros(sizes, x.dtype)
    clip = [(max(a, 0), min(a + n, d)) for a, n, d in zip(starts, sizes, x.shape, strict=True)]
    if all(low < high for low, high in clip):
        inner = tuple(slice(low - a, high - a) for (low, high), a in zip(clip, starts, strict=True))
        box[inner] = x[tuple(slice(low, high) for low, high in clip)]
    return box


def store(y: np.ndarray, starts: tuple[int, ...], box: np.ndarray) -> None:
    """A TMA store: what lies outside the array is dropped."""
    clip = [(max(a, 0), min(a + n, d)) for a, n, d in zip(starts, box.shape, y.shape, strict=True)]
    if all(low < high for low, high in clip):
        target = tuple(slice(low, high) for low, high in clip)
        assert np.isnan(y[target]).all(), 'an output was stored twice'
        y[target] = box[
            tuple(slice(low - a, high - a) for (low, high), a in zip(clip, starts, strict=True))
        ]


def scheduled(
    p: Mainloop, arrays: list[np.ndarray], weights: np.ndarray, shortcut: np.ndarray | None
) -> np.ndarray:
    """Computes the result of the kernel, box by box.

    `weights` and `shortcut` have shape (taps, features, channels).
    """
    s, tile = p.schedule, p.schedule.tile
    identity = np.eye(tile.features, -(-tile.features // CHUNK) * CHUNK)[None]
    y = np.full((s.batch, s.height, s.width, s.features), np.nan)
    for program in range(s.programs):
        for i in range(s.local_tiles(program)):
            strip, feature = s.tile_at(program, i)
            for group in range(tile.groups):
                sample, row, column = s.strip_at(strip + group)
                acc = np.zeros((s.pixels, tile.features))
                for source in (*p.sources, *p.extras):
                    extra = source.first >= s.chunks
                    for chunk in range(source.steps):
                        channel = chunk * CHUNK + (feature if source.follows_tile else 0)
                        starts = (sample, row - 1, column - 1, channel)
                        haloed = boxed(
                            arrays[source.array], starts, (1, tile.rows + 2, HALO_COLUMNS, CHUNK)
                        )[0]
                        for tap in (TAPS // 2,) if extra else range(TAPS):
                            down, right = tap_origin(tap)
                            pixels = haloed[
                                down : down + tile.rows, right : right + STRIP_COLUMNS
                            ].reshape(-1, CHUNK)
                            matrix, t = (
                                (identity if source.follows_tile else shortcut, 0)
                                if extra
                                else (weights, tap)
                            )
                            first = 0 if source.follows_tile else feature
                            block = boxed(
                                matrix,
                                (t, first, source.weight + chunk * CHUNK),
                                (1, tile.features, CHUNK),
                            )[0]
                            acc += pixels @ block.T
                for n in range(s.stores):
                    columns = slice(n * s.store_columns, (n + 1) * s.store_columns)
                    box = acc[:, columns].reshape(1, tile.rows, STRIP_COLUMNS, -1)
                    store(y, (sample, row, column, feature + n * s.store_columns), box)
    return y


def convolution(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    _, height, width, _ = x.shape
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return sum(
        padded[:, dy : dy + height, dx : dx + width] @ kernel[dy, dx]
        for dy in range(3)
        for dx in range(3)
    )


@pytest.mark.parametrize('split', [False, True])
@pytest.mark.parametrize('name', SHAPES)
def test_boxes_add_up_to_the_convolution(name: str, split: bool) -> None:
    image, channels, features, residual, tile = SHAPES[name]
    projected = bool(residual) and residual != (features,)
    p = mainloop(
        image,
        channels,
        features,
        tile,
        residual=residual,
        shortcut=projected,
        split=split,
        itemsize=4 if split else 2,
    )
    assert split or p.schedule.problem() is None
    rng = np.random.default_rng(0)
    halves = 2 if split else 1
    products = ((0, 0), (0, 1), (1, 0)) if split else ((0, 0),)

    def integers(count: int, *shape: int) -> list[np.ndarray]:
        """Terms that add exactly, in any order."""
        return [rng.integers(-4, 5, shape).astype(float) for _ in range(count)]

    def parts(terms: list[np.ndarray], widths: tuple[int, ...]) -> list[np.ndarray]:
        return [part for term in terms for part in np.split(term, np.cumsum(widths)[:-1], axis=-1)]

    total, others = sum(channels), sum(residual)
    x, kernel = integers(halves, *image, total), integers(halves, 3, 3, total, features)
    expected = sum(convolution(x[a], kernel[b]) for a, b in products)
    weights = np.concatenate(
        [kernel[b].reshape(TAPS, total, features).transpose(0, 2, 1) for _, b in products], axis=-1
    )
    arrays, shortcut = parts(x, channels), None
    if projected:
        r, projection = integers(halves, *image, others), integers(halves, others, features)
        expected = expected + sum(r[a] @ projection[b] for a, b in products)
        arrays += parts(r, residual)
        shortcut = np.concatenate([projection[b].T for _, b in products], axis=-1)[None]
    elif residual:
        r = integers(3 if split else 1, *image, others)
        expected = expected + sum(r)
        arrays += r
    assert len(arrays) == p.arrays
    np.testing.assert_array_equal(scheduled(p, arrays, weights, shortcut), expected)


def test_every_tile_is_computed_once() -> None:
    for batch, tile in itertools.product(
        (1, 7, 32, 300), (Tile(16, 64), Tile(8, 96, groups=3), Tile(8, 64, groups=1))
    ):
        s = mainloop((batch, 16, 24), (64,), 192, tile).schedule
        found = [
            s.tile_at(program, i)
            for program in range(s.programs)
            for i in range(s.local_tiles(program))
        ]
        assert len(found) == len(set(found)) == s.tiles
        strips = {first + group for first, _ in found for group in range(tile.groups)}
        assert set(range(s.strips)) <= strips
        assert {feature for _, feature in found} == set(range(0, 192, tile.features))


def test_the_same_arithmetic_in_the_kernel() -> None:
    """Traced int32 scalars give the same results as Python ints, and stay int32."""
    s = mainloop((3, 24, 20), (128,), 192, Tile(8, 64), residual=(192,)).schedule

    def positions(program: jax.Array, i: jax.Array) -> tuple:
        first, feature = s.tile_at(program, i)
        ring = (
            s.slot(s.strip_number(i, program)),
            s.ring(s.load_number(i, program, 2)),
            s.ring(s.extra_load_number(i, program + s.chunks)),
        )
        return s.local_tiles(program), first, feature, s.strip_at(first + 1), *ring

    for program, i in ((0, 0), (1, 1), (5, 3)):
        traced = jax.jit(positions)(jnp.int32(program), jnp.int32(i))
        assert jax.tree.map(int, traced) == positions(program, i)
        assert {leaf.dtype for leaf in jax.tree.leaves(traced)} == {jnp.dtype(jnp.int32)}


@pytest.mark.parametrize(
    ('tile', 'features', 'reason'),
    [
        (Tile(8, 64, taps=2), 64, 'taps 1, 3 or 9'),
        (Tile(8, 64, ring=1), 64, 'ring at least 2'),
        (Tile(8, 64, slots=1), 64, 'slots must be at least 2'),
        (Tile(4, 64), 64, 'M of whole 64s'),
        (Tile(8, 96, transposed=True), 96, 'M of whole 64s'),
        (Tile(8, 264), 264, 'N of at most 256'),
        (Tile(8, 40), 40, 'multiple of'),
        (Tile(16, 64, taps=9, ring=0), 128, 'exactly the 128'),
        (Tile(8, 64, taps=9, ring=0), 40, 'exactly the 40'),
        (Tile(8, 64, activators=3), 64, 'activators 1 or 2'),
        (Tile(16, 256), 256, 'registers'),
        (Tile(16, 128, taps=9, ring=3), 128, 'shared memory'),
        (Tile(8, 64, groups=4), 64, 'groups 1, 2 or 3'),
    ],
)
def test_impossible_tiles_say_why(tile: Tile, features: int, reason: str) -> None:
    s = mainloop((1, 16, 16), (64,), features, tile).schedule
    assert reason in (s.problem() or '')


def test_shared_memory_is_counted() -> None:
    s = mainloop((2, 64, 64), (64,), 64, RESIDENT).schedule
    assert s.problem() is None
    strips, weights, stores = 2 * 2 * 20 * 10 * 128, 9 * 64 * 128, 2 * 128 * 128
    assert strips + weights + stores < s.shared_bytes <= SHARED_BYTES


def test_registers_are_there_when_asked_for() -> None:
    """A warpgroup that asks for more registers than others gave up would wait forever."""
    for groups, activators, activated in itertools.product((1, 2, 3), (1, 2), (False, True)):
        s = mainloop(
            (2, 64, 64), (64,), 64, Tile(8, 64, groups, activators=activators), activated=activated
        ).schedule
        launched = 128 * s.warpgroups * s.launch_registers
        taken = (
            LOADING_REGISTERS
            + s.activators * s.activating_registers
            + groups * s.computing_registers
        )
        assert launched <= 65536
        assert 128 * taken <= launched
        assert LOADING_REGISTERS <= s.launch_registers <= s.computing_registers
        assert s.computing_registers % 8 == s.activating_registers % 8 == 0
        assert not s.activators or s.activating_registers <= s.launch_registers


def test_resident_weights_lie_side_by_side() -> None:
    s = mainloop((2, 16, 8), (64,), 64, RESIDENT, residual=(64, 32), shortcut=True).schedule
    taken = [s.resident_block(step) + tap for step in range(s.chunks) for tap in range(TAPS)]
    taken += [s.resident_block(step, extra=True) for step in range(s.chunks, s.steps)]
    assert taken == list(range(s.weight_blocks))
