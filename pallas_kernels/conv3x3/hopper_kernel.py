"""3×3 convolution on Hopper (sm_90): an implicit GEMM that reads a strip once for all nine taps.

A strip is 8 columns wide. Its TMA box of 10 columns × (rows + 2) × 64 channels starts one pixel
above and to the left of the strip; pixels outside the image are loaded as zeros. In shared memory a
pixel is one swizzled row of 128 bytes. So for tap (dy, dx), wgmma reads the same buffer: its
descriptor starts dy · 10 + dx rows later, with a stride of 10 rows between groups of 8 pixels. The
input is read from L2 once instead of nine times.

A program is persistent and computes one tile after another: `groups` strips × `features` output
channels. Its mainloop iterates over chunks of 64 input channels, nine taps each. A residual extends
K by its own chunks, with only the centre tap; their weights are the identity or a 1×1 shortcut. The
epilogue adds the shift, rounds, and stores through shared memory by TMA.

Warpgroups: first the consumers, then the producer, then the activators.

    global memory           shared memory                       registers

    x, residual  --TMA-->   strips: `slots` a consumer  --->    consumers (`groups`), a strip each:
                              ^                                 mainloop (wgmma), then the epilogue
                              | SiLU(a · x + b), in place         |
                            activators (0, 1 or 2)                |
    weights      --TMA-->   blocks: ring of `ring` slots, --->    |
                            or all of them (`ring` = 0)           |
      producer (1)                                                v
    y            <--TMA--   staged  <-----------------------------+

Barriers. Pallas counts their phases; the producer waits for an empty barrier only from the second
use of a slot on.

    barrier        of                     arrives (arrivals)              waits
    strip_full     a consumer's slot      TMA (1)                         activators, else consumer
    strip_ready    a consumer's slot      every activator (1 each)        the consumer
    strip_empty    a consumer's slot      the consumer (1)                the producer
    weights_full   a weight ring slot     TMA (1)                         every consumer
    weights_empty  a weight ring slot     every consumer (1 each)         the producer
    turn           each of two consumers  the other consumer (1)          the consumer (ping-pong)

Without activators, `strip_ready` is `strip_full`. With resident weights, `weights_full` has one
barrier, at which TMA arrives once per step, and `weights_empty` is not used. `schedule` holds the
arithmetic of tiles and slots, and says when consumers take turns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels import hopper_views as views
from pallas_kernels.conv3x3.hopper_plan import Mainloop
from pallas_kernels.conv3x3.hopper_producers import activate, produce
from pallas_kernels.conv3x3.hopper_program import Program, SiluOf, loop
from pallas_kernels.conv3x3.schedule import (
    CHUNK,
    HALO_COLUMNS,
    STRIP_COLUMNS,
    TAPS,
    tap_origin,
)
from pallas_kernels.jax_modules import mosaic_gpu as plgpu
from pallas_kernels.types import Index, Ref

NAME = 'jaxunet_conv3x3_forward'


# Long, because its closures share the program's barriers and slots.
def consume(program: Program, me: Index) -> None:  # noqa: PLR0915
    """Runs a consumer: computes and stores one strip of every tile."""
    p, s, tile = program.mainloop, program.mainloop.schedule, program.mainloop.schedule.tile
    plgpu.set_max_registers(s.computing_registers, action='increase')
    shape = (tile.features, s.pixels) if tile.transposed else (s.pixels, tile.features)
    of_features = plgpu.Layout.WGMMA.reduce(1 if tile.transposed else 0)

    def multiply(accumulators: Ref, slot: Index, tap: int, block: Index) -> None:
        down, right = tap_origin(TAPS - 1 - tap if p.flipped else tap)
        pixels = views.matrix(
            program.strips.at[me, slot, pl.ds(down, tile.rows), :, pl.ds(right, STRIP_COLUMNS), :]
        )
        matrix = (
            views.matrix(program.blocks.at[block]) if p.outputs_first else program.blocks.at[block]
        )
        if p.outputs_first != tile.transposed:
            matrix = matrix.T
        if tile.transposed:
            plgpu.wgmma(accumulators, matrix, pixels.T)
        else:
            plgpu.wgmma(accumulators, pixels, matrix)

    def begin(number: Index) -> Index:
        """Waits until a strip may be read; returns its slot."""
        _, slot = s.slot(number)
        plgpu.barrier_wait(program.barrier(program.strip_ready, me, slot))
        if s.ping_pong:
            plgpu.barrier_wait(program.turn.at[me])
        return slot

    def wait_block(number: Index) -> Index:
        """Waits until a slot of the weight ring may be read; returns its first block."""
        _, slot = s.ring(number)
        plgpu.barrier_wait(program.weights_full.at[slot])
        return slot * tile.taps

    def release_strip(number: Index) -> None:
        _, slot = s.slot(number)
        plgpu.barrier_arrive(program.barrier(program.strip_empty, me, slot))

    def release_block(number: Index) -> None:
        if not s.resident:
            _, slot = s.ring(number)
            plgpu.barrier_arrive(program.weights_empty.at[slot])

    def mainloop(i: Index, accumulators: Ref) -> Array:
        # Buffers are released one load late, so that the tensor cores always have queued work.
        def chunk(step: Index) -> None:
            strip = s.strip_number(i, step)
            slot = begin(strip)
            for n in range(s.loads_per_chunk):
                load = s.load_number(i, step, n)
                first = s.resident_block(step) + n * tile.taps if s.resident else wait_block(load)
                for t in range(tile.taps):
                    multiply(accumulators, slot, n * tile.taps + t, first + t)
                plgpu.wgmma_wait(tile.taps)
                if n > 0:
                    release_block(load - 1)
                else:

                    @pl.when(step > 0)
                    def _(load: Index = load) -> None:
                        release_block(load - 1)
                        release_strip(strip - 1)

            if s.ping_pong:
                plgpu.barrier_arrive(program.turn.at[1 - me])

        def extra(step: Index) -> None:
            strip, load = s.strip_number(i, step), s.extra_load_number(i, step)
            slot = begin(strip)
            first = s.resident_block(step, extra=True) if s.resident else wait_block(load)
            multiply(accumulators, slot, TAPS // 2, first)
            plgpu.wgmma_wait(1)
            release_block(load - 1)
            release_strip(strip - 1)
            if s.ping_pong:
                plgpu.barrier_arrive(program.turn.at[1 - me])

        loop(0, s.chunks, chunk)
        loop(s.chunks, s.steps, extra)
        plgpu.wgmma_wait(0)
        release_strip(s.strip_number(i, s.steps - 1))
        release_block(s.load_number(i + 1, 0, 0) - 1)
        return accumulators[...]

    def compute_tile(i: Index, first_strip: Index, feature: Index) -> None:
        sample, row, column = s.strip_at(first_strip + me)
        shift_row = 0 if program.shift.shape[0] == 1 else lax.min(sample, s.batch - 1)
        shift = views.load(program.shift.at[shift_row, pl.ds(feature, tile.features)], of_features)
        y = pl.run_scoped(functools.partial(mainloop, i), plgpu.ACC(shape, jnp.float32))
        y = (y + lax.broadcast_in_dim(shift, shape, (0 if tile.transposed else 1,))).astype(
            program.out.dtype
        )
        for n in range(s.stores):
            buffer, columns = (
                program.staged.at[me, n % s.store_slots],
                slice(n * s.store_columns, (n + 1) * s.store_columns),
            )
            plgpu.wait_smem_to_gmem(s.store_slots - 1, wait_read_only=True)
            if tile.transposed:
                views.matrix(buffer).T[...] = plgpu.layout_cast(
                    y[columns], plgpu.Layout.WGMMA_TRANSPOSED
                )
            else:
                views.matrix(buffer)[...] = y[:, columns]
            plgpu.commit_smem()
            box = (sample, pl.ds(row, tile.rows), slice(None), pl.ds(column, STRIP_COLUMNS))
            plgpu.copy_smem_to_gmem(
                buffer, program.out.at[*box, pl.ds(feature + n * s.store_columns, s.store_columns)]
            )

    if s.resident:
        plgpu.barrier_wait(program.weights_full.at[0])
    if s.ping_pong:

        @pl.when(me == 1)
        def _() -> None:
            plgpu.barrier_arrive(program.turn.at[0])

    program.each_tile(compute_tile)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def call(
    p: Mainloop, activation: SiluOf | None, out_dtype: DTypeLike, operands: Sequence[Array]
) -> Array:
    """Runs the kernel.

    Args:
      activation: function of a float32 array, applied to a · x + b; None: x is read unchanged.
      operands: inputs as (batch, height, 1, width, channels); weights, and extra weights if there
        are any, in the order of `p`; the shift of all tiles' output channels; with an activation, a
        and b as (batch, 64 · chunks).

    Returns: (batch, height, 1, width, features) of `out_dtype`.
    """
    s, groups = p.schedule, p.schedule.tile.groups

    def body(*every: Ref) -> None:
        inputs, refs = every[: p.arrays], list(every[p.arrays :])
        weights = refs.pop(0)
        extra_weights = refs.pop(0) if p.extras else None
        shift = refs.pop(0)
        coefficients = [refs.pop(0), refs.pop(0)] if activation else []
        program = Program(
            p, lax.axis_index('program'), inputs, weights, extra_weights, shift, coefficients, *refs
        )
        if not activation:
            program = dataclasses.replace(program, strip_ready=program.strip_full)
        me = lax.axis_index('warpgroup')
        pl.when(me < groups)(functools.partial(consume, program, me))
        pl.when(me == groups)(functools.partial(produce, program))
        if activation:
            pl.when(me > groups)(functools.partial(activate, program, me - groups - 1, activation))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((s.batch, s.height, 1, s.width, s.features), out_dtype),
        scratch_types=_scratch(p, operands[0].dtype, out_dtype),
        grid=(s.programs,),
        grid_names=('program',),
        num_threads=s.warpgroups,
        thread_name='warpgroup',
        kernel_name=NAME,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Safe, because threads read other threads' writes to shared memory only after
            # commit_smem or a barrier.
            unsafe_no_auto_barriers=True,
        ),
    )
    # Under x64, Python's integers would become int64 and clash with the device's int32 indices.
    with jax.enable_x64(False):
        return kernel(*operands)


def _scratch(p: Mainloop, dtype: DTypeLike, out_dtype: DTypeLike) -> list[Any]:
    """Returns the shared memory and barriers of a program, in the order of `Program`'s fields."""
    s, tile = p.schedule, p.schedule.tile

    def swizzled(shape: tuple[int, ...], dtype: DTypeLike, tiling: tuple[int, ...] = ()) -> Any:
        """Returns shared memory of rows of one swizzle width, or of tiles of such rows."""
        swizzle = plgpu.SwizzleTransform((tiling or shape)[-1] * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(
            shape,
            dtype,
            transforms=(plgpu.TilingTransform(tiling), swizzle) if tiling else (swizzle,),
        )

    if p.outputs_first:
        blocks = swizzled((s.weight_blocks, tile.features // 8, 1, 8, CHUNK), dtype)
    else:
        blocks = swizzled((s.weight_blocks, CHUNK, tile.features), dtype, (8, CHUNK))
    staged = (tile.groups, s.store_slots, tile.rows, 1, STRIP_COLUMNS, s.store_columns)
    strips, ring = tile.groups * tile.slots, max(tile.ring, 1)
    return [
        swizzled((tile.groups, tile.slots, s.halo_rows, 1, HALO_COLUMNS, CHUNK), dtype),
        blocks,
        swizzled(staged, out_dtype),
        plgpu.Barrier(num_barriers=strips, num_arrivals=1),  # strip_full
        plgpu.Barrier(num_barriers=strips, num_arrivals=max(s.activators, 1)),  # strip_ready
        plgpu.Barrier(num_barriers=strips, num_arrivals=1),  # strip_empty
        plgpu.Barrier(num_barriers=ring, num_arrivals=s.steps if s.resident else 1),  # weights_full
        plgpu.Barrier(num_barriers=ring, num_arrivals=tile.groups),  # weights_empty
        plgpu.Barrier(num_barriers=2, num_arrivals=1),  # turn
    ]
