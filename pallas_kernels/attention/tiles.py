"""How the Triton attention kernels cut their work: tiles, the candidates for tuning, and the choice."""

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
    """One kernel's tile: query rows and key rows held at a time, warps a program, and stages of the load pipeline.

    `queries` and `keys` are powers of two, at least 16 (the tensor cores' smallest tile). In the one-kernel `backward` a program holds
    all the keys of a head, so there `keys` is at least the number of tokens. With a `split` of 2, two programs of `backward_dkv` share
    a block of keys: one computes dk, the other dv. Both compute the logits, but wide heads leave registers for one result only.
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
    """The tiles of one call. `backward` is one kernel's tile, or those of the two kernels (dq, dk and dv)."""

    forward: Tile
    backward: Tile | tuple[Tile, Tile]


# For heads up to this width and up to so many tokens, where the device's table has no tile: what was fastest on an H200 in bfloat16 at
# batch 32, at tokens x width of 64x32, 256x32, 256x64, 1024x64, 1024x128 and 256x256; other sizes and types take their neighbour's.
NEIGHBOURS: dict[str, tuple[tuple[int, int, Tile], ...]] = {
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


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n and 16."""
    return max(16, 1 << (n - 1).bit_length())


def shared_memory() -> int:
    """Bytes of shared memory that a program may have on this process's default device; Hopper's where that is not a GPU."""
    capability = str(getattr(jax.devices()[0], 'compute_capability', '9.0'))
    return {'8.0': 163, '8.7': 163, '9.0': 227, '10.0': 227, '10.3': 227}.get(capability, 99) * 1024


def _held_and_streamed(kernel: str, tile: Tile) -> tuple[int, int]:
    """Rows that a program keeps, and rows that pass by."""
    return (
        (tile.queries, tile.keys)
        if kernel in ('forward', 'backward_dq')
        else (tile.keys, tile.queries)
    )


def _shared_bytes(kernel: str, tile: Tile, width: int, dtype: DTypeLike) -> int:
    """An estimate from above of the shared memory that the compiler takes; float32 products are done with three parts."""
    held, streamed = _held_and_streamed(kernel, tile)
    size = jnp.dtype(dtype).itemsize
    operands = (
        width * (2 * streamed * tile.stages + held * (1 if kernel == 'forward' else 2))
        + held * streamed
    )
    return operands * size * (3 if size == 4 else 1)


def _fit(kernel: str, tile: Tile, tokens: int, width: int, dtype: DTypeLike, shared: int) -> Tile:
    """The tile with no more rows than there are, and fewer stages or rows until it fits the shared memory."""
    most = power_of_two(tokens)
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
    """What the table of tiles calls this size: both rounded up to powers of two."""
    return f'{power_of_two(tokens)} tokens, {power_of_two(width)} wide'


def default_tile(
    kernel: str, tokens: int, width: int, dtype: DTypeLike, *, shared: int | None = None
) -> Tile:
    """The tile for one of KERNELS, made to fit `shared` bytes of shared memory (those of this process's device if None).

    It is the device's measured one, or else that of the nearest size measured on an H200.
    """
    if kernel not in KERNELS:
        raise ValueError(f'attention: kernel {kernel!r}: expected one of {", ".join(KERNELS)}')
    width = power_of_two(width)
    tile = tile_table.measured(Tile, f'attention/{kernel}', dtype, shape_class(tokens, width))
    if tile is None:
        tile = next(
            tile for widest, most, tile in NEIGHBOURS[kernel] if width <= widest and tokens <= most
        )
    return _fit(kernel, tile, tokens, width, dtype, shared_memory() if shared is None else shared)


def default_tiles(tokens: int, width: int, dtype: DTypeLike, *, shared: int | None = None) -> Tiles:
    """The tiles of a call. Backward takes one kernel or two: what is faster by the device's table, else one for up to 64 tokens."""
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
        single = tokens <= 64 and power_of_two(width) * jnp.dtype(dtype).itemsize <= 256
    return Tiles(forward, one if single else (dq, dkv))


def candidates(kernel: str, tokens: int, width: int, dtype: DTypeLike) -> list[Tile]:
    """Tiles worth timing for one of KERNELS at this size: those whose accumulators and operands have a chance to fit a Hopper SM."""
    if kernel not in KERNELS:
        raise ValueError(f'attention: kernel {kernel!r}: expected one of {", ".join(KERNELS)}')
    padded, width = power_of_two(tokens), power_of_two(width)
    rows = [n for n in (32, 64, 128) if n <= padded] or [padded]
    wide = (
        [*rows, 256] if padded == 256 and kernel in ('forward', 'backward_dq') else rows
    )  # all keys at once
    found = []
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
        if _shared_bytes(kernel, tile, width, dtype) <= 240 * 1024:
            found.append(tile)
    return found
