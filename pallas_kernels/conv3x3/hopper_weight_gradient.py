"""Weight gradient of the 3×3 convolution on Hopper (sm_90), in Pallas Mosaic GPU.

    dW[i, j, c, f] = Σ_{b,h,w} x[b, h+i-1, w+j-1, c] · dy[b, h, w, f]

is nine matrix products whose long dimension is the pixels. A thread block (CTA) owns 64 input × 64 output channels, all nine taps
(147 KB of float32, in registers), and a share of the pixels:

- A producer warpgroup copies strips of 8 × `rows` pixels by TMA into a ring in shared memory: dy, and x with one pixel of halo. Reads
  outside the image give zeros, so padding and images that the strips do not divide need nothing else.
- In shared memory a pixel is one row of 128 bytes (64 channels, 128-byte swizzle). Both operands of wgmma are read "transposed": channels
  are contiguous and the pixels are K.
- Three consumer warpgroups each own a row of taps. Tap (i, j) is the haloed x at a shifted address: eight pixels of an image row are one
  8-row atom and the next image row follows 10 rows later. As the stride between two 64-channel columns of the right operand is free as
  well, it is set to one pixel: one wgmma of 64 × 192 multiplies dy by the three taps of a row at once.
- With `taps` = 3 a CTA owns one row of taps, a tap in each consumer warpgroup, and x comes without the rows of halo. It loads more, but
  as there are three times as many tiles, it needs a third of the splits to fill the GPU: for small images, whose partial sums weigh most.
- The pixels are divided over `splits` CTAs whose partial sums are added by XLA in a fixed order: no atomics, the same bits in every run.
  These sums, 19 MB from 132 CTAs, are what remains to be saved at small batches. Adding them through distributed shared memory in
  clusters of 2 to 8 CTAs was slower than through L2.

float32 operands are split into two bfloat16 (x = high + low); three of the four products are kept (bf16x3). Each is right to about 2⁻¹⁷:
far better than TF32, which XLA takes for most float32 convolutions, but not float32.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import tile_table
from pallas_kernels.conv3x3 import hopper_weight_gradient_inline as inline

NAME = 'jaxunet_conv3x3_weight_gradient'

BLOCK = 64  # channels of a tile, input and output: M of wgmma, and 128 bytes of 16-bit numbers
STRIP = 8  # pixels across a strip: the rows of a swizzle atom
TAP_ROWS = 3
PROCESSORS = 132  # streaming multiprocessors of an H100 or H200; a CTA takes one of them whole
SHARED_BYTES = 227 * 1024
SHARED_RESERVED = 1024  # barriers
SPLIT_PRODUCTS = (
    (0, 0),
    (0, 1),
    (1, 0),
)  # halves of x and dy whose products count, for float32 operands


class ShapeDtype(Protocol):
    """An array, or what is known of one while tracing."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the work is cut.

    rows: image rows of a strip, a multiple of 8.
    stages: strips in flight.
    splits: CTAs that share the pixels of one output tile; each writes 147 KB of partial sums, or with 3 taps 49 KB.
    taps: of a CTA: 9, or 3 for one row of them.
    """

    rows: int
    stages: int
    splits: int
    taps: int = 9


@dataclasses.dataclass(frozen=True)
class Plan:
    """The index arithmetic of one call; methods take Python ints or traced int32."""

    tile: Tile
    batch: int
    height: int
    width: int
    widths: tuple[int, ...]  # channels of each part
    features: int
    halves: int  # 2 for float32 operands: high and low bfloat16

    @classmethod
    def of(cls, parts: Sequence[ShapeDtype], dy: ShapeDtype, tile: Tile) -> Plan:
        batch, height, width, features = dy.shape
        halves = 2 if dy.dtype == jnp.float32 else 1
        return cls(
            tile, batch, height, width, tuple(part.shape[-1] for part in parts), features, halves
        )

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        return SPLIT_PRODUCTS if self.halves == 2 else SPLIT_PRODUCTS[:1]

    @property
    def tap_groups(self) -> int:
        """CTAs that share the taps of one output tile."""
        return 9 // self.tile.taps

    @property
    def tiles(self) -> int:
        return sum(self.widths) // BLOCK * (self.features // BLOCK) * self.tap_groups

    @property
    def strips_down(self) -> int:
        return -(-self.height // self.tile.rows)

    @property
    def strips_across(self) -> int:
        return -(-self.width // STRIP)

    @property
    def strips(self) -> int:
        return self.batch * self.strips_down * self.strips_across

    @property
    def x_rows(self) -> int:
        """Image rows of x that a strip needs."""
        return self.tile.rows + (2 if self.tap_groups == 1 else 0)

    @property
    def box_rows(self) -> int:
        """Image rows of a ring slot of x, so many that slots begin at multiples of 1024 bytes."""
        return -(-self.x_rows // 4) * 4

    @property
    def shared_bytes(self) -> int:
        pixels = self.box_rows * (STRIP + 2) + self.tile.rows * STRIP
        return self.tile.stages * self.halves * pixels * BLOCK * 2

    def share(self, split: Any) -> tuple[Any, Any]:
        """First strip of a split, and how many it has; sizes differ by at most one."""
        size, longer = divmod(self.strips, self.tile.splits)

        def first(split: Any) -> Any:
            return split * size + (
                min(split, longer) if isinstance(split, int) else lax.min(split, jnp.int32(longer))
            )

        return first(split), first(split + 1) - first(split)

    def strip_origin(self, strip: Any) -> tuple[Any, Any, Any]:
        """Sample, image row and column of a strip's first pixel of dy; x's box begins one pixel up and left of it."""
        sample, rest = _divmod(strip, self.strips_down * self.strips_across)
        down, across = _divmod(rest, self.strips_across)
        return sample, down * self.tile.rows, across * STRIP

    def cta(self, index: Any) -> tuple[Any, Any, Any, Any]:
        """Split, first input and output channel, and row of taps of a CTA (0 if it has all). Neighbours share pixels, so L2 has them."""
        split, tile = _divmod(index, self.tiles)
        block, tap_row = _divmod(tile, self.tap_groups)
        x_block, dy_block = _divmod(block, self.features // BLOCK)
        return split, x_block * BLOCK, dy_block * BLOCK, tap_row

    def first_row(self, row: Any, tap_row: Any) -> Any:
        """First image row of x's box, given that of dy's."""
        return row - 1 + tap_row

    def of_warpgroup(self, warpgroup: Any, tap_row: Any) -> tuple[Any, Any, Any]:
        """Row and column in x's box at which a consumer warpgroup's taps begin, and the first of its taps."""
        if self.tap_groups == 1:
            return warpgroup, 0 * warpgroup, 3 * warpgroup
        return 0 * warpgroup, warpgroup, 3 * tap_row + warpgroup


def _divmod(a: Any, b: int) -> tuple[Any, Any]:
    """Of numbers that are not negative (what `//` adds for negative ones costs instructions)."""
    if isinstance(a, int):
        return divmod(a, b)
    return lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b))


def supports(parts: Sequence[ShapeDtype], dy: ShapeDtype, tile: Tile | None = None) -> str | None:
    """None where `weight_gradient` can run, else the reason why not, from shapes and dtypes alone (the device is not looked at)."""
    if not parts:
        return 'parts: expected at least one array, found none'
    if len(dy.shape) != 4:
        return f'dy: expected (batch, height, width, features), found shape {dy.shape}'
    if dy.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f'dy: expected bfloat16, float16 or float32, found {dy.dtype}'
    for i, part in enumerate(parts):
        if part.shape[:-1] != dy.shape[:-1]:
            return f'parts[{i}]: expected batch, height and width of dy {dy.shape[:-1]}, found {part.shape[:-1]}'
        if part.dtype != dy.dtype:
            return f'parts[{i}]: expected the dtype of dy, {dy.dtype}, found {part.dtype}'
        if part.shape[-1] % BLOCK or not part.shape[-1]:
            return f'parts[{i}]: expected channels in multiples of {BLOCK}, found {part.shape[-1]}'
    if dy.shape[-1] % BLOCK or not dy.shape[-1]:
        return f'dy: expected features in multiples of {BLOCK}, found {dy.shape[-1]}'
    if 0 in dy.shape:
        return f'dy: expected at least one pixel, found shape {dy.shape}'
    if 2 * math.prod(dy.shape[:-1]) >= 2**31:
        return f'dy: expected fewer than 2^30 pixels, found shape {dy.shape}'
    if tile is None:
        return None
    plan = Plan.of(parts, dy, tile)
    if tile.rows % 8 or tile.rows < 8 or tile.rows > 248:
        return f'tile.rows: expected a multiple of 8 from 8 to 248, found {tile.rows}'
    if tile.stages < 1 or plan.shared_bytes > SHARED_BYTES - SHARED_RESERVED:
        limit = SHARED_BYTES - SHARED_RESERVED
        return f'tile.stages={tile.stages}: expected at least 1, and at most {limit} bytes of ring, found {plan.shared_bytes}'
    if tile.taps not in (3, 9):
        return f'tile.taps: expected 3 or 9, found {tile.taps}'
    if not 1 <= tile.splits <= plan.strips:
        return f'tile.splits: expected from 1 to {plan.strips} (the strips), found {tile.splits}'
    return None


def default_tile(parts: Sequence[ShapeDtype], dy: ShapeDtype) -> Tile:
    """The tile that a rough model of the time prefers, for shapes that nobody tuned."""
    stages = 4 if dy.dtype == jnp.float32 else 8
    plan = Plan.of(parts, dy, Tile(8, stages, 1))

    def microseconds(splits: int) -> float:
        # Measured on an H200: 0.7 to multiply a strip, 5 to start a CTA and to store its sums, 0.03 to add them to the others'.
        ctas = plan.tiles * splits
        waves = -(-ctas // PROCESSORS)
        strips = -(-plan.strips // splits) * len(plan.products)
        return waves * (0.7 * strips + 5) + (0.03 * ctas if splits > 1 else 0)

    return Tile(8, stages, min(range(1, min(plan.strips, PROCESSORS) + 1), key=microseconds))


def shape_class(parts: Sequence[ShapeDtype], dy: ShapeDtype) -> str:
    """What the table of tiles calls these shapes."""
    return f'{"x".join(map(str, dy.shape[:-1]))}, {"+".join(str(part.shape[-1]) for part in parts)} to {dy.shape[-1]}'


def choose_tile(parts: Sequence[ShapeDtype], dy: ShapeDtype) -> Tile:
    """The device's measured tile of these shapes, else `default_tile`."""
    return tile_table.measured(
        Tile, 'conv3x3/hopper_weight_gradient', dy.dtype, shape_class(parts, dy)
    ) or default_tile(parts, dy)


def candidates(parts: Sequence[ShapeDtype], dy: ShapeDtype) -> list[Tile]:
    """Tiles worth measuring for these shapes, the default first."""
    first = default_tile(parts, dy)
    found = [first]
    full = PROCESSORS // Plan.of(parts, dy, first).tiles
    every = [*itertools.product((8, 16), (first.splits, first.splits // 2, full, 2 * full), (9,))]
    every += itertools.product((8, 16), {full // 3, -(-full // 3)}, (3,))
    for rows, splits, taps in every:
        for stages in range(8, 1, -1):
            tile = Tile(rows, stages, splits, taps)
            if supports(parts, dy, tile) is None:
                found.append(tile)
                break
    return list(dict.fromkeys(found))


def weight_gradient(
    parts: tuple[Float[Array, 'batch height width _'], ...],
    dy: Float[Array, 'batch height width features'],
    *,
    tile: Tile | None = None,
) -> Float[Array, '3 3 channels features']:
    """dW[i, j, c, f] = Σ_{b,h,w} x[b, h+i-1, w+j-1, c] · dy[b, h, w, f], float32, where x is `parts` joined along channels.

    `parts` are read where they are. The same inputs give the same bits.

    Raises:
      ValueError: shapes, dtypes or a tile that `supports` refuses.
    """
    _require(supports(parts, dy))
    tile = tile or choose_tile(parts, dy)
    _require(supports(parts, dy, tile))
    return _weight_gradient(parts, dy, tile)


@functools.partial(
    jax.jit, static_argnums=2
)  # so that equal calls share one trace and one lowering
def _weight_gradient(parts: tuple[Array, ...], dy: Array, tile: Tile) -> Array:
    plan = Plan.of(parts, dy, tile)
    if plan.halves == 2:
        parts, dy = tuple(map(split_float32, parts)), split_float32(dy)
    partial = _partial_sums(plan, parts, dy)
    total = partial[0] if tile.splits == 1 else jnp.sum(partial, axis=0)
    return total.reshape(3, 3, *total.shape[1:])


def _require(refusal: str | None) -> None:
    if refusal:
        raise ValueError(f'weight_gradient: {refusal}')


def split_float32(
    x: Float[Array, 'batch height width channels'],
) -> Float[Array, '2*batch height width channels']:
    """High and low bfloat16 of x, one after the other along the batch."""
    # reduce_precision, as XLA may drop a conversion to bfloat16 and back, and with it the low half.
    high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return jnp.concatenate([high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)])


def _partial_sums(
    plan: Plan,
    parts: Sequence[Float[Array, 'batch height width _']],
    dy: Float[Array, 'batch height width features'],
) -> Float[Array, 'splits 9 channels features']:
    tile = plan.tile
    shape = (tile.splits, 9, sum(plan.widths), plan.features)

    def body(*refs: Any) -> None:
        x_refs, (dy_ref, out_ref, x_ring, dy_ring, full, empty) = (
            refs[: len(parts)],
            refs[len(parts) :],
        )
        split, x_channel, dy_channel, tap_row = plan.cta(lax.axis_index('cta'))
        first, count = plan.share(split)
        warpgroup = lax.axis_index('warpgroup')

        def load(step: Any, slot: Any) -> None:
            sample, row, column = plan.strip_origin(first + step)
            for half in range(plan.halves):
                image = sample + half * plan.batch
                plgpu.copy_gmem_to_smem(
                    dy_ref.at[
                        image, pl.ds(row, tile.rows), pl.ds(column, STRIP), pl.ds(dy_channel, BLOCK)
                    ],
                    dy_ring.at[slot, half],
                    full.at[slot],
                )
                ends = itertools.accumulate(plan.widths)
                for x_ref, width, end in zip(x_refs, plan.widths, ends, strict=True):
                    start = end - width

                    @pl.when((x_channel >= start) & (x_channel < end))
                    def _(
                        x_ref: Any = x_ref, start: int = start, half: int = half, image: Any = image
                    ) -> None:
                        plgpu.copy_gmem_to_smem(
                            x_ref.at[
                                image,
                                pl.ds(plan.first_row(row, tap_row), plan.x_rows),
                                pl.ds(column - 1, STRIP + 2),
                                pl.ds(x_channel - start, BLOCK),
                            ],
                            x_ring.at[slot, half, pl.ds(0, plan.x_rows)],
                            full.at[slot],
                        )

        @pl.when(warpgroup == TAP_ROWS)
        def _produce() -> None:
            plgpu.set_max_registers(32, action='decrease')

            @pl.loop(0, count)
            def _(step: Any) -> None:
                slot = lax.rem(step, jnp.int32(tile.stages))

                @pl.when(step >= tile.stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                load(step, slot)

        @pl.when(warpgroup < TAP_ROWS)
        def _consume() -> None:
            plgpu.set_max_registers(160, action='increase')
            taps = tile.taps // TAP_ROWS
            multiply = inline.multiply_taps(tile.rows, STRIP + 2, BLOCK, taps, plan.products)
            box_row, box_column, first_tap = plan.of_warpgroup(warpgroup, tap_row)

            def step(i: Any, total: Any) -> Any:
                slot = lax.rem(i, jnp.int32(tile.stages))
                plgpu.barrier_wait(full.at[slot])
                total = multiply(box_row, box_column, x_ring.at[slot], dy_ring.at[slot], total)
                plgpu.barrier_arrive(empty.at[slot])
                return total

            zero = plgpu.layout_cast(
                jnp.zeros((BLOCK, taps * BLOCK), jnp.float32), inline.ACCUMULATOR
            )
            total = lax.fori_loop(0, count, step, zero)
            for tap in range(taps):
                target = out_ref.at[
                    split, first_tap + tap, pl.ds(x_channel, BLOCK), pl.ds(dy_channel, BLOCK)
                ]
                inline.store_transposed(target, total[:, tap * BLOCK : (tap + 1) * BLOCK])

    ring = functools.partial(plgpu.SMEM, dtype=parts[0].dtype, transforms=(inline.SWIZZLE,))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=[
            ring((tile.stages, plan.halves, plan.box_rows, STRIP + 2, BLOCK)),
            ring((tile.stages, plan.halves, tile.rows, STRIP, BLOCK)),
            plgpu.Barrier(num_barriers=tile.stages, num_arrivals=2 * plan.halves),
            plgpu.Barrier(num_barriers=tile.stages, num_arrivals=TAP_ROWS),
        ],
        grid=(plan.tiles * tile.splits,),
        grid_names=('cta',),
        num_threads=TAP_ROWS + 1,
        thread_name='warpgroup',
        kernel_name=NAME,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(*parts, dy)
