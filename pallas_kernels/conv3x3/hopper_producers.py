"""The producer warpgroups of the Hopper convolution: the one that loads, and the activators.

`pallas_kernels.conv3x3.hopper_kernel` explains the pipeline.
"""

from __future__ import annotations

import functools
import operator

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels import hopper_views as views
from pallas_kernels.conv3x3.hopper_plan import Source
from pallas_kernels.conv3x3.hopper_program import Program, SiluOf, loop
from pallas_kernels.conv3x3.schedule import (
    CHUNK,
    HALO_COLUMNS,
    LOADING_REGISTERS,
    TAPS,
)
from pallas_kernels.hopper_grid import ceil_div
from pallas_kernels.jax_modules import mosaic_gpu as plgpu
from pallas_kernels.types import Index, Ref, Slice

PIECE = 16  # pixels that a warpgroup activates at a time
BATCH = 4  # pieces in registers at once


# Long, because its closures share the program's barriers and slots.
def produce(program: Program) -> None:
    """Runs the producer: loads strips and weights by TMA, as slots become empty."""
    p, s, tile = program.mainloop, program.mainloop.schedule, program.mainloop.schedule.tile
    plgpu.set_max_registers(LOADING_REGISTERS, action='decrease')

    def load_blocks(
        matrices: Ref, taps: Slice, feature: Index, channel: Index, first: Index, barrier: Ref
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

    def load_ring(
        number: Index, matrices: Ref, taps: Slice, feature: Index, channel: Index
    ) -> None:
        use, slot = s.ring(number)

        @pl.when(use > 0)
        def _() -> None:
            plgpu.barrier_wait(program.weights_empty.at[slot])

        load_blocks(
            matrices, taps, feature, channel, slot * tile.taps, program.weights_full.at[slot]
        )

    def load_strips(
        i: Index, source: Source, chunk: Index, first_strip: Index, feature: Index
    ) -> None:
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

    def load_tile(i: Index, first_strip: Index, feature: Index) -> None:
        for source in p.sources:

            def load_chunk(chunk: Index, source: Source = source) -> None:
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

            loop(0, source.steps, load_chunk)
        for source in p.extras:

            def load_extra(chunk: Index, source: Source = source) -> None:
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

            loop(0, source.steps, load_extra)

    if s.resident:  # before the first strip: consumers wait for all weights
        for source in (*p.sources, *p.extras):
            matrices, taps = (
                (program.weights, TAPS) if source.first < s.chunks else (program.extra_weights, 1)
            )

            def load_resident(
                chunk: Index, source: Source = source, matrices: Ref = matrices, taps: int = taps
            ) -> None:
                first = s.resident_block(source.first + chunk, extra=taps == 1)
                load_blocks(
                    matrices,
                    pl.ds(0, taps),
                    0,
                    source.weight + chunk * CHUNK,
                    first,
                    program.weights_full.at[0],
                )

            loop(0, source.steps, load_resident)
    program.each_tile(load_tile)


# Long, because its closures share the program's barriers and slots.
def activate(program: Program, me: Index, activation: SiluOf) -> None:
    """Runs an activator: applies the activation to its share of each strip, in place, once.

    The padding around the image stays zero. Residual strips are handed on without activation.
    """
    s, tile = program.mainloop.schedule, program.mainloop.schedule.tile
    plgpu.set_max_registers(s.activating_registers, action='decrease')
    # Each thread holds 8 channels of a pixel, 16 bytes.
    tiling = plgpu.Tiling(((PIECE, CHUNK), (PIECE // 4, CHUNK), (8,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    every = ceil_div((tile.rows + 2) * HALO_COLUMNS, PIECE)
    pieces = ceil_div(every, tile.activators)

    def spread(vector: Array, dimension: int) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, (PIECE, CHUNK), (dimension,)), layout)

    def load_row(ref: Ref) -> Array:
        return spread(views.load(ref, layout.reduce(0)), 1)

    def activate_tile(i: Index, first_strip: Index, _feature: Index) -> None:
        places = [s.strip_at(first_strip + group) for group in range(tile.groups)]

        def activate_chunk(step: Index) -> None:
            _, slot = s.slot(s.strip_number(i, step))
            # Loaded before the wait, to hide the latency.
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
                    # The compiler does not move loads ahead of stores, so a whole batch is loaded
                    # first.
                    mine = [me * pieces + n for n in range(start, min(start + BATCH, pieces))]
                    targets = [pixels.at[pl.ds(piece * PIECE, PIECE)] for piece in mine]
                    loaded = [views.load(target, layout) for target in targets]
                    for piece, target, x in zip(mine, targets, loaded, strict=True):
                        pixel = (
                            plgpu.broadcasted_iota(jnp.int32, (PIECE,), 0, layout=layout.reduce(1))
                            + piece * PIECE
                        )
                        # pixel // HALO_COLUMNS (10) by multiplication: exact for any strip.
                        down = (pixel * 6554) >> 16
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

        def pass_extra(step: Index) -> None:
            _, slot = s.slot(s.strip_number(i, step))
            for group in range(tile.groups):
                plgpu.barrier_wait(program.barrier(program.strip_full, group, slot))
                plgpu.barrier_arrive(program.barrier(program.strip_ready, group, slot))

        loop(0, s.chunks, activate_chunk)
        loop(s.chunks, s.steps, pass_extra)

    program.each_tile(activate_tile)
