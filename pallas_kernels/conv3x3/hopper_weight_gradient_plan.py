"""Tiles and index arithmetic of the Hopper weight gradient: the data of each CTA and step.

Plain functions of integers; the kernel calls them with traced int32, the tests with Python ints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from pallas_kernels.types import Index, Shaped

BLOCK = 64  # channels of a tile, input and output: wgmma's M, and 128 bytes of 16-bit numbers
STRIP = 8  # pixels across a strip: the rows of a swizzle atom
TAP_ROWS = 3  # rows of taps, and consumer warpgroups
# Pairs of halves (of x, of dy) whose products count for float32 operands; (low, low) is left out.
SPLIT_PRODUCTS = ((0, 0), (0, 1), (1, 0))


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of one CTA.

    Fields:
      rows: image rows of a strip, a multiple of 8.
      stages: strips in flight.
      splits: CTAs that share the pixels of one output tile (split-K). Each writes 147 KB of partial
        sums, or 49 KB with 3 taps.
      taps: 9, or 3 for one row of taps.
    """

    rows: int
    stages: int
    splits: int
    taps: int = 9


@dataclasses.dataclass(frozen=True)
class SplitKGrid:
    """The grid of one call and its index arithmetic; methods take Python ints or traced int32.

    Fields:
      widths: channels of each part.
      halves: 2 for float32 operands, high and low bfloat16; else 1.
    """

    tile: Tile
    batch: int
    height: int
    width: int
    widths: tuple[int, ...]
    features: int
    halves: int

    @classmethod
    def of(cls, parts: Sequence[Shaped], dy: Shaped, tile: Tile) -> SplitKGrid:
        """Returns the grid of a call for operands of these shapes."""
        batch, height, width, features = dy.shape
        halves = 2 if dy.dtype == jnp.float32 else 1
        return cls(
            tile, batch, height, width, tuple(part.shape[-1] for part in parts), features, halves
        )

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Pairs of halves (of x, of dy) that are multiplied."""
        return SPLIT_PRODUCTS if self.halves == 2 else SPLIT_PRODUCTS[:1]

    @property
    def tap_groups(self) -> int:
        """CTAs that share the taps of one output tile."""
        return 9 // self.tile.taps

    @property
    def tiles(self) -> int:
        """Output tiles; each has `splits` CTAs."""
        return sum(self.widths) // BLOCK * (self.features // BLOCK) * self.tap_groups

    @property
    def strips_down(self) -> int:
        """Strips of an image, from top to bottom."""
        return -(-self.height // self.tile.rows)

    @property
    def strips_across(self) -> int:
        """Strips of an image, from left to right."""
        return -(-self.width // STRIP)

    @property
    def strips(self) -> int:
        """Strips of the batch."""
        return self.batch * self.strips_down * self.strips_across

    @property
    def x_rows(self) -> int:
        """Image rows of x that a strip reads."""
        return self.tile.rows + (2 if self.tap_groups == 1 else 0)

    @property
    def box_rows(self) -> int:
        """Image rows of a stage of x, rounded up for 1024-byte alignment."""
        return -(-self.x_rows // 4) * 4

    @property
    def shared_bytes(self) -> int:
        """Bytes of the ring in shared memory."""
        pixels = self.box_rows * (STRIP + 2) + self.tile.rows * STRIP
        return self.tile.stages * self.halves * pixels * BLOCK * 2

    def share(self, split: Index) -> tuple[Index, Index]:
        """Returns the first strip and the number of strips of a split; the numbers differ by at
        most 1.
        """
        size, longer = divmod(self.strips, self.tile.splits)

        def first(split: Index) -> Index:
            return split * size + (
                min(split, longer) if isinstance(split, int) else lax.min(split, jnp.int32(longer))
            )

        return first(split), first(split + 1) - first(split)

    def strip_origin(self, strip: Index) -> tuple[Index, Index, Index]:
        """Returns sample, image row and column of a strip's first pixel of dy.

        The box of x begins one pixel above and to the left of that pixel.
        """
        sample, rest = divide(strip, self.strips_down * self.strips_across)
        down, across = divide(rest, self.strips_across)
        return sample, down * self.tile.rows, across * STRIP

    def cta(self, index: Index) -> tuple[Index, Index, Index, Index]:
        """Returns split, first input channel, first output channel and row of taps of a CTA.

        The row of taps is 0 if the CTA has all of them. Neighbouring CTAs read the same pixels,
        which are then in L2.
        """
        split, tile = divide(index, self.tiles)
        block, tap_row = divide(tile, self.tap_groups)
        x_block, dy_block = divide(block, self.features // BLOCK)
        return split, x_block * BLOCK, dy_block * BLOCK, tap_row

    def first_row(self, row: Index, tap_row: Index) -> Index:
        """Returns the first image row of x's box, given the first row of dy's box."""
        return row - 1 + tap_row

    def of_warpgroup(self, warpgroup: Index, tap_row: Index) -> tuple[Index, Index, Index]:
        """Returns row and column in x's box where a consumer's taps begin, and its first tap."""
        if self.tap_groups == 1:
            return warpgroup, 0 * warpgroup, 3 * warpgroup
        return 0 * warpgroup, warpgroup, 3 * tap_row + warpgroup


def divide(a: Index, b: int) -> tuple[Index, Index]:
    """Returns quotient and remainder of a ≥ 0; `//` would add instructions for negative numbers."""
    if isinstance(a, int):
        return divmod(a, b)
    return lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b))
