"""Tiles of the Triton GroupNorm kernels, and the grid that a tile gives for a tensor.

A program owns some channels of one sample and iterates over that sample's pixels. The channels are
whole groups, unless the statistics are known.
"""

from __future__ import annotations

import dataclasses
import math

from jax.typing import DTypeLike

from pallas_kernels import tile_table


@dataclasses.dataclass(frozen=True, order=True)
class Tile:
    """The tile of one kernel.

    Fields:
      channels: channels of a program, before rounding to whole groups and, where possible, to
        16-byte loads.
      rows: pixels of one register tile (a power of two).
      unroll: register tiles that are loaded before the first is used.
      warps: warps of a program.
      splits: programs that share the pixels of a sample; kernels that compute their statistics
        themselves have only one.
    """

    channels: int = 32
    rows: int = 128
    unroll: int = 2
    warps: int = 8
    splits: int = 1


@dataclasses.dataclass(frozen=True)
class Grid:
    """A tile fitted to a tensor; static, so that a kernel can close over it.

    Fields:
      parts: channels of each part of the concatenation.
      pixels: height · width.
      group: channels of a group.
      channels: channels of a program; a multiple of `group`, unless the statistics are known.
      lanes: `channels` rounded up to a power of two.
      rows, unroll: see `Tile`.
      steps: times that a program advances by rows · unroll pixels.
      splits: programs along the pixels.
      interpret: the kernel runs in Pallas' interpreter.
    """

    parts: tuple[int, ...]
    pixels: int
    group: int
    channels: int
    lanes: int
    rows: int
    unroll: int
    steps: int
    splits: int
    interpret: bool

    @property
    def total(self) -> int:
        """Channels of the concatenation."""
        return sum(self.parts)

    @property
    def blocks(self) -> int:
        """Programs along the channels."""
        return -(-self.total // self.channels)

    @property
    def whole_groups(self) -> bool:
        """True if a program's channels are whole groups."""
        return self.channels % self.group == 0

    @property
    def window(self) -> int:
        """Power of two that holds the channels of all groups that a program touches."""
        return (
            self.lanes
            if self.whole_groups
            else power_of_two((-(-(self.channels - 1) // self.group) + 1) * self.group)
        )

    @property
    def stride(self) -> int:
        """Pixels of one step."""
        return self.rows * self.unroll

    @property
    def ragged_rows(self) -> bool:
        """True if some step extends past the last pixel."""
        return self.splits * self.steps * self.stride != self.pixels

    @property
    def ragged_lanes(self) -> bool:
        """True if some lane has no channel."""
        return self.lanes != self.channels or self.total % self.channels != 0

    def split_pixels(self) -> tuple[int, ...]:
        """Returns the pixels of each split."""
        share = self.steps * self.stride
        return tuple(max(0, min(share, self.pixels - i * share)) for i in range(self.splits))


def power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def shape_class(batch: int, pixels: int, channels: int) -> str:
    """Returns the name of a size in the table of tiles; rounds the batch up to a power of two."""
    return f'{power_of_two(batch)} samples, {pixels} pixels, {channels} channels'


def choose_tile(
    kernel: str, dtype: DTypeLike, batch: int, pixels: int, channels: int, group: int = 1
) -> Tile:
    """Returns the tile of a kernel: the one measured on this device, else the one from its rule.

    The rules below are fitted to times on an H200 in bfloat16. To refit, run
    `pallas_kernels.group_norm.tune`.

    Args:
      kernel: its name without the prefix jaxunet_group_norm_; `gradient_sums_activation` is
        `gradient_sums` when it writes the activation too.
      pixels: height · width.
      group: channels of a group.
    """
    rules = {
        'forward': lambda: _whole_groups_tile(batch, pixels, channels, group),
        'backward': lambda: _whole_groups_tile(batch, pixels, channels, group),
        'normalise': lambda: _normalise_tile(pixels),
        'moments': lambda: _reduction_tile(pixels),
        'channel_sums': lambda: _reduction_tile(pixels),
        'gradient_sums': lambda: _sums_tile(pixels),
        'gradient_sums_activation': lambda: _sums_tile(pixels),
        'gradient': lambda: _gradient_tile(batch, pixels),
    }
    return (
        tile_table.measured(
            Tile, f'group_norm/{kernel}', dtype, shape_class(batch, pixels, channels)
        )
        or rules[kernel]()
    )


def _normalise_tile(pixels: int) -> Tile:
    """The rule for a kernel that reads one tensor and writes one."""
    if pixels <= 256:
        return Tile(channels=32, rows=16, unroll=4, warps=8)
    if pixels <= 1024:
        return Tile(channels=32, rows=32, unroll=4, warps=8)
    return Tile(channels=64, rows=32, unroll=4, warps=8, splits=pixels // 512)


def _whole_groups_tile(batch: int, pixels: int, channels: int, group: int) -> Tile:
    """The rule for kernels whose programs own all pixels of some groups."""
    wanted = 64 if pixels <= 256 else 32 if pixels <= 1024 else 16
    # At least 90 programs, about two thirds of an H200's 132 multiprocessors.
    while wanted > 16 and batch * channels < 90 * wanted:
        wanted //= 2
    if pixels <= 256:
        return Tile(
            channels=wanted,
            rows=16 if pixels <= 64 else 64,
            unroll=4,
            warps=4 if pixels <= 64 else 8,
        )
    lanes = power_of_two(max(wanted, math.lcm(group, 8)))
    return Tile(
        channels=wanted,
        rows=max(16, (4096 if pixels <= 1024 else 1024) // lanes),
        unroll=4,
        warps=16,
    )


def _reduction_tile(pixels: int) -> Tile:
    """The rule for kernels that read one tensor and reduce it."""
    if pixels <= 256:
        return Tile(channels=64, rows=16, unroll=4, warps=8)
    if pixels <= 1024:
        return Tile(channels=64, rows=32, unroll=4, warps=4, splits=pixels // 128)
    return Tile(channels=64, rows=32, unroll=4, warps=8, splits=pixels // 512)


def _gradient_tile(batch: int, pixels: int) -> Tile:
    """The rule for `gradient` with known sums."""
    if pixels <= 256:
        return Tile(channels=32, rows=32, unroll=4, warps=8)
    if pixels <= 1024:
        return Tile(channels=64, rows=128, unroll=1, warps=4, splits=2)
    return Tile(
        channels=64, rows=32 if batch <= 64 else 16, unroll=4, warps=8, splits=pixels // 512
    )


def _sums_tile(pixels: int) -> Tile:
    """The rule for `gradient_sums`."""
    if pixels <= 256:
        return Tile(channels=64, rows=8, unroll=4, warps=8)
    if pixels <= 1024:
        return Tile(channels=64, rows=32, unroll=4, warps=4, splits=pixels // 128)
    return Tile(channels=64, rows=8, unroll=4, warps=8, splits=pixels // 128)


def fit(
    tile: Tile, parts: tuple[int, ...], pixels: int, group: int, *, streamed: bool, interpret: bool
) -> Grid:
    """Fits a tile to a tensor.

    Eight channels (16 bytes of a 16-bit type) are one load, so a program's channels are a multiple
    of eight where groups allow.

    Args:
      group: channels of a group; 1 = channels are independent.
      streamed: the statistics are known, so programs may share the pixels of a sample, and the
        channels of a group.
    """
    total = sum(parts)
    aligned = all(part % 8 == 0 for part in parts)
    if streamed and aligned and group <= 64 and tile.channels % group:
        unit = 8
    else:
        unit = math.lcm(group, 8)
        if not aligned or unit > max(128, tile.channels):
            unit = group
    channels = min(max(unit, tile.channels // unit * unit), -(-total // unit) * unit)
    if total % channels and total % unit == 0:
        # Programs of equal size, instead of a small last one.
        count = -(-total // channels)
        channels = -(-(total // unit) // count) * unit
    rows = min(power_of_two(tile.rows), power_of_two(pixels))
    unroll = min(tile.unroll, -(-pixels // rows))
    stride = rows * unroll
    splits = min(tile.splits, -(-pixels // stride)) if streamed else 1
    steps = -(-pixels // (stride * splits))
    splits = -(-pixels // (stride * steps))  # without those that would have no pixels
    return Grid(
        parts=parts,
        pixels=pixels,
        group=group,
        channels=channels,
        lanes=power_of_two(channels),
        rows=rows,
        unroll=unroll,
        steps=steps,
        splits=splits,
        interpret=interpret,
    )
