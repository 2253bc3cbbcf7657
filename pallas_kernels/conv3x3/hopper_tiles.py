"""Tiles of the Hopper convolution that are worth timing for a shape, and a model of their time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from pallas_kernels.conv3x3.hopper_plan import Plan
from pallas_kernels.conv3x3.schedule import (
    CHUNK,
    HALO_COLUMNS,
    TAPS,
    Tile,
    ceil_div,
    multiprocessors,
)


def cycles(p: Plan) -> float:
    """Estimates the cycles of the longest-running program.

    Includes the copy of the weights, if the kernel cannot read them in their layout. A wgmma of 64
    × n outputs and K = 16 takes n / 2 cycles on the tensor cores, and about 16 + n / 4 to read its
    operands from shared memory. The other factors are in cycles, fitted to times on an H200 (batch
    32, 64² to 8² pixels, 64 to 512 channels; 7% rms): 0.89 is the share of the tensor cores' peak
    that the mainloop reaches, 1.15 scales the reads of shared memory, 2.8 is the number of values
    that an activator processes per cycle, 500 is the overhead of a residual's step, 440 and 1270
    are an epilogue's, and 2500 is the copy of the weights. To refit, time `candidates` with
    `pallas_kernels.conv3x3.tune_hopper` and fit these factors to the rows.
    """
    s, tile = p.schedule, p.schedule.tile
    rows, columns = (tile.features, s.pixels) if tile.transposed else (s.pixels, tile.features)
    block = 4 / 0.89 * tile.groups * rows // 64 * max(columns / 2, 1.15 * (16 + columns / 4))
    activation = (
        tile.groups * (tile.rows + 2) * HALO_COLUMNS * CHUNK / (2.8 * s.activators)
        if s.activated
        else 0
    )
    steps = s.chunks * max(TAPS * block, activation) + s.extras * (block + 500)
    drain = 440 / tile.groups + 1270 * s.pixels * tile.features / 8192
    copy = 2500 if p.outputs_first and not p.flipped else 0
    return ceil_div(s.tiles, multiprocessors()) * (steps + drain) + copy


def _grid(features: int, height: int, activators: tuple[int, ...]) -> Iterator[Tile]:
    widths = {64, 128, *(features // n for n in range(1, 9) if features % (16 * n) == 0)}
    for width, rows, groups, helpers, transposed in itertools.product(
        sorted(widths), (4, 8, 16), (1, 2), activators, (True, False)
    ):
        if width <= 256 and (rows <= 8 or height > 8):
            for taps, ring in ((TAPS, 0), (3, 4), (3, 3), (1, 8), (1, 5), (1, 4), (1, 3)):
                yield Tile(rows, width, groups, 2, taps, ring, transposed, helpers)


def candidates(plan_of: Callable[[Tile], Plan], limit: int) -> list[Tile]:
    """Returns tiles that fit, by estimated time.

    For each geometry: resident weights, the deepest ring with 3 taps per slot, and that with 1 tap.

    Args:
      plan_of: returns the plan of a tile.
      limit: the most tiles to return.
    """
    s = plan_of(Tile(8, 64, 1)).schedule
    found: dict[tuple[object, ...], Tile] = {}
    for tile in _grid(s.features, s.height, (2, 1) if s.activated else (1,)):
        geometry = (
            tile.rows,
            tile.features,
            tile.groups,
            tile.transposed,
            tile.activators,
            tile.taps,
        )
        if geometry not in found and plan_of(tile).schedule.problem() is None:
            found[geometry] = tile
    # Among equals: transposed products, resident weights, 3 taps per slot.
    return sorted(
        found.values(),
        key=lambda tile: (cycles(plan_of(tile)), not tile.transposed, tile.ring > 0, -tile.taps),
    )[:limit]
