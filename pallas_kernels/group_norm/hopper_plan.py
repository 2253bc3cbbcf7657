"""The supported shapes of GroupNorm's Hopper kernels, their tiles, and a tile fitted to a shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper_grid import ceil_div, multiprocessors
from pallas_kernels.types import Index, Shaped

THREADS = 128  # per warpgroup
LANES = 32  # threads per warp; in reductions over groups, each thread has whole groups
VECTOR_BYTES = 16  # per load
MAX_CHANNELS = 4096  # a program holds two float32 vectors of this size in shared memory
# Target number of programs per multiprocessor in `choose_tile`.
PROGRAMS = 8


@dataclasses.dataclass(frozen=True, order=True)
class Tile:
    """Tuning options of one kernel.

    Fields:
      unroll: register tiles that are loaded before the first is used.
      splits: programs that share the pixels of a sample and a chunk of channels.
    """

    unroll: int
    splits: int


@dataclasses.dataclass(frozen=True)
class Grid:
    """The grid of one call: a tile fitted to a shape; static, so that a kernel can close over it.

    A program is one warpgroup. It owns `chunk` channels of one part of one sample, and iterates
    over its split of the pixels in steps of `unroll` register tiles of `rows` pixels. In a register
    tile, a thread holds 16 bytes of adjacent channels of one pixel.

    Fields:
      batch: samples.
      pixels: height · width.
      parts: channels of each part.
      itemsize: bytes of an element.
      tile: the tuning options.
    """

    batch: int
    pixels: int
    parts: tuple[int, ...]
    itemsize: int
    tile: Tile

    @property
    def chunk(self) -> int:
        """Channels of a program."""
        return _chunk(self.parts)

    @property
    def vector(self) -> int:
        """Channels of a pixel that a thread holds."""
        return VECTOR_BYTES // self.itemsize

    @property
    def rows(self) -> int:
        """Pixels of a register tile."""
        return _rows(self.parts, self.itemsize)

    @property
    def chunks(self) -> int:
        """Programs along the channels."""
        return sum(self.parts) // self.chunk

    @property
    def steps(self) -> int:
        """Steps of a program."""
        tiles = ceil_div(self.pixels, self.rows)
        return ceil_div(tiles, self.tile.unroll * self.tile.splits)

    @property
    def share(self) -> int:
        """Register tiles of a split; the last splits may have fewer."""
        return self.steps * self.tile.unroll

    @property
    def programs(self) -> int:
        """Programs of the grid."""
        return self.batch * self.tile.splits * self.chunks

    @property
    def ragged(self) -> bool:
        """True if some register tile would extend past the last pixel."""
        return self.tile.splits * self.share * self.rows != self.pixels

    def split_pixels(self) -> tuple[int, ...]:
        """Returns the pixels of each split."""
        share = self.share * self.rows
        return tuple(max(0, min(share, self.pixels - i * share)) for i in range(self.tile.splits))

    def place(self, program: Index) -> tuple[Index, Index, Index]:
        """Returns a program's sample, split and chunk.

        Neighbouring programs have adjacent channels, so that together they read whole rows of
        device memory.
        """
        chunks, splits = jnp.int32(self.chunks), jnp.int32(self.tile.splits)
        rest = lax.div(program, chunks)
        return lax.div(rest, splits), lax.rem(rest, splits), lax.rem(program, chunks)


def supports(parts: Sequence[Shaped], groups: int = 32) -> str | None:
    """Returns None if the kernels accept these parts of an image, else the reason.

    Args:
      groups: for kernels without groups, the default of 32, which adds no condition.
    """
    first = parts[0]
    if first.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f'x: expected bfloat16, float16 or float32, found {first.dtype}'
    channels = tuple(part.shape[-1] for part in parts)
    if not all(channels) or any(c % 32 for c in channels):
        return f'channels: expected multiples of 32 in every part, found {channels}'
    if sum(channels) > MAX_CHANNELS:
        return f'channels: expected at most {MAX_CHANNELS} in all, found {channels}'
    if groups % LANES and LANES % groups:
        return f'groups: expected a divisor or a multiple of {LANES}, found {groups}'
    batch, height, width, _ = first.shape
    least = _rows(channels, jnp.dtype(first.dtype).itemsize)
    if not batch or height * width < least:
        return f'x: expected at least one sample of {least} pixels, found shape {first.shape}'
    return None


def choose_tile(shape: Grid, tensors: int) -> Tile:
    """Returns the tile of a kernel: enough programs to fill the GPU, in few splits.

    Args:
      shape: a grid, whose tile is ignored.
      tensors: images that the kernel reads.
    """
    tiles = ceil_div(shape.pixels, shape.rows)
    unroll = min(8 // tensors, 1 << (tiles.bit_length() - 1))
    wanted = PROGRAMS * multiprocessors() // (shape.batch * shape.chunks)
    splits = min(max(1, wanted), tiles // unroll)
    return Tile(unroll, 1 << (splits.bit_length() - 1))


def grid(parts: Sequence[Shaped], tensors: int, tile: Tile | None = None) -> Grid:
    """Returns the grid of a kernel that reads `tensors` images.

    Args:
      tile: None takes `choose_tile`.

    Raises:
      ValueError: `supports` refuses the parts; the message says why.
    """
    if reason := supports(parts):
        raise ValueError(f'group_norm on Hopper: {reason}')
    batch, height, width, _ = parts[0].shape
    channels = tuple(part.shape[-1] for part in parts)
    size = jnp.dtype(parts[0].dtype).itemsize
    shape = Grid(batch, height * width, channels, size, tile or Tile(1, 1))
    return shape if tile else dataclasses.replace(shape, tile=choose_tile(shape, tensors))


def _chunk(parts: Sequence[int]) -> int:
    return 64 if all(c % 64 == 0 for c in parts) else 32


def _rows(parts: Sequence[int], itemsize: int) -> int:
    return THREADS * VECTOR_BYTES // itemsize // _chunk(parts)
