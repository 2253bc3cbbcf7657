"""The scheduler of the Hopper 3×3 convolution: the pixels, channels, taps and slots of each step.

Plain functions of integers; the kernel calls them with traced int32 scalars, the tests with Python
ints.

An image is cut into strips of 8 columns × `rows` rows. A program computes one *tile* at a time:
`groups` strips (one per consumer warpgroup) × `features` output channels. It processes the tile's
*steps*, one chunk of 64 input channels each: first the convolution's chunks (nine taps each), then
the residual's chunks (centre tap only). Strips wait in `slots` shared-memory slots per consumer,
weights in a ring of `ring` slots of `taps` taps each; with `ring` = 0 all weights stay resident.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
from jax import lax

from pallas_kernels.hopper_grid import ceil_div, multiprocessors

Index = TypeVar('Index', int, jax.Array)

TAPS = 9
CHUNK = 64  # channels of one step: a shared-memory row of 128 bytes in 16-bit types
STRIP_COLUMNS = 8  # one row of a strip is one 8-row swizzle atom of a wgmma operand
HALO_COLUMNS = STRIP_COLUMNS + 2
SHARED_BYTES = 227 * 1024  # a Hopper CTA's limit
BARRIER_BYTES = 2048  # upper bound for barriers, scratch and alignment
LOADING_REGISTERS = 40  # per thread of the producer, which only computes addresses
REGISTERS = 65536  # per multiprocessor
MOST_REGISTERS = 232  # per thread; the limit is 255, and setmaxnreg counts in eights


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tuning options of one shape.

    Fields:
      rows: image rows of a strip; a strip has 8 · rows pixels.
      features: output channels of a tile.
      groups: consumer warpgroups, one strip each.
      slots: strips in flight per consumer.
      taps: taps in one slot of the weight ring (1, 3 or 9).
      ring: slots of the weight ring; 0 keeps all weights in shared memory, which needs a tile of
        all output channels.
      transposed: compute the transposed product, with the pixels as wgmma's N. It reads less shared
        memory per product when features = 64.
      activators: warpgroups that apply SiLU(a · x + b), if the convolution has an activation.
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
    """Returns a // b for non-negative integers."""
    return a // b if isinstance(a, int) else lax.div(a, b)


def remainder(a: Index, b: int) -> Index:
    """Returns a % b for non-negative integers."""
    return a % b if isinstance(a, int) else lax.rem(a, b)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A tile applied to one shape.

    Fields:
      chunks: steps of nine taps.
      extras: steps of the centre tap alone.
      itemsize: bytes of an output value.
      activated: SiLU(a · x + b) is applied to the input.
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
        """Image rows of a slot: the strip's, one above and below, padding to 1024 bytes."""
        return ceil_div(self.tile.rows + 2, 4) * 4

    @property
    def strips_down(self) -> int:
        """Strips of an image, from top to bottom."""
        return ceil_div(self.height, self.tile.rows)

    @property
    def strips_across(self) -> int:
        """Strips of an image, from left to right."""
        return ceil_div(self.width, STRIP_COLUMNS)

    @property
    def strips(self) -> int:
        """Strips of the batch."""
        return self.batch * self.strips_down * self.strips_across

    @property
    def feature_tiles(self) -> int:
        """Tiles that share the output channels of a strip."""
        return ceil_div(self.features, self.tile.features)

    @property
    def tiles(self) -> int:
        """Tiles of the whole call."""
        return ceil_div(self.strips, self.tile.groups) * self.feature_tiles

    @property
    def programs(self) -> int:
        """CTAs of the persistent grid; program p computes tiles p, p + programs, ..."""
        return min(self.tiles, multiprocessors())

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
        """True if all weights stay in shared memory."""
        return self.tile.ring == 0

    @property
    def ping_pong(self) -> bool:
        """True if two consumers take turns step by step.

        The epilogue of one then overlaps the products of the other. It is not possible with a
        weight ring, whose producer could wait for a slot that the consumer without the turn must
        free.
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
        """Output channels of a store: the widest row of 128, 64 or 32 bytes that fits the tile."""
        widths = [row // self.itemsize for row in (128, 64, 32)]
        return next((width for width in widths if self.tile.features % width == 0), widths[-1])

    @property
    def stores(self) -> int:
        """Stores of one strip."""
        return self.tile.features // self.store_columns

    @property
    def store_slots(self) -> int:
        """Store buffers of a consumer: one per store if they fit, else one that is reused."""
        room = SHARED_BYTES - BARRIER_BYTES - self._operand_bytes
        every = self.tile.groups * self.stores * self._store_bytes
        return self.stores if every <= room else 1

    @property
    def activators(self) -> int:
        """Activating warpgroups."""
        return self.tile.activators if self.activated else 0

    @property
    def warpgroups(self) -> int:
        """All warpgroups: the consumers, the producer, the activators."""
        return self.tile.groups + 1 + self.activators

    @property
    def launch_registers(self) -> int:
        """Registers per thread at launch, a multiple of eight.

        A warpgroup can take more only after others have released as many; otherwise it waits
        forever.
        """
        return min(REGISTERS // (128 * self.warpgroups) // 8 * 8, MOST_REGISTERS)

    @property
    def activating_registers(self) -> int:
        """Registers of an activator's thread: four pieces of pixels, coefficients and addresses."""
        return 96 if self.activators < 2 else 80

    @property
    def computing_registers(self) -> int:
        """Registers of a consumer's thread: the rest."""
        spare = (
            self.warpgroups * self.launch_registers
            - LOADING_REGISTERS
            - self.activators * self.activating_registers
        )
        return min(spare // self.tile.groups // 8 * 8, MOST_REGISTERS)

    @property
    def _operand_bytes(self) -> int:
        strips = self.tile.groups * self.tile.slots * self.halo_rows * HALO_COLUMNS * CHUNK * 2
        return strips + self.weight_blocks * self.tile.features * CHUNK * 2

    @property
    def _store_bytes(self) -> int:
        return self.pixels * self.store_columns * self.itemsize

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a program."""
        return (
            self._operand_bytes
            + self.tile.groups * self.store_slots * self._store_bytes
            + BARRIER_BYTES
        )

    # --- positions ---
    def local_tiles(self, program: Index) -> Index:
        """Returns the number of tiles of a program."""
        return quotient(self.tiles - 1 - program, self.programs) + 1

    def tile_at(self, program: Index, i: Index) -> tuple[Index, Index]:
        """Returns the first strip and the first output channel of a program's tile i.

        Neighbouring programs read the same pixels, which are then in L2.
        """
        t = program + i * self.programs
        return quotient(t, self.feature_tiles) * self.tile.groups, remainder(
            t, self.feature_tiles
        ) * self.tile.features

    def strip_at(self, strip: Index) -> tuple[Index, Index, Index]:
        """Returns sample, first row and first column of a strip.

        A strip past the last lies in no sample: its loads return zeros, its stores are clipped.
        """
        each = self.strips_down * self.strips_across
        sample, rest = quotient(strip, each), remainder(strip, each)
        return (
            sample,
            quotient(rest, self.strips_across) * self.tile.rows,
            remainder(rest, self.strips_across) * STRIP_COLUMNS,
        )

    # A program numbers its strips, and its weight loads, from start to end. Number n goes to slot n
    # mod slots and is that slot's use number n div slots. Use u of a slot may be written after use
    # u − 1 has been read.
    def strip_number(self, i: Index, step: Index) -> Index:
        """Returns the number of the strips of a step of tile i; the same for every consumer."""
        return i * self.steps + step

    def load_number(self, i: Index, step: Index, load: int) -> Index:
        """Returns the number of a weight load of a nine-tap step."""
        return i * self.loads + step * self.loads_per_chunk + load

    def extra_load_number(self, i: Index, step: Index) -> Index:
        """Returns the number of the weight load of a residual step."""
        return i * self.loads + self.chunks * self.loads_per_chunk + step - self.chunks

    def resident_block(self, step: Index, *, extra: bool = False) -> Index:
        """Returns the first block of a step's weights when all stay resident."""
        return self.chunks * (TAPS - 1) + step if extra else step * TAPS

    def slot(self, strip_number: Index) -> tuple[Index, Index]:
        """Returns use and slot of a strip."""
        return quotient(strip_number, self.tile.slots), remainder(strip_number, self.tile.slots)

    def ring(self, load_number: Index) -> tuple[Index, Index]:
        """Returns use and slot of a weight load."""
        return quotient(load_number, self.tile.ring), remainder(load_number, self.tile.ring)

    def problem(self) -> str | None:
        """Returns the reason why the tile cannot compute this shape; None if it can."""
        tile = self.tile
        if (
            min(tile.rows, tile.features) < 1
            or tile.groups not in (1, 2, 3)
            or tile.taps not in (1, 3, 9)
            or tile.activators not in (1, 2)
        ):
            return (
                f'{tile}: rows and features must be at least 1, groups 1, 2 or 3, taps 1, 3 or 9, '
                f'activators 1 or 2'
            )
        if tile.slots < 2 or tile.ring < 0 or tile.ring == 1:
            return (
                f'{tile}: a slot is freed once the next is in use, so slots must be at least 2, '
                f'and ring at least 2 or 0'
            )
        rows_of_a, columns = (
            (tile.features, self.pixels) if tile.transposed else (self.pixels, tile.features)
        )
        if rows_of_a % 64 or columns % 8 or columns > 256:
            return (
                f'{tile}: wgmma needs an M of whole 64s and an N of at most 256, '
                f'found {rows_of_a} and {columns}'
            )
        if tile.features % self.store_columns:
            return f'{tile}: features must be a multiple of {self.store_columns}'
        if tile.transposed and self.store_columns % 64:
            return (
                f'{tile}: transposed products are stored 64 channels at a time, '
                f'which needs whole 64s of a 16-bit type'
            )
        if self.resident and self.features != tile.features:
            return (
                f'{tile}: resident weights need a tile of exactly the {self.features} '
                f'output channels'
            )
        # In addition to the accumulators, a thread needs about 40 registers for addresses and
        # counters.
        if rows_of_a // 64 * columns // 2 + 40 > self.computing_registers:
            return (
                f'{tile}: the accumulators of a warpgroup would not fit its '
                f'{self.computing_registers} registers'
            )
        if self.shared_bytes > SHARED_BYTES:
            return (
                f'{tile}: needs {self.shared_bytes} bytes of shared memory, '
                f'{SHARED_BYTES} are there'
            )
        return None


def tap_origin(tap: int) -> tuple[int, int]:
    """Returns the row and column, 0..2, at which the pixels of tap 0..8 begin in a haloed strip."""
    return divmod(tap, 3)
