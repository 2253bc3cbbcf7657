"""Weight gradient of the 3×3 convolution on Hopper (sm_90): a split-K GEMM over the pixels.

    dW[i, j, c, f] = Σ_{b,h,w} x[b, h+i-1, w+j-1, c] · dy[b, h, w, f]

is nine matrix products whose K is the pixels. A CTA owns 64 input × 64 output channels, all nine
taps (147 KB of float32 accumulators, in registers), and a share of the pixels.

    global memory     shared memory                           registers

    x, dy  --TMA-->   ring of `stages` stages, a strip   -->  consumers (3), a row of taps each:
                      of 8 × `rows` pixels each: dy,          wgmma
                      and x with one pixel of halo              |
      producer (1)                                              v
                                                              partial sums (to global memory)

    barrier  of       arrives (arrivals)                       waits
    full     a stage  TMA (1 for dy, 1 for x, of each half)    the consumers
    empty    a stage  every consumer, after its products (3)   the producer, from the second use on

- Reads outside the image return zeros, which handles padding and images that are not multiples of
  a strip.
- In shared memory a pixel is one row of 128 bytes (64 channels, 128-byte swizzle). Both operands of
  wgmma are MN-major: channels are contiguous and the pixels are K. Tap (i, j) is the haloed x at
  a shifted address: eight pixels of an image row are one 8-row atom, and the next image row follows
  10 rows later. The stride between two 64-channel columns of the right operand is free as well. It
  is set to one pixel, so that one wgmma of 64 × 192 multiplies dy by the three taps of a row at
  once.
- With `taps` = 3 a CTA owns one row of taps, one tap per consumer, and x is loaded without the halo
  rows. This loads more in total, but there are three times as many tiles, so a third of the splits
  fill the GPU. It suits small images, for which the partial sums cost most.
- Split-K: the pixels are divided over `splits` CTAs. XLA adds their partial sums in a fixed order,
  without atomics, so every run gives the same bits. This reduction goes through L2, which is faster
  than distributed shared memory.

float32 operands are split into two bfloat16 (x = high + low); three of the four products are kept
(bf16x3). Their relative error is about 2⁻¹⁷: far better than TF32, which XLA uses for most float32
convolutions, but worse than float32.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxunet.ops.terms import bfloat16_terms
from pallas_kernels import tile_table
from pallas_kernels.conv3x3 import hopper_weight_gradient_inline as inline
from pallas_kernels.conv3x3.hopper_weight_gradient_plan import (
    BLOCK,
    STRIP,
    TAP_ROWS,
    SplitKGrid,
    Tile,
)
from pallas_kernels.conv3x3.schedule import SHARED_BYTES
from pallas_kernels.hopper_grid import multiprocessors
from pallas_kernels.jax_modules import mosaic_gpu as plgpu
from pallas_kernels.types import Index, Ref, Shaped

NAME = 'jaxunet_conv3x3_weight_gradient'
SHARED_RESERVED = 1024  # bytes, for barriers
PRODUCER_REGISTERS = 32  # per thread
CONSUMER_REGISTERS = 160  # per thread: 96 accumulators, and addresses


def supports(parts: Sequence[Shaped], dy: Shaped, tile: Tile | None = None) -> str | None:
    """Returns None if `weight_gradient` can run, else the reason. Reads only shapes and dtypes."""
    if not parts:
        return 'parts: expected at least one array, found none'
    if len(dy.shape) != 4:
        return f'dy: expected (batch, height, width, features), found shape {dy.shape}'
    if dy.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f'dy: expected bfloat16, float16 or float32, found {dy.dtype}'
    for i, part in enumerate(parts):
        if part.shape[:-1] != dy.shape[:-1]:
            return (
                f'parts[{i}]: expected batch, height and width of dy {dy.shape[:-1]}, '
                f'found {part.shape[:-1]}'
            )
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
    grid = SplitKGrid.of(parts, dy, tile)
    if tile.rows % 8 or tile.rows < 8 or tile.rows > 248:
        return f'tile.rows: expected a multiple of 8 from 8 to 248, found {tile.rows}'
    if tile.stages < 1 or grid.shared_bytes > SHARED_BYTES - SHARED_RESERVED:
        limit = SHARED_BYTES - SHARED_RESERVED
        return (
            f'tile.stages={tile.stages}: expected at least 1, and at most {limit} bytes of ring, '
            f'found {grid.shared_bytes}'
        )
    if tile.taps not in (3, 9):
        return f'tile.taps: expected 3 or 9, found {tile.taps}'
    if not 1 <= tile.splits <= grid.strips:
        return f'tile.splits: expected from 1 to {grid.strips} (the strips), found {tile.splits}'
    return None


def default_tile(parts: Sequence[Shaped], dy: Shaped) -> Tile:
    """Returns the tile for shapes that are in no table: the best by a rough model of the time."""
    stages = 4 if dy.dtype == jnp.float32 else 8
    grid = SplitKGrid.of(parts, dy, Tile(8, stages, 1))

    def microseconds(splits: int) -> float:
        # Microseconds on an H200: 0.7 to multiply a strip, 5 to start a CTA and store its sums,
        # 0.03 to add a CTA's sums to the others'. To refit, time `candidates` with `tune_hopper`.
        ctas = grid.tiles * splits
        waves = -(-ctas // multiprocessors())
        strips = -(-grid.strips // splits) * len(grid.products)
        return waves * (0.7 * strips + 5) + (0.03 * ctas if splits > 1 else 0)

    return Tile(8, stages, min(range(1, min(grid.strips, multiprocessors()) + 1), key=microseconds))


def shape_class(parts: Sequence[Shaped], dy: Shaped) -> str:
    """Returns the name of these shapes in the table of tiles."""
    image = 'x'.join(map(str, dy.shape[:-1]))
    channels = '+'.join(str(part.shape[-1]) for part in parts)
    return f'{image}, {channels} to {dy.shape[-1]}'


def choose_tile(parts: Sequence[Shaped], dy: Shaped) -> Tile:
    """Returns the tile measured on this device for these shapes, else `default_tile`."""
    return tile_table.measured(
        Tile, 'conv3x3/hopper_weight_gradient', dy.dtype, shape_class(parts, dy)
    ) or default_tile(parts, dy)


def candidates(parts: Sequence[Shaped], dy: Shaped) -> list[Tile]:
    """Returns the tiles worth timing for these shapes, the default first."""
    first = default_tile(parts, dy)
    tiles = [first]
    full = multiprocessors() // SplitKGrid.of(parts, dy, first).tiles
    every = [*itertools.product((8, 16), (first.splits, first.splits // 2, full, 2 * full), (9,))]
    every += itertools.product((8, 16), {full // 3, -(-full // 3)}, (3,))
    for rows, splits, taps in every:
        for stages in range(8, 1, -1):
            tile = Tile(rows, stages, splits, taps)
            if supports(parts, dy, tile) is None:
                tiles.append(tile)
                break
    return list(dict.fromkeys(tiles))


def weight_gradient(
    parts: tuple[Float[Array, 'batch height width _'], ...],
    dy: Float[Array, 'batch height width features'],
    *,
    tile: Tile | None = None,
) -> Float[Array, '3 3 channels features']:
    """Returns the gradient of Σ conv3x3(x, kernel) · dy with respect to the kernel (HWIO), in
    float32.

    The same inputs give the same bits.

    Args:
      parts: x, joined along channels; each part is read where it is.
      tile: None = `choose_tile`.

    Raises:
      ValueError: shapes, dtypes or a tile that `supports` refuses.
    """
    _require(supports(parts, dy))
    tile = tile or choose_tile(parts, dy)
    _require(supports(parts, dy, tile))
    return _weight_gradient(parts, dy, tile)


# Jitted, so that equal calls share one trace and one lowering.
@functools.partial(jax.jit, static_argnums=2)
def _weight_gradient(parts: tuple[Array, ...], dy: Array, tile: Tile) -> Array:
    grid = SplitKGrid.of(parts, dy, tile)
    if grid.halves == 2:
        parts, dy = tuple(map(split_float32, parts)), split_float32(dy)
    partial = _partial_sums(grid, parts, dy)
    total = partial[0] if tile.splits == 1 else jnp.sum(partial, axis=0)
    return total.reshape(3, 3, *total.shape[1:])


def _require(refusal: str | None) -> None:
    if refusal:
        raise ValueError(f'weight_gradient: {refusal}')


def split_float32(
    x: Float[Array, 'batch height width channels'],
) -> Float[Array, '2*batch height width channels']:
    """Returns the high and low bfloat16 halves of x, one after the other along the batch."""
    return jnp.concatenate(bfloat16_terms(x, 2))


def _partial_sums(
    grid: SplitKGrid,
    parts: Sequence[Float[Array, 'batch height width _']],
    dy: Float[Array, 'batch height width features'],
) -> Float[Array, 'splits 9 channels features']:
    """Runs the kernel; returns the sums of every split."""
    tile = grid.tile
    shape = (tile.splits, 9, sum(grid.widths), grid.features)

    # One function, because the roles share the ring, the barriers and the CTA's place in the grid.
    def body(*refs: Ref) -> None:
        x_refs, (dy_ref, out_ref, x_ring, dy_ring, full, empty) = (
            refs[: len(parts)],
            refs[len(parts) :],
        )
        split, x_channel, dy_channel, tap_row = grid.cta(lax.axis_index('cta'))
        first, count = grid.share(split)
        warpgroup = lax.axis_index('warpgroup')

        def load(step: Index, slot: Index) -> None:
            sample, row, column = grid.strip_origin(first + step)
            for half in range(grid.halves):
                image = sample + half * grid.batch
                plgpu.copy_gmem_to_smem(
                    dy_ref.at[
                        image, pl.ds(row, tile.rows), pl.ds(column, STRIP), pl.ds(dy_channel, BLOCK)
                    ],
                    dy_ring.at[slot, half],
                    full.at[slot],
                )
                ends = itertools.accumulate(grid.widths)
                for x_ref, width, end in zip(x_refs, grid.widths, ends, strict=True):
                    start = end - width

                    @pl.when((x_channel >= start) & (x_channel < end))
                    def _(
                        x_ref: Ref = x_ref,
                        start: int = start,
                        half: int = half,
                        image: Index = image,
                    ) -> None:
                        plgpu.copy_gmem_to_smem(
                            x_ref.at[
                                image,
                                pl.ds(grid.first_row(row, tap_row), grid.x_rows),
                                pl.ds(column - 1, STRIP + 2),
                                pl.ds(x_channel - start, BLOCK),
                            ],
                            x_ring.at[slot, half, pl.ds(0, grid.x_rows)],
                            full.at[slot],
                        )

        @pl.when(warpgroup == TAP_ROWS)
        def _produce() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action='decrease')

            @pl.loop(0, count)
            def _(step: Index) -> None:
                slot = lax.rem(step, jnp.int32(tile.stages))

                @pl.when(step >= tile.stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                load(step, slot)

        @pl.when(warpgroup < TAP_ROWS)
        def _consume() -> None:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action='increase')
            taps = tile.taps // TAP_ROWS
            multiply = inline.multiply_taps(tile.rows, STRIP + 2, BLOCK, taps, grid.products)
            box_row, box_column, first_tap = grid.of_warpgroup(warpgroup, tap_row)

            def step(i: Index, total: Array) -> Array:
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
            ring((tile.stages, grid.halves, grid.box_rows, STRIP + 2, BLOCK)),
            ring((tile.stages, grid.halves, tile.rows, STRIP, BLOCK)),
            plgpu.Barrier(num_barriers=tile.stages, num_arrivals=2 * grid.halves),
            plgpu.Barrier(num_barriers=tile.stages, num_arrivals=TAP_ROWS),
        ],
        grid=(grid.tiles * tile.splits,),
        grid_names=('cta',),
        num_threads=TAP_ROWS + 1,
        thread_name='warpgroup',
        kernel_name=NAME,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(*parts, dy)
