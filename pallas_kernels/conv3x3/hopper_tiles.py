"""Tiles of the Hopper convolution that are worth timing for a shape, and a model of their time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from pallas_kernels.conv3x3.hopper_plan import Mainloop
from pallas_kernels.conv3x3.schedule import CHUNK, HALO_COLUMNS, TAPS, Tile
from pallas_kernels.hopper_grid import ceil_div, multiprocessors

# Factors of `cycles`, fitted to times on an H200 (batch 32, 64² to 8² pixels, 64 to 512 channels;
# 7% rms). To refit, time `candidates` with `pallas_kernels.conv3x3.tune_hopper`.
PEAK_SHARE = 0.89  # share of the tensor cores' peak that the mainloop reaches
READS = 1.15  # factor on the cycles that read shared memory
ACTIVATED = 2.8  # values that an activator processes per cycle
RESIDUAL_STEP = 500  # cycles per step of a residual, in addition to its products
EPILOGUE = 440  # cycles of an epilogue, divided by the groups
EPILOGUE_OUTPUTS = 1270  # cycles of an epilogue for every 8192 outputs
WEIGHT_COPY = 2500  # cycles to copy the weights


def cycles(p: Mainloop) -> float:
    """Estimates the cycles of the longest-running program.

    Includes the copy of the weights if the kernel cannot read them in the given layout. A wgmma of
    64 × n outputs and K = 16 takes n / 2 cycles on the tensor cores, and about 16 + n / 4 to read
    its operands from shared memory.
    """
    s, tile = p.schedule, p.schedule.tile
    rows, columns = (tile.features, s.pixels) if tile.transposed else (s.pixels, tile.features)
    # The fit assumes exactly this rounding; another one would need other factors.
    products = (4 / PEAK_SHARE * tile.groups * rows) // 64
    block = products * max(columns / 2, READS * (16 + columns / 4))
    activation = (
        tile.groups * (tile.rows + 2) * HALO_COLUMNS * CHUNK / (ACTIVATED * s.activators)
        if s.activated
        else 0
    )
    steps = s.chunks * max(TAPS * block, activation) + s.extras * (block + RESIDUAL_STEP)
    drain = EPILOGUE / tile.groups + EPILOGUE_OUTPUTS * s.pixels * tile.features / 8192
    copy = WEIGHT_COPY if p.outputs_first and not p.flipped else 0
    return ceil_div(s.tiles, multiprocessors()) * (steps + drain) + copy


def _grid(features: int, height: int, activators: tuple[int, ...]) -> Iterator[Tile]:
    widths = {64, 128, *(features // n for n in range(1, 9) if features % (16 * n) == 0)}
    for width, rows, groups, helpers, transposed in itertools.product(
        sorted(widths), (4, 8, 16), (1, 2), activators, (True, False)
    ):
        if width <= 256 and (rows <= 8 or height > 8):
            for taps, ring in ((TAPS, 0), (3, 4), (3, 3), (1, 8), (1, 5), (1, 4), (1, 3)):
                yield Tile(rows, width, groups, 2, taps, ring, transposed, helpers)


def candidates(mainloop: Callable[[Tile], Mainloop], limit: int) -> list[Tile]:
    """Returns tiles that fit, the fastest by `cycles` first.

    For each geometry: resident weights, and the deepest rings with 3 taps and with 1 tap per slot.

    Args:
      mainloop: returns the mainloop of a tile.
      limit: the most tiles to return.
    """
    s = mainloop(Tile(8, 64, 1)).schedule
    deepest: dict[tuple[object, ...], Tile] = {}
    for tile in _grid(s.features, s.height, (2, 1) if s.activated else (1,)):
        geometry = (
            tile.rows,
            tile.features,
            tile.groups,
            tile.transposed,
            tile.activators,
            tile.taps,
        )
        if geometry not in deepest and mainloop(tile).schedule.problem() is None:
            deepest[geometry] = tile
    # Among equals: transposed products, resident weights, 3 taps per slot.
    return sorted(
        deepest.values(),
        key=lambda tile: (cycles(mainloop(tile)), not tile.transposed, tile.ring > 0, -tile.taps),
    )[:limit]
