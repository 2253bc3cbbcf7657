"""Tiles of the Triton attention kernels: fields, choice, and candidates for tuning."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import tile_table

KERNELS = ('forward', 'backward', 'backward_dq', 'backward_dkv')
ANY = 1 << 30


@dataclasses.dataclass(frozen=True, order=True)
class Tile:
    """The tile of one kernel.

    Fields:
      queries, keys: rows that a program holds at a time; powers of two, at least 16 (the tensor
        cores' smallest tile). The one-kernel `backward` holds all keys of a head.
      warps: of a program.
      stages: depth of the load pipeline.
      split: 2 = two programs of `backward_dkv` share a block of keys, one for dk and one for dv.
        Both compute the logits, but with wide heads the registers hold only one result.

    Raises:
      ValueError: a field is out of its range.
    """

    queries: int
    keys: int
    warps: int
    stages: int = 1
    split: int = 1

    def __post_init__(self) -> None:
        for name, value, least in (
            ('queries', self.queries, 16),
            ('keys', self.keys, 16),
            ('warps', self.warps, 1),
        ):
            if value < least or value & (value - 1):
                raise ValueError(
                    f'attention: tile {name}={value}: expected a power of two of at least {least}'
                )
        if self.stages < 1:
            raise ValueError(f'attention: tile stages={self.stages}: expected at least 1')
        if self.split not in (1, 2):
            raise ValueError(f'attention: tile split={self.split}: expected 1 or 2')


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of one call.

    Fields:
      backward: the tile of the one-kernel backward, or those of the two kernels (dq; dk and dv).
    """

    forward: Tile
    backward: Tile | tuple[Tile, Tile]


# (widest head, most tokens, tile), for sizes that are not in the device's table. They are the
# fastest on an H200 in bfloat16 at batch 32, at tokens × width of 64×32, 256×32, 256×64, 1024×64,
# 1024×128 and 256×256; other sizes take the next larger entry. To refit, run
# `pallas_kernels.attention.tune`.
DEFAULTS: dict[str, tuple[tuple[int, int, Tile], ...]] = {
    'forward': (
        (32, 64, Tile(64, 64, 4)),
        (32, ANY, Tile(128, 64, 4, 3)),
        (64, ANY, Tile(64, 64, 4, 3)),
        (128, ANY, Tile(128, 64, 4, 2)),
        (256, ANY, Tile(64, 64, 4, 2)),
    ),
    'backward': ((256, 64, Tile(64, 64, 4)), (256, ANY, Tile(64, 256, 8))),
    'backward_dq': (
        (32, 64, Tile(64, 64, 4)),
        (32, ANY, Tile(64, 32, 4, 3)),
        (128, ANY, Tile(128, 64, 8, 3)),
        (256, ANY, Tile(64, 32, 4, 3)),
    ),
    'backward_dkv': (
        (32, 64, Tile(64, 64, 4)),
        (32, ANY, Tile(32, 128, 4)),
        (64, ANY, Tile(32, 128, 4, 3)),
        (128, ANY, Tile(64, 64, 4, 2)),
        (256, ANY, Tile(64, 32, 4, 2)),
    ),
}


def dot_size(n: int) -> int:
    """Returns the smallest power of two ≥ n that a dot accepts: at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def shared_memory() -> int:
    """Returns the bytes of shared memory that a program may use on this process's device.

    Without a GPU, returns Hopper's. Source: CUDA C++ Programming Guide, technical specifications
    per compute capability.
    """
    capability = str(getattr(jax.devices()[0], 'compute_capability', '9.0'))
    return {'8.0': 163, '8.7': 163, '9.0': 227, '10.0': 227, '10.3': 227}.get(capability, 99) * 1024


def _held_and_streamed(kernel: str, tile: Tile) -> tuple[int, int]:
    """Returns the rows that a program keeps, and the rows that it streams."""
    return (
        (tile.queries, tile.keys)
        if kernel in ('forward', 'backward_dq')
        else (tile.keys, tile.queries)
    )


def _shared_bytes(kernel: str, tile: Tile, width: int, dtype: DTypeLike) -> int:
    """Returns an upper bound of the shared memory that the compiler allocates, in bytes.

    A float32 product is computed as three products of terms, which triples the operands.
    """
    held, streamed = _held_and_streamed(kernel, tile)
    size = jnp.dtype(dtype).itemsize
    operands = (
        width * (2 * streamed * tile.stages + held * (1 if kernel == 'forward' else 2))
        + held * streamed
    )
    return operands * size * (3 if size == 4 else 1)


def _fit(kernel: str, tile: Tile, tokens: int, width: int, dtype: DTypeLike, shared: int) -> Tile:
    """Limits a tile to the number of tokens, then reduces its stages or rows to fit in `shared`
    bytes.
    """
    most = dot_size(tokens)
    tile = dataclasses.replace(
        tile,
        queries=min(tile.queries, most),
        keys=most if kernel == 'backward' else min(tile.keys, most),
    )
    while _shared_bytes(kernel, tile, width, dtype) > shared:
        held, streamed = _held_and_streamed(kernel, tile)
        if tile.stages > 1:
            tile = dataclasses.replace(tile, stages=tile.stages - 1)
        elif max(tile.queries, 0 if kernel == 'backward' else tile.keys) == 16:
            break
        elif kernel == 'backward' or (streamed >= held) == (kernel == 'backward_dkv'):
            tile = dataclasses.replace(tile, queries=tile.queries // 2)
        else:
            tile = dataclasses.replace(tile, keys=tile.keys // 2)
    return tile


def shape_class(tokens: int, width: int) -> str:
    """Returns the name of this size in the table of tiles; both are rounded up to powers of two."""
    return f'{dot_size(tokens)} tokens, {dot_size(width)} wide'


def default_tile(
    kernel: str, tokens: int, width: int, dtype: DTypeLike, *, shared: int | None = None
) -> Tile:
    """Returns the tile of one of KERNELS: the one measured on this device, else from `DEFAULTS`.

    Args:
      shared: bytes of shared memory that it must fit in; None = those of this process's device.

    Raises:
      ValueError: `kernel` is not one of KERNELS.
    """
    if kernel not in KERNELS:
        raise ValueError(f'attention: kernel {kernel!r}: expected one of {", ".join(KERNELS)}')
    width = dot_size(width)
    tile = tile_table.measured(Tile, f'attention/{kernel}', dtype, shape_class(tokens, width))
    if tile is None:
        tile = next(
            tile for widest, most, tile in DEFAULTS[kernel] if width <= widest and tokens <= most
        )
    return _fit(kernel, tile, tokens, width, dtype, shared_memory() if shared is None else shared)


def default_tiles(tokens: int, width: int, dtype: DTypeLike, *, shared: int | None = None) -> Tiles:
    """Returns the tiles of a call; arguments as `default_tile`.

    Backward takes one kernel or two, whichever is faster in the device's table. Sizes without an
    entry take one kernel up to 64 tokens, if all keys of a head fit.
    """
    forward, one, dq, dkv = (
        default_tile(name, tokens, width, dtype, shared=shared) for name in KERNELS
    )
    whole, *parts = (
        tile_table.time(f'attention/{name}', dtype, shape_class(tokens, width))
        for name in KERNELS[1:]
    )
    known = [us for us in parts if us is not None]
    if whole is not None and len(known) == len(parts):
        single = whole <= sum(known)
    else:
        single = tokens <= 64 and dot_size(width) * jnp.dtype(dtype).itemsize <= 256
    return Tiles(forward, one if single else (dq, dkv))


def candidates(kernel: str, tokens: int, width: int, dtype: DTypeLike) -> list[Tile]:
    """Returns the tiles worth timing for one of KERNELS at this size.

    Their accumulators fit in the registers, and their operands in the shared memory of this device.

    Raises:
      ValueError: `kernel` is not one of KERNELS.
    """
    if kernel not in KERNELS:
        raise ValueError(f'attention: kernel {kernel!r}: expected one of {", ".join(KERNELS)}')
    padded, width = dot_size(tokens), dot_size(width)
    rows = [n for n in (32, 64, 128) if n <= padded] or [padded]
    # Blocks of 256 hold all keys at once.
    wide = [*rows, 256] if padded == 256 and kernel in ('forward', 'backward_dq') else rows
    found, shared = [], shared_memory()
    splits = (1, 2) if kernel == 'backward_dkv' and width >= 128 else (1,)
    every = itertools.product(
        rows, [padded] if kernel == 'backward' else wide, (2, 4, 8), (1, 2, 3), splits
    )
    for queries, keys, warps, stages, split in every:
        tile = Tile(queries, keys, warps, stages, split)
        held, streamed = _held_and_streamed(kernel, tile)
        accumulators = (
            held * width * (1 if kernel in ('forward', 'backward_dq') or split == 2 else 2)
        )
        scores = held * streamed * (1 if kernel == 'forward' else 2)
        registers = (accumulators + scores) / (warps * 32)
        if registers > 224 or (registers < 16 and warps > 2) or (streamed >= padded and stages > 1):
            continue
        if _shared_bytes(kernel, tile, width, dtype) <= shared:
            found.append(tile)
    return found
