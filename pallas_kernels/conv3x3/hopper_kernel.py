"""3×3 convolution on Hopper (sm_90): an implicit GEMM that reads each input strip once, with its halo, and multiplies it at nine offsets.

A strip is 8 columns wide. Its TMA box of 10 columns × (rows + 2) × 64 channels starts one pixel above and to the left; what lies outside
the image reads as zeros. In shared memory a pixel is one swizzled 128-byte row, so tap (dy, dx) is the same buffer with wgmma's descriptor
moved by dy · 10 + dx rows and its stride between 8-pixel rows set to 10: the input passes L2 once instead of nine times.

Warpgroups of a program: `groups` that compute, one that loads (TMA), and with an affine activation one that applies it to the strips in
place. A residual, or its 1×1 shortcut, is extra K: the centre tap of its own chunks, times the identity or the shortcut's weights.
`schedule` holds the arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.conv3x3 import hopper_views as views
from pallas_kernels.conv3x3.schedule import (
    CHUNK,
    HALO_COLUMNS,
    LOADING_REGISTERS,
    STRIP_COLUMNS,
    TAPS,
    Plan,
    Source,
    ceil_div,
    tap_offset,
)

NAME = 'jaxunet_conv3x3_forward'
PIECE = 16  # pixels that a warpgroup activates at once
BATCH = 4  # pieces in registers at once
Activation = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class _Program:
    """What the warpgroups of a program share.

    Fields:
      index: which program of the grid.
      inputs, weights, extra_weights, shift, coefficients, out: in device memory.
      strips, blocks, staged: in shared memory: input strips, weights of one tap and chunk, outputs on their way.
      strip_full, strip_ready, strip_empty: of a strip slot: loaded, activated, read.
      block_full, block_empty: of a slot of the weight ring: loaded, read.
      turn: of the two warpgroups that play ping-pong.
    """

    plan: Plan
    index: Any
    inputs: Sequence[Any]
    weights: Any
    extra_weights: Any
    shift: Any
    coefficients: Sequence[Any]
    out: Any
    strips: Any
    blocks: Any
    staged: Any
    strip_full: Any
    strip_ready: Any
    strip_empty: Any
    block_full: Any
    block_empty: Any
    turn: Any

    def each_tile(self, body: Callable[[Any, Any, Any], None]) -> None:
        """body(i, first strip, first output channel) for this program's tiles."""
        s = self.plan.schedule

        def step(i: Any, _: Any) -> Any:
            body(i, *s.tile_at(self.index, i))
            return 0

        lax.fori_loop(0, s.local_tiles(self.index), step, 0)

    def barrier(self, barriers: Any, group: Any, slot: Any) -> Any:
        """A warpgroup's barrier of a strip slot."""
        return barriers.at[group * self.plan.schedule.tile.slots + slot]


def _loop(start: int, stop: int, body: Callable[[Any], None]) -> None:
    def step(n: Any, _: Any) -> Any:
        body(n)
        return 0

    if start < stop:
        lax.fori_loop(start, stop, step, 0)


def _load(program: _Program) -> None:
    """The loading warpgroup."""
    p, s, tile = program.plan, program.plan.schedule, program.plan.schedule.tile
    plgpu.set_max_registers(LOADING_REGISTERS, action='decrease')

    def load_blocks(
        matrices: Any, taps: Any, feature: Any, channel: Any, first: Any, barrier: Any
    ) -> None:
        features, channels, blocks = (
            pl.ds(feature, tile.features),
            pl.ds(channel, CHUNK),
            program.blocks.at[pl.ds(first, taps.size)],
        )
        if p.outputs_first:
            box, blocks = (
                matrices.at[taps, features, channels],
                blocks.reshape(taps.size, tile.features, CHUNK),
            )
        else:
            box = matrices.at[taps, channels, features]
        plgpu.copy_gmem_to_smem(box, blocks, barrier)

    def load_ring(number: Any, matrices: Any, taps: Any, feature: Any, channel: Any) -> None:
        use, slot = s.ring(number)

        @pl.when(use > 0)
        def _() -> None:
            plgpu.barrier_wait(program.block_empty.at[slot])

        load_blocks(matrices, taps, feature, channel, slot * tile.taps, program.block_full.at[slot])

    def load_strips(i: Any, source: Source, chunk: Any, first_strip: Any, feature: Any) -> None:
        use, slot = s.slot(s.strip_number(i, source.first + chunk))
        channels = pl.ds(chunk * CHUNK + (feature if source.follows_tile else 0), CHUNK)
        for group in range(tile.groups):

            @pl.when(use > 0)
            def _(group: int = group) -> None:
                plgpu.barrier_wait(program.barrier(program.strip_empty, group, slot))

            sample, row, column = s.strip_at(first_strip + group)
            rows, columns = pl.ds(row - 1, tile.rows + 2), pl.ds(column - 1, HALO_COLUMNS)
            plgpu.copy_gmem_to_smem(
                program.inputs[source.array].at[sample, rows, :, columns, channels],
                program.strips.at[group, slot, pl.ds(0, tile.rows + 2)],
                program.barrier(program.strip_full, group, slot),
            )

    def load_tile(i: Any, first_strip: Any, feature: Any) -> None:
        for source in p.sources:

            def load_chunk(chunk: Any, source: Source = source) -> None:
                load_strips(i, source, chunk, first_strip, feature)
                step, channel = source.first + chunk, source.weight + chunk * CHUNK
                for n in range(0 if s.resident else s.loads_per_chunk):
                    load_ring(
                        s.load_number(i, step, n),
                        program.weights,
                        pl.ds(n * tile.taps, tile.taps),
                        feature,
                        channel,
                    )

            _loop(0, source.steps, load_chunk)
        for source in p.extras:

            def load_extra(chunk: Any, source: Source = source) -> None:
                load_strips(i, source, chunk, first_strip, feature)
                if not s.resident:
                    number, first = (
                        s.extra_load_number(i, source.first + chunk),
                        0 if source.follows_tile else feature,
                    )
                    load_ring(
                        number,
                        program.extra_weights,
                        pl.ds(0, 1),
                        first,
                        source.weight + chunk * CHUNK,
                    )

            _loop(0, source.steps, load_extra)

    if s.resident:  # all before the first strip: nothing is computed until they are there
        for source in (*p.sources, *p.extras):
            matrices, taps = (
                (program.weights, TAPS) if source.first < s.chunks else (program.extra_weights, 1)
            )

            def load_resident(
                chunk: Any, source: Source = source, matrices: Any = matrices, taps: int = taps
            ) -> None:
                first = s.resident_block(source.first + chunk, extra=taps == 1)
                load_blocks(
                    matrices,
                    pl.ds(0, taps),
                    0,
                    source.weight + chunk * CHUNK,
                    first,
                    program.block_full.at[0],
                )

            _loop(0, source.steps, load_resident)
    program.each_tile(load_tile)


def _activate(program: _Program, me: Any, activation: Activation) -> None:
    """An activating warpgroup: its share of each strip in place, once; padding around the image stays zero."""
    s, tile = program.plan.schedule, program.plan.schedule.tile
    plgpu.set_max_registers(s.activating_registers, action='decrease')
    # Each thread holds 8 channels of a pixel, 16 bytes.
    tiling = plgpu.Tiling(((PIECE, CHUNK), (PIECE // 4, CHUNK), (8,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    every = ceil_div((tile.rows + 2) * HALO_COLUMNS, PIECE)
    pieces = ceil_div(every, tile.activators)

    def spread(vector: Any, dimension: int) -> Any:
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, (PIECE, CHUNK), (dimension,)), layout)

    def load_row(ref: Any) -> Any:
        return spread(views.load(ref, layout.reduce(0)), 1)

    def activate_tile(i: Any, first_strip: Any, _feature: Any) -> None:
        places = [s.strip_at(first_strip + group) for group in range(tile.groups)]

        def activate_chunk(step: Any) -> None:
            _, slot = s.slot(s.strip_number(i, step))
            # Ahead of the wait, as they take long.
            channels = pl.ds(step * CHUNK, CHUNK)
            coefficients = [
                [
                    load_row(ref.at[lax.min(sample, s.batch - 1), channels])
                    for ref in program.coefficients
                ]
                for sample, _, _ in places
            ]
            for group, (_, row, column) in enumerate(places):
                plgpu.barrier_wait(program.barrier(program.strip_full, group, slot))
                pixels = program.strips.at[group, slot].reshape(s.halo_rows * HALO_COLUMNS, CHUNK)
                scale, offset = coefficients[group]
                for start in range(0, pieces, BATCH):
                    # A store keeps later loads behind it, so a batch is loaded first.
                    mine = [me * pieces + n for n in range(start, min(start + BATCH, pieces))]
                    targets = [pixels.at[pl.ds(piece * PIECE, PIECE)] for piece in mine]
                    loaded = [views.load(target, layout) for target in targets]
                    for piece, target, x in zip(mine, targets, loaded, strict=True):
                        pixel = (
                            plgpu.broadcasted_iota(jnp.int32, (PIECE,), 0, layout=layout.reduce(1))
                            + piece * PIECE
                        )
                        down = (pixel * 6554) >> 16  # pixel // 10
                        y, x_ = row - 1 + down, column - 1 + pixel - down * HALO_COLUMNS
                        inside = (y.astype(jnp.uint32) < s.height) & (
                            x_.astype(jnp.uint32) < s.width
                        )
                        inside = spread(inside, 0)
                        value = jnp.where(
                            inside, activation(x.astype(jnp.float32) * scale + offset), 0.0
                        ).astype(x.dtype)
                        if every == pieces * tile.activators:
                            target[...] = value
                        else:  # the last share is shorter
                            pl.when(piece < every)(
                                functools.partial(operator.setitem, target, ..., value)
                            )
                plgpu.commit_smem()
                plgpu.barrier_arrive(program.barrier(program.strip_ready, group, slot))

        def pass_extra(step: Any) -> None:
            _, slot = s.slot(s.strip_number(i, step))
            for group in range(tile.groups):
                plgpu.barrier_wait(program.barrier(program.strip_full, group, slot))
                plgpu.barrier_arrive(program.barrier(program.strip_ready, group, slot))

        _loop(0, s.chunks, activate_chunk)
        _loop(s.chunks, s.steps, pass_extra)

    program.each_tile(activate_tile)


def _compute(program: _Program, me: Any) -> None:
    """A computing warpgroup: one strip of every tile."""
    p, s, tile = program.plan, program.plan.schedule, program.plan.schedule.tile
    plgpu.set_max_registers(s.computing_registers, action='increase')
    shape = (tile.features, s.pixels) if tile.transposed else (s.pixels, tile.features)
    of_features = plgpu.Layout.WGMMA.reduce(1 if tile.transposed else 0)

    def multiply(accumulators: Any, slot: Any, tap: int, block: Any) -> None:
        down, right = tap_offset(TAPS - 1 - tap if p.flipped else tap)
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

    def begin(number: Any) -> Any:
        """The slot of a strip, when it may be read."""
        _, slot = s.slot(number)
        plgpu.barrier_wait(program.barrier(program.strip_ready, me, slot))
        if s.ping_pong:
            plgpu.barrier_wait(program.turn.at[me])
        return slot

    def wait_block(number: Any) -> Any:
        """The first block of a ring slot, when it may be read."""
        _, slot = s.ring(number)
        plgpu.barrier_wait(program.block_full.at[slot])
        return slot * tile.taps

    def release_strip(number: Any) -> None:
        _, slot = s.slot(number)
        plgpu.barrier_arrive(program.barrier(program.strip_empty, me, slot))

    def release_block(number: Any) -> None:
        if not s.resident:
            _, slot = s.ring(number)
            plgpu.barrier_arrive(program.block_empty.at[slot])

    def products(i: Any, accumulators: Any) -> Any:
        # Buffers are released one load late, so that the tensor cores always have products waiting.
        def chunk(step: Any) -> None:
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
                    def _(load: Any = load) -> None:
                        release_block(load - 1)
                        release_strip(strip - 1)

            if s.ping_pong:
                plgpu.barrier_arrive(program.turn.at[1 - me])

        def extra(step: Any) -> None:
            strip, load = s.strip_number(i, step), s.extra_load_number(i, step)
            slot = begin(strip)
            first = s.resident_block(step, extra=True) if s.resident else wait_block(load)
            multiply(accumulators, slot, TAPS // 2, first)
            plgpu.wgmma_wait(1)
            release_block(load - 1)
            release_strip(strip - 1)
            if s.ping_pong:
                plgpu.barrier_arrive(program.turn.at[1 - me])

        _loop(0, s.chunks, chunk)
        _loop(s.chunks, s.steps, extra)
        plgpu.wgmma_wait(0)
        release_strip(s.strip_number(i, s.steps - 1))
        release_block(s.load_number(i + 1, 0, 0) - 1)
        return accumulators[...]

    def compute_tile(i: Any, first_strip: Any, feature: Any) -> None:
        sample, row, column = s.strip_at(first_strip + me)
        shift_row = 0 if program.shift.shape[0] == 1 else lax.min(sample, s.batch - 1)
        shift = views.load(program.shift.at[shift_row, pl.ds(feature, tile.features)], of_features)
        y = pl.run_scoped(functools.partial(products, i), plgpu.ACC(shape, jnp.float32))
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
        plgpu.barrier_wait(program.block_full.at[0])
    if s.ping_pong:

        @pl.when(me == 1)
        def _() -> None:
            plgpu.barrier_arrive(program.turn.at[0])

    program.each_tile(compute_tile)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def call(p: Plan, activation: Activation | None, out_dtype: Any, operands: Sequence[Any]) -> Any:
    """Runs the kernel.

    Args:
      activation: of a float32 array, after a · x + b; None: x is read as it is.
      operands: inputs as (batch, height, 1, width, channels); weights, extra weights if there are, as `p` says; shift of all tiles'
        output channels; with an activation, a and b as (batch, 64 · chunks).

    Returns: (batch, height, 1, width, features) of `out_dtype`.
    """
    s, tile = p.schedule, p.schedule.tile
    groups, dtype = tile.groups, operands[0].dtype

    def body(*every: Any) -> None:
        inputs, refs = every[: p.arrays], list(every[p.arrays :])
        weights = refs.pop(0)
        extra_weights = refs.pop(0) if p.extras else None
        shift = refs.pop(0)
        coefficients = [refs.pop(0), refs.pop(0)] if activation else []
        program = _Program(
            p, lax.axis_index('program'), inputs, weights, extra_weights, shift, coefficients, *refs
        )
        if not activation:
            program = dataclasses.replace(program, strip_ready=program.strip_full)
        me = lax.axis_index('warpgroup')
        pl.when(me < groups)(functools.partial(_compute, program, me))
        pl.when(me == groups)(functools.partial(_load, program))
        if activation:
            pl.when(me > groups)(functools.partial(_activate, program, me - groups - 1, activation))

    def swizzled(shape: tuple[int, ...], dtype: Any, tiling: tuple[int, ...] = ()) -> Any:
        """Rows of one swizzle width, or tiles of such rows."""
        swizzle = plgpu.SwizzleTransform((tiling or shape)[-1] * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(
            shape,
            dtype,
            transforms=(plgpu.TilingTransform(tiling), swizzle) if tiling else (swizzle,),
        )

    ring = max(tile.ring, 1)
    if p.outputs_first:
        blocks = swizzled((s.weight_blocks, tile.features // 8, 1, 8, CHUNK), dtype)
    else:
        blocks = swizzled((s.weight_blocks, CHUNK, tile.features), dtype, (8, CHUNK))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((s.batch, s.height, 1, s.width, s.features), out_dtype),
        scratch_types=[
            swizzled((groups, tile.slots, s.halo_rows, 1, HALO_COLUMNS, CHUNK), dtype),
            blocks,
            swizzled(
                (groups, s.store_slots, tile.rows, 1, STRIP_COLUMNS, s.store_columns), out_dtype
            ),
            plgpu.Barrier(num_barriers=groups * tile.slots, num_arrivals=1),
            plgpu.Barrier(num_barriers=groups * tile.slots, num_arrivals=max(s.activators, 1)),
            plgpu.Barrier(num_barriers=groups * tile.slots, num_arrivals=1),
            plgpu.Barrier(num_barriers=ring, num_arrivals=s.steps if s.resident else 1),
            plgpu.Barrier(num_barriers=ring, num_arrivals=groups),
            plgpu.Barrier(num_barriers=2, num_arrivals=1),
        ],
        grid=(s.programs,),
        grid_names=('program',),
        num_threads=s.warpgroups,
        thread_name='warpgroup',
        kernel_name=NAME,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Safe: threads read shared memory that others wrote only after commit_smem or a barrier.
            unsafe_no_auto_barriers=True,
        ),
    )
    # Under x64, Python's integers would become int64 beside the device's int32 indices.
    with jax.enable_x64(False):
        return kernel(*operands)
