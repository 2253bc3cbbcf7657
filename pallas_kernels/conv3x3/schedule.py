"""The arithmetic of the Hopper 3×3 convolution: which pixels, channels, taps and ring slots each step of the kernel touches.

Plain functions of integers, which the kernel calls with traced int32 scalars and the tests with Python's.

An image is cut into strips of 8 columns × `rows` rows. A program computes one *tile* at a time: `groups` strips (one a compute
warpgroup) × `features` output channels. It walks through the tile's *steps*, one chunk of 64 input channels each: first the
convolution's chunks (nine taps each), then the residual's (centre tap only). Strips wait in `slots` shared-memory slots a warpgroup,
weights in a ring of `ring` slots of `taps` taps each, or all of them stay resident (`ring` = 0).
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
from jax import lax

Index = TypeVar('Index', int, jax.Array)

TAPS = 9
CHUNK = 64  # channels of one step: a shared-memory row of 128 bytes in 16-bit types
STRIP_COLUMNS = 8  # one row of a strip is one 8-row swizzle atom of a wgmma operand
HALO_COLUMNS = STRIP_COLUMNS + 2
SHARED_BYTES = 227 * 1024  # a Hopper CTA's limit
BARRIER_BYTES = 2048  # barriers, scratch and alignment, generously
LOADING_REGISTERS = 40
MULTIPROCESSORS = 132  # of an H100 or H200 SXM; on fewer the programs beyond run in a second wave


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tuning options of one shape.

    Fields:
      rows: image rows of a strip; a strip has 8 · rows pixels.
      features: output channels of a tile.
      groups: compute warpgroups, one strip each.
      slots: strips in flight per warpgroup.
      taps: taps in one slot of the weight ring (1, 3 or 9).
      ring: slots of the weight ring; 0 keeps all weights in shared memory, for which one tile must hold all output channels.
      transposed: compute the transposed product, pixels as wgmma's N. Reads less shared memory per product where features = 64.
      activators: warpgroups that apply an affine activation.
    """

    rows: int
    features: int
    groups: int = 2
    slots: int = 2
    taps: int = 3
    ring: int = 3
    transposed: bool = False
    activators: int = 1


def quotient(a: Index, b: int) -> Index:
    """a // b of non-negative integers."""
    return a // b if isinstance(a, int) else lax.div(a, b)


def remainder(a: Index, b: int) -> Index:
    """a % b of non-negative integers."""
    return a % b if isinstance(a, int) else lax.rem(a, b)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A tile applied to one shape.

    Fields:
      chunks: steps of nine taps.
      extras: steps of the centre tap alone.
      itemsize: bytes of an output value.
      activated: whether an affine activation is applied to the input.
    """

    batch: int
    height: int
    width: int
    chunks: int
    extras: int
    features: int
    itemsize: int
    tile: Tile
    activated: bool = False

    # --- sizes ---
    @property
    def pixels(self) -> int:
        """Pixels of a strip."""
        return self.tile.rows * STRIP_COLUMNS

    @property
    def halo_rows(self) -> int:
        """Image rows in one slot: the strip's, one more above and below, and padding that keeps slots aligned to 1024 bytes."""
        return ceil_div(self.tile.rows + 2, 4) * 4

    @property
    def strips_down(self) -> int:
        return ceil_div(self.height, self.tile.rows)

    @property
    def strips_across(self) -> int:
        return ceil_div(self.width, STRIP_COLUMNS)

    @property
    def strips(self) -> int:
        return self.batch * self.strips_down * self.strips_across

    @property
    def feature_tiles(self) -> int:
        return ceil_div(self.features, self.tile.features)

    @property
    def tiles(self) -> int:
        return ceil_div(self.strips, self.tile.groups) * self.feature_tiles

    @property
    def programs(self) -> int:
        """CTAs of the persistent grid; program p computes tiles p, p + programs, ..."""
        return min(self.tiles, MULTIPROCESSORS)

    @property
    def steps(self) -> int:
        """Steps of one tile."""
        return self.chunks + self.extras

    @property
    def loads_per_chunk(self) -> int:
        """Weight-ring slots that a nine-tap step uses; a residual's step uses one."""
        return TAPS // self.tile.taps

    @property
    def loads(self) -> int:
        """Weight-ring slots that one tile uses."""
        return self.chunks * self.loads_per_chunk + self.extras

    @property
    def resident(self) -> bool:
        return self.tile.ring == 0

    @property
    def ping_pong(self) -> bool:
        """Whether two warpgroups take turns step by step, so that one's epilogue overlaps the other's products.

        Not with a weight ring, which could wait for the warpgroup without the turn to free a slot.
        """
        return self.resident and self.tile.groups == 2

    @property
    def weight_blocks(self) -> int:
        """(features, 64) blocks of weights in shared memory."""
        return (
            self.chunks * TAPS + self.extras if self.resident else self.tile.ring * self.tile.taps
        )

    @property
    def store_columns(self) -> int:
        """Output channels of one store: the widest shared-memory row, of 128, 64 or 32 bytes, that divides the tile's."""
        widths = [row // self.itemsize for row in (128, 64, 32)]
        return next((width for width in widths if self.tile.features % width == 0), widths[-1])

    @property
    def stores(self) -> int:
        """Stores of one strip."""
        return self.tile.features // self.store_columns

    @property
    def store_slots(self) -> int:
        """Store buffers of a warpgroup: one for every store where they fit, else one that is reused."""
        room = SHARED_BYTES - BARRIER_BYTES - self._operand_bytes
        every = self.tile.groups * self.stores * self._store_bytes
        return self.stores if every <= room else 1

    @property
    def activators(self) -> int:
        return self.tile.activators if self.activated else 0

    @property
    def warpgroups(self) -> int:
        """Computing ones, then one that loads, then activating ones."""
        return self.tile.groups + 1 + self.activators

    @property
    def launch_registers(self) -> int:
        """Registers a thread at launch. What warpgroups take beyond must have been given up by others, or they wait forever."""
        return min(65536 // (128 * self.warpgroups) // 8 * 8, 232)

    @property
    def activating_registers(self) -> int:
        return 96 if self.activators < 2 else 80

    @property
    def computing_registers(self) -> int:
        spare = (
            self.warpgroups * self.launch_registers
            - LOADING_REGISTERS
            - self.activators * self.activating_registers
        )
        return min(spare // self.tile.groups // 8 * 8, 232)

    @property
    def _operand_bytes(self) -> int:
        strips = self.tile.groups * self.tile.slots * self.halo_rows * HALO_COLUMNS * CHUNK * 2
        return strips + self.weight_blocks * self.tile.features * CHUNK * 2

    @property
    def _store_bytes(self) -> int:
        return self.pixels * self.store_columns * self.itemsize

    @property
    def shared_bytes(self) -> int:
        return (
            self._operand_bytes
            + self.tile.groups * self.store_slots * self._store_bytes
            + BARRIER_BYTES
        )

    # --- positions ---
    def local_tiles(self, program: Index) -> Index:
        """How many tiles a program computes."""
        return quotient(self.tiles - 1 - program, self.programs) + 1

    def tile_at(self, program: Index, i: Index) -> tuple[Index, Index]:
        """(first strip, first output channel) of a program's tile i. Programs side by side share pixels, so that L2 serves them once."""
        t = program + i * self.programs
        return quotient(t, self.feature_tiles) * self.tile.groups, remainder(
            t, self.feature_tiles
        ) * self.tile.features

    def strip_at(self, strip: Index) -> tuple[Index, Index, Index]:
        """(sample, first row, first column). A strip past the last lies in no sample: its loads read zeros, its stores are clipped."""
        each = self.strips_down * self.strips_across
        sample, rest = quotient(strip, each), remainder(strip, each)
        return (
            sample,
            quotient(rest, self.strips_across) * self.tile.rows,
            remainder(rest, self.strips_across) * STRIP_COLUMNS,
        )

    # Strips and weight loads are numbered through a program's life; number n lies in slot n mod slots, as that slot's use n div slots.
    # Use u of a slot may be written once use u − 1 was read.
    def strip_number(self, i: Index, step: Index) -> Index:
        """Of a step of a program's tile i, the same for every warpgroup."""
        return i * self.steps + step

    def load_number(self, i: Index, step: Index, load: int) -> Index:
        """Of a nine-tap step's weight load."""
        return i * self.loads + step * self.loads_per_chunk + load

    def extra_load_number(self, i: Index, step: Index) -> Index:
        """Of a residual step's weight load."""
        return i * self.loads + self.chunks * self.loads_per_chunk + step - self.chunks

    def resident_block(self, step: Index, *, extra: bool = False) -> Index:
        """The first block of a step's weights where all stay resident."""
        return self.chunks * (TAPS - 1) + step if extra else step * TAPS

    def slot(self, strip_number: Index) -> tuple[Index, Index]:
        """(use, slot) of a strip."""
        return quotient(strip_number, self.tile.slots), remainder(strip_number, self.tile.slots)

    def ring(self, load_number: Index) -> tuple[Index, Index]:
        """(use, slot) of a weight load."""
        return quotient(load_number, self.tile.ring), remainder(load_number, self.tile.ring)

    def problem(self) -> str | None:
        """Why the tile cannot compute this shape, or None."""
        tile = self.tile
        if (
            min(tile.rows, tile.features) < 1
            or tile.groups not in (1, 2, 3)
            or tile.taps not in (1, 3, 9)
            or tile.activators not in (1, 2)
        ):
            return f'{tile}: rows and features must be at least 1, groups 1, 2 or 3, taps 1, 3 or 9, activators 1 or 2'
        if tile.slots < 2 or tile.ring < 0 or tile.ring == 1:
            return f'{tile}: a slot is freed once the next is in use, so slots must be at least 2, and ring at least 2 or 0'
        rows_of_a, columns = (
            (tile.features, self.pixels) if tile.transposed else (self.pixels, tile.features)
        )
        if rows_of_a % 64 or columns % 8 or columns > 256:
            return f'{tile}: wgmma needs an M of whole 64s and an N of at most 256, found {rows_of_a} and {columns}'
        if tile.features % self.store_columns:
            return f'{tile}: features must be a multiple of {self.store_columns}'
        if tile.transposed and self.store_columns % 64:
            return f'{tile}: transposed products are stored 64 channels at a time, which needs whole 64s of a 16-bit type'
        if self.resident and self.features != tile.features:
            return f'{tile}: resident weights need a tile of exactly the {self.features} output channels'
        if rows_of_a // 64 * columns // 2 + 40 > self.computing_registers:
            return f'{tile}: the accumulators of a warpgroup would not fit its {self.computing_registers} registers'
        if self.shared_bytes > SHARED_BYTES:
            return f'{tile}: needs {self.shared_bytes} bytes of shared memory, {SHARED_BYTES} are there'
        return None


def tap_offset(tap: int) -> tuple[int, int]:
    """(row, column) of a tap in the haloed strip: where the strip's first pixel finds that neighbour."""
    return divmod(tap, 3)


@dataclasses.dataclass(frozen=True)
class Source:
    """Consecutive chunks that one input array contributes.

    Fields:
      array: which of the kernel's inputs.
      first: its first step.
      steps: how many.
      weight: where its channels start in the weights' last dimension.
      follows_tile: whether its channels start at the tile's output channels (a residual without shortcut).
    """

    array: int
    first: int
    steps: int
    weight: int
    follows_tile: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule and what its steps read.

    Fields:
      sources: of the nine-tap steps.
      extras: of the residual's steps.
      arrays: how many inputs there are: the parts (split: their high, then their low halves), then the residual's in the same way
        (split and without shortcut: its three terms).
      outputs_first: weights lie as (taps, output channels, input channels), not (taps, input channels, output channels).
      flipped: the last tap comes first.
    """

    schedule: Schedule
    sources: tuple[Source, ...]
    extras: tuple[Source, ...]
    arrays: int
    outputs_first: bool
    flipped: bool


def plan(
    image: tuple[int, int, int],
    channels: tuple[int, ...],
    features: int,
    tile: Tile,
    *,
    residual: tuple[int, ...] = (),
    shortcut: bool = False,
    split: bool = False,
    flipped: bool = False,
    activated: bool = False,
    itemsize: int = 2,
) -> Plan:
    """The steps of conv3x3 for inputs whose parts have these channels.

    Args:
      image: batch, height, width.
      residual: channels of what is added, as the centre tap of its own chunks times a matrix: of the parts that a shortcut projects,
        or one array of `features` channels, which the identity copies.
      split: float32 as bfloat16 terms, x = high + low: high · high + high · low + low · high, weights in the order high, low, high.
        Three terms hold a residual exactly.
      flipped: the kernel is the one whose input gradient is computed.
      activated: whether an affine activation is applied to the parts.
      itemsize: bytes of an output value.
    """
    step = arrays = 0

    def products(widths: tuple[int, ...]) -> list[Source]:
        nonlocal step, arrays
        out, weight = [], 0
        for half in (0, 0, 1) if split else (0,):
            for i, width in enumerate(widths):
                out.append(
                    Source(arrays + half * len(widths) + i, step, ceil_div(width, CHUNK), weight)
                )
                step, weight = step + out[-1].steps, weight + width
        arrays += len(widths) * (2 if split else 1)
        return out

    sources = products(channels)
    chunks = step
    extras = products(residual) if shortcut else []
    if residual and not shortcut:
        for _ in range(3 if split else 1):
            extras.append(
                Source(arrays, step, ceil_div(tile.features, CHUNK), 0, follows_tile=True)
            )
            step, arrays = step + extras[-1].steps, arrays + 1
    schedule = Schedule(*image, chunks, step - chunks, features, itemsize, tile, activated)
    # wgmma reads a matrix either way, but boxes of (input, output) channels come in whole 64s of both.
    whole = features % 64 == 0 and tile.features % 64 == 0
    return Plan(
        schedule,
        tuple(sources),
        tuple(extras),
        arrays,
        outputs_first=flipped or not whole,
        flipped=flipped,
    )
