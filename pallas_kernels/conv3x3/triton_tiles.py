"""Tiles of the portable convolution: their fields, the choice, and the candidates for tuning.

Tiles of the weight gradient (`triton_weight_gradient_tiles`) are chosen in the same way but have
other fields: there K is the pixels, and the grid follows from a number of programs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from jax.experimental import pallas as pl

from pallas_kernels.conv3x3.triton_blocks import (
    LOAD_BYTES,
    TAPS,
    check_block,
    check_launch,
    dot_size,
    folds,
)

# Programs that keep a GPU busy: as many as an A100 has multiprocessors.
ENOUGH = 108


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of one program; every block is a power of two ≥ 16.

    Fields:
      block_pixels, block_features: output of one program; with fewer than 16 features, of products
        of taps and features.
      block_channels: largest K of one dot, for parts whose channels do not share it with the taps.
      num_warps: warps of a program.
      num_stages: depth of its load pipeline.

    Raises:
      ValueError: a field is out of its range.
    """

    block_pixels: int = 128
    block_features: int = 64
    block_channels: int = 64
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        for field in ('block_pixels', 'block_features', 'block_channels'):
            check_block(field, getattr(self, field))
        check_launch(self.num_warps, self.num_stages)


def gathers(channels: Sequence[int], features: int) -> bool:
    """Returns True if one kernel forms products of all taps and another adds them up."""
    return folds(features) and not all(folds(c) for c in channels)


def default_tile(channels: Sequence[int], features: int, pixels: int, itemsize: int) -> Tile:
    """Returns the tile for shapes that are in no table.

    These are the fastest on an H200 among the tiles that fit in sm_89's 99 KiB of shared memory per
    program. To refit, run `pallas_kernels.conv3x3.tune_triton`.

    Args:
      channels: of each part.
      pixels: batch · height · width.
      itemsize: bytes of an element. The three products of a float32 dot leave no registers for a
        deeper pipeline.
    """
    widest = dot_size(TAPS * features if gathers(channels, features) else features)
    if itemsize == 4 or all(folds(c) for c in channels):
        return Tile(128, min(64, widest), 64, 4, 1)
    if gathers(channels, features):
        return Tile(128, min(64, widest), 64, 4, 2)
    if widest > 64 and pl.cdiv(pixels, 128) * pl.cdiv(features, 128) >= ENOUGH:
        return Tile(128, 128, 64, 8, 3)
    if pl.cdiv(pixels, 128) * pl.cdiv(features, 64) >= ENOUGH:
        return Tile(128, min(64, widest), 64, 4, 2)
    return Tile(64, min(64, widest), 128, 4, 3)


def candidates(channels: Sequence[int], features: int, pixels: int, itemsize: int) -> list[Tile]:
    """Returns the tiles worth timing for a shape; arguments as `default_tile`."""
    del pixels
    looped = [c for c in channels if not folds(c) or gathers(channels, features)]
    widest = dot_size(TAPS * features if gathers(channels, features) else features)
    deepest = dot_size(max(looped, default=1))
    feature_blocks = {min(widest, 64), min(widest, 128)}
    if features % 256 == 0:
        feature_blocks.add(widest)
    channel_blocks = {min(deepest, 128 // itemsize), min(deepest, 256 // itemsize)}
    found = []
    for block_features, block_pixels, block_channels, num_warps, num_stages in itertools.product(
        sorted(feature_blocks),
        (64, 128, 256),
        sorted(channel_blocks),
        (4, 8),
        (1, 2, 3) if looped else (1,),
    ):
        loaded = num_stages * block_channels * (block_pixels + block_features) * itemsize
        registers = block_pixels * block_features // (32 * num_warps)  # accumulators per thread
        if loaded <= LOAD_BYTES and 16 <= registers <= 128:
            found.append(Tile(block_pixels, block_features, block_channels, num_warps, num_stages))
    return found
