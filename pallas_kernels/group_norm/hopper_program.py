"""Shared by GroupNorm's Hopper kernels: a program's place, its loads and stores, and the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from pallas_kernels.group_norm.hopper_plan import LANES, THREADS, Grid
from pallas_kernels.hopper_views import load, store
from pallas_kernels.jax_modules import mosaic_gpu as plgpu
from pallas_kernels.types import Index, Layout, Ref

LOG2_E = 1.4426950408889634
WARPS = THREADS // LANES


class Program:
    """One program's place in the grid, and its loads and stores.

    Fields:
      grid: of the kernel.
      sample, split: of the program, see `Grid.place`.
      channel: its first channel, counted over all parts.
      tile: layout of a register tile.
      vector: layout of one number per channel, as a register tile has them.
      column: layout of one number per channel, each in one thread of every warp.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.sample, self.split, chunk = grid.place(lax.axis_index('program'))
        self.channel = chunk * grid.chunk
        tiling = (
            (grid.rows, grid.chunk),
            (grid.rows // WARPS, grid.chunk),
            (grid.vector,),
        )
        self.tile = plgpu.Layout.TILED(
            plgpu.Tiling(tiling), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
        )
        self.vector = self.tile.reduce(0)
        self.column = plgpu.Layout.TILED(
            plgpu.Tiling(((grid.chunk,), (grid.chunk // LANES,))),
            warp_dims=(plgpu.Replicated(WARPS),),
            lane_dims=(-2,),
            vector_dim=-1,
        )

    def each_part(self, body: Callable[[int, Index], None]) -> None:
        """Runs body(part, first channel in it) for the part that has this program's channels."""
        start = 0
        for number, size in enumerate(self.grid.parts):
            run = functools.partial(body, number, self.channel - start)
            if len(self.grid.parts) == 1:
                run()
            else:
                pl.when((self.channel >= start) & (self.channel < start + size))(run)
            start += size

    def load(self, ref: Ref, channel: Index, step: Index) -> list[Float[Array, 'rows chunk']]:
        """Loads the register tiles of a step from an image (batch, pixels, channels)."""
        # All at once, because the compiler does not move loads ahead of stores.
        return [
            load(ref.at[self._place(channel, step, n)], self.tile)
            for n in range(self.grid.tile.unroll)
        ]

    def store(
        self, ref: Ref, channel: Index, step: Index, values: Sequence[Float[Array, 'rows chunk']]
    ) -> None:
        """Stores the register tiles of a step to an image, in its type."""
        for n, value in enumerate(values):
            store(ref.at[self._place(channel, step, n)], value.astype(ref.dtype))

    def _place(self, channel: Index, step: Index, number: int) -> tuple[Index, ...]:
        first = self._first_pixel(step, number)
        if self.grid.ragged:
            # A tile that would extend past the end covers the last pixels instead. Pixels that it
            # shares with another tile (see `fresh`) are stored twice, with equal values.
            first = lax.min(first, jnp.int32(self.grid.pixels - self.grid.rows))
        return self.sample, pl.ds(first, self.grid.rows), pl.ds(channel, self.grid.chunk)

    def _first_pixel(self, step: Index, number: int) -> Index:
        grid = self.grid
        return (self.split * grid.share + step * grid.tile.unroll + number) * grid.rows

    def fresh(self, step: Index, number: int) -> Bool[Array, 'rows chunk'] | None:
        """Returns the mask of the pixels of a register tile that no other tile has; None: all."""
        if not self.grid.ragged:
            return None
        first = self._first_pixel(step, number)
        start = lax.min(first, jnp.int32(self.grid.pixels - self.grid.rows))
        row = plgpu.broadcasted_iota(jnp.int32, (self.grid.rows,), 0, layout=self.tile.reduce(1))
        return self._spread(row + start >= first, 0)

    def load_vector(self, ref: Ref, layout: Layout | None = None) -> Float[Array, ' chunk']:
        """Loads one number per channel from (batch, channels), or from (1, channels).

        Args:
          layout: None is `vector`.
        """
        sample = self.sample if ref.shape[0] > 1 else 0
        return load(ref.at[sample, pl.ds(self.channel, self.grid.chunk)], layout or self.vector)

    def store_vector(self, ref: Ref, value: Float[Array, ' chunk']) -> None:
        """Stores one number per channel to (batch, channels)."""
        store(ref.at[self.sample, pl.ds(self.channel, self.grid.chunk)], value)

    def spread(self, *vectors: Float[Array, ' chunk']) -> list[Float[Array, 'rows chunk']]:
        """Returns one number per channel for every pixel of a register tile."""
        return [self._spread(vector, 1) for vector in vectors]

    def _spread(self, value: Array, dimension: int) -> Array:
        shape = (self.grid.rows, self.grid.chunk)
        return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, (dimension,)), self.tile)

    def zeros(self) -> Float[Array, 'rows chunk']:
        """Returns a register tile of zeros."""
        return plgpu.layout_cast(jnp.zeros((self.grid.rows, self.grid.chunk)), self.tile)

    def rows_of(
        self, scratch: Ref, values: Sequence[Float[Array, 'rows chunk']]
    ) -> list[list[Float[Array, ' chunk']]]:
        """Returns the rows of register tiles, with each channel's numbers in one thread.

        They pass through `scratch`. A program calls this once: nothing keeps a second call from
        overwriting what other threads still read.
        """
        for number, value in enumerate(values):
            store(scratch.at[number], value)
        plgpu.commit_smem()
        return [
            [load(scratch.at[number, row], self.column) for row in range(self.grid.rows)]
            for number in range(len(values))
        ]

    def sigmoid(self, z: Array) -> Array:
        """Returns 1 / (1 + exp(−z)) to the precision of the images."""
        return sigmoid(z, exact=self.grid.itemsize == 4)

    def store_partial(self, ref: Ref, number: int, value: Float[Array, ' chunk']) -> None:
        """Stores one number per channel to partial results (batch, splits, numbers, channels)."""
        channels = pl.ds(self.channel, self.grid.chunk)
        store(ref.at[self.sample, self.split, number, channels], value)


class Groups:
    """All channels of a program's sample as matrices (groups, channels of a group).

    A thread holds whole groups, so it can sum their channels without other threads.
    """

    def __init__(self, program: Program, groups: int, size: int) -> None:
        self.program, self.shape = program, (groups, size)
        lanes = min(groups, LANES)
        self.layout = plgpu.Layout.TILED(
            plgpu.Tiling(((lanes, 1),)),
            warp_dims=(plgpu.Replicated(WARPS),),
            lane_dims=(-2,) if lanes == LANES else (plgpu.Replicated(LANES // lanes), -2),
            vector_dim=-1,
        )

    def load(self, ref: Ref, *number: int) -> Float[Array, 'groups size']:
        """Loads the numbers of the program's sample, or the numbers that all samples share.

        Args:
          ref: (batch or 1, groups, channels of a group), or (…, vectors, groups, …).
          number: which of several vectors.
        """
        return load(ref.at[(self.program.sample if ref.shape[0] > 1 else 0, *number)], self.layout)

    def mean(self, values: Float[Array, 'groups size']) -> Float[Array, 'groups size']:
        """Returns the mean over each group's channels, for every one of them."""
        mean = jnp.sum(values, axis=1) * (1.0 / self.shape[1])
        return plgpu.layout_cast(lax.broadcast_in_dim(mean, self.shape, (0,)), self.layout)

    def vectors(
        self, scratch: Ref, values: Sequence[Float[Array, 'groups size']]
    ) -> list[Float[Array, ' chunk']]:
        """Returns the numbers of the program's channels, in its layout `vector`.

        They pass through `scratch`; as with `Program.rows_of`, a program calls this once.
        """
        for number, value in enumerate(values):
            store(scratch.at[number], value)
        plgpu.commit_smem()
        program = self.program
        return [
            load_flat(scratch.at[n], program.channel, program.grid.chunk, program.vector)
            for n in range(len(values))
        ]


def load_flat(ref: Ref, start: Index, size: int, layout: Layout) -> Float[Array, ' size']:
    """Loads consecutive elements of a matrix, as if its rows were joined."""
    rows, columns = ref.shape
    return load(ref.reshape(rows * columns).at[pl.ds(start, size)], layout)


def loop(grid: Grid, body: Callable[[Index, Any], Any], state: PyTree[Array]) -> Any:
    """Runs body(step, state) for every step; a single one is not a loop."""
    if grid.steps == 1:
        return body(jnp.int32(0), state)
    return lax.fori_loop(jnp.int32(0), jnp.int32(grid.steps), body, state)


def total(values: Sequence[Array]) -> Array:
    """Returns the sum, pairwise, in a fixed order."""
    terms = list(values)
    while len(terms) > 1:
        odd = [terms.pop()] if len(terms) % 2 else []
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)] + odd
    return terms[0]


def sigmoid(z: Array, *, exact: bool) -> Array:
    """Returns 1 / (1 + exp(−z)).

    Args:
      exact: to the last bits of float32. Otherwise it takes two instructions of the special
        function unit, with a relative error of about 2⁻²¹; a division would take about ten more.
    """
    if exact:
        return 1.0 / (1.0 + jnp.exp(-z))
    root = lax.rsqrt(1.0 + lax.exp2(z * -LOG2_E))
    return root * root


def launch(
    name: str,
    grid: Grid,
    body: Callable[..., None],
    results: PyTree[jax.ShapeDtypeStruct],
    operands: Sequence[Array],
    scratch: tuple[int, ...] | None = None,
) -> Any:
    """Runs a kernel, one warpgroup per program.

    Args:
      name: without the prefix jaxunet_group_norm_.
      body: a function of `Program`, and of the references: operands, results, scratch.
      scratch: shape of the float32 scratch in shared memory; None: there is none.
    """
    kernel = plgpu.kernel(
        lambda *refs: body(Program(grid), *refs),
        out_type=results,
        scratch_types=[plgpu.SMEM(scratch, jnp.float32)] if scratch else [],
        grid=(grid.programs,),
        grid_names=('program',),
        kernel_name=f'jaxunet_group_norm_{name}',
        compiler_params=plgpu.CompilerParams(
            approx_math=grid.itemsize < 4,  # float32 images need full precision
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Safe, because threads read other threads' writes to shared memory only after
            # commit_smem.
            unsafe_no_auto_barriers=True,
        ),
    )
    # Under x64, Python's integers would become int64 and clash with the device's int32 indices.
    with jax.enable_x64(False):
        return kernel(*operands)
