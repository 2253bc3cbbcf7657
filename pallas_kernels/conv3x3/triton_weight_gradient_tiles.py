"""Tiles of the portable weight gradient: fields, choice, and candidates for tuning.

`triton_tiles` has the tiles of the convolution and explains the differences.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from pallas_kernels.conv3x3.triton_blocks import LOAD_BYTES, check_block, check_launch, folds


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of one program; every block is a power of two ≥ 16.

    Fields:
      block_channels, block_features: the part of a tap's gradient that one program computes; an
        axis that is shared with the taps stays whole.
      block_pixels: K of one dot.
      taps: taps of one program, 1, 3 or 9, if they share no axis. More taps share the reads of dy
        and need more registers.
      programs: target number of programs, which determines the splits of the pixels.
      num_warps: warps of a program.
      num_stages: depth of its load pipeline.

    Raises:
      ValueError: a field is out of its range.
    """

    block_channels: int = 64
    block_features: int = 64
    block_pixels: int = 64
    taps: int = 3
    programs: int = 264
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        for field in ('block_channels', 'block_features', 'block_pixels'):
            check_block(field, getattr(self, field))
        if self.taps not in {1, 3, 9}:
            raise ValueError(f'Tile.taps={self.taps}: use 1, 3 or 9')
        if self.programs < 1:
            raise ValueError(f'Tile.programs={self.programs}: use at least 1')
        check_launch(self.num_warps, self.num_stages)


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
    if folds(features) or all(folds(c) for c in channels):
        return Tile(64, 64, 64, 9, 528, 4, 1) if itemsize == 4 else Tile(64, 64, 128, 9, 264, 4, 2)
    if itemsize == 4:
        return Tile(64, 64, 64, 3, 264, 4, 1)
    if pixels >= 64 * 1024:
        return Tile(64, 64, 64, 3, 264 if sum(channels) <= 64 else 528, 4, 3)
    if pixels >= 16 * 1024 and max(channels) >= 128 and features >= 128:
        return Tile(128, 128, 64, 1, 264, 8, 3)
    return Tile(64, 64, 64, 1, 264, 4, 3)


def candidates(channels: Sequence[int], features: int, pixels: int, itemsize: int) -> list[Tile]:
    """Returns the tiles worth timing for a shape; arguments as `default_tile`."""
    del pixels
    if folds(features) or all(folds(c) for c in channels):
        return [
            Tile(64, 64, block_pixels, 9, programs, 4, num_stages)
            for block_pixels, programs, num_stages in itertools.product(
                (64, 128, 256), (264, 528), (1, 2, 3)
            )
        ]
    num_stages = 1 if itemsize == 4 else 3
    found = []
    for block_channels, block_features, taps, num_warps in (
        (64, 64, 1, 4),
        (64, 64, 3, 4),
        (64, 64, 9, 8),
        (64, 128, 1, 4),
        (64, 128, 3, 8),
        (128, 64, 1, 4),
        (128, 128, 1, 8),
        (128, 256, 1, 8),
    ):
        if max(channels) * 2 <= block_channels or features * 2 <= block_features:
            continue
        for block_pixels, programs in itertools.product((64, 128), (132, 264, 528)):
            columns = block_channels * taps + block_features
            if num_stages * block_pixels * columns * itemsize <= LOAD_BYTES:
                blocks = (block_channels, block_features, block_pixels)
                found.append(Tile(*blocks, taps, programs, num_warps, num_stages))
    return found
