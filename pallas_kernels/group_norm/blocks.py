"""Shared by the Triton GroupNorm kernels: masked loads and stores, and reductions over groups.

A register tile has rows (pixels) × lanes (channels). A mask may be None, which means all true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.group_norm.tiles import Grid
from pallas_kernels.jax_modules import triton as plgpu
from pallas_kernels.types import Index, Ref

State = TypeVar('State')
# 1 / (1 + 2^(−log₂(e) · z)); 0fBFB8AA3B is −log₂(e), 0f3F800000 is 1.
SIGMOID = """{
  .reg .f32 t;
  mul.f32 t, $1, 0fBFB8AA3B;
  ex2.approx.ftz.f32 t, t;
  add.f32 t, t, 0f3F800000;
  rcp.approx.ftz.f32 $0, t;
}"""


class Lanes(NamedTuple):
    """Channels of the concatenation, and the mask of those that exist (None: all)."""

    columns: Int[Array, ' lanes']
    valid: Bool[Array, ' lanes'] | None


class Program:
    """One program's place in the grid, and its loads and stores.

    The grid is channel blocks × samples × pixel splits.

    Fields:
      own: the channels that it reads and writes.
      window: the channels of all groups that `own` belongs to; equal to `own` if programs own whole
        groups.
      exact: refine means by a second pass over registers, for float32 numbers far from zero.
    """

    def __init__(self, grid: Grid, *, exact: bool = False) -> None:
        self.grid = grid
        self.exact = exact
        self.sample = pl.program_id(1)
        self.split = pl.program_id(2)
        self.first_row = self.split * (grid.steps * grid.stride)
        lane, first = jax.lax.iota(jnp.int32, grid.lanes), pl.program_id(0) * grid.channels
        columns = first + lane
        self.own = Lanes(
            columns, (lane < grid.channels) & (columns < grid.total) if grid.ragged_lanes else None
        )
        self.window = self.own
        if not grid.whole_groups:
            columns = first // grid.group * grid.group + jax.lax.iota(jnp.int32, grid.window)
            self.window = Lanes(columns, columns < grid.total)

    def rows(self, step: Int[Array, ''] | int, tile: int) -> Int[Array, ' rows']:
        """Returns the pixels of a register tile."""
        return (
            self.first_row
            + step * self.grid.stride
            + tile * self.grid.rows
            + jax.lax.iota(jnp.int32, self.grid.rows)
        )

    def row_mask(self, step: Int[Array, ''] | int, tile: int) -> Bool[Array, ' rows'] | None:
        """Returns the mask of the pixels of a register tile that exist."""
        return self.rows(step, tile) < self.grid.pixels if self.grid.ragged_rows else None

    def pieces(self, arrays: int, lanes: Lanes) -> list[Lanes]:
        """Returns, for each array, the lanes' columns in it and the mask of the lanes that lie in
        it.

        A single array has all channels.
        """
        if arrays == 1:
            return [lanes]
        found = []
        start = 0
        for size in self.grid.parts:
            local = lanes.columns - start
            inside = (local >= 0) & (local < size)
            inside = inside if lanes.valid is None else inside & lanes.valid
            # The interpreter gathers, so a negative index would wrap around; a GPU never reads
            # masked elements.
            found.append(
                Lanes(jnp.where(inside, local, size) if self.grid.interpret else local, inside)
            )
            start += size
        return found

    def load(
        self, refs: Sequence[Ref], step: Int[Array, ''] | int
    ) -> list[Float[Array, 'rows lanes']]:
        """Loads the register tiles of a step in storage type; zero outside.

        Args:
          refs: the parts, or one array of all channels.
        """
        return [self._load_tile(refs, step, tile) for tile in range(self.grid.unroll)]

    def _load_tile(
        self, refs: Sequence[Ref], step: Int[Array, ''] | int, tile: int
    ) -> Float[Array, 'rows lanes']:
        rows, below = self.rows(step, tile), self.row_mask(step, tile)
        value = None
        for ref, (columns, inside) in zip(refs, self.pieces(len(refs), self.own), strict=True):
            mask = tile_mask(below, inside, self.grid)
            # Earlier parts fill the lanes that this part lacks, so joining the parts needs no
            # instructions.
            other = None if mask is None else 0.0 if value is None else value
            value = plgpu.load(
                ref.at[self.sample, rows[:, None], columns[None, :]],
                mask=mask,
                other=other,
            )
        assert value is not None, 'refs has at least one array'
        return value

    def store(
        self,
        refs: Sequence[Ref],
        step: Int[Array, ''] | int,
        values: Sequence[Float[Array, 'rows lanes']],
    ) -> None:
        """Writes the register tiles of a step, each lane to the part that has its channel."""
        for tile, value in enumerate(values):
            rows, below = self.rows(step, tile), self.row_mask(step, tile)
            for ref, (columns, inside) in zip(refs, self.pieces(len(refs), self.own), strict=True):
                mask = tile_mask(below, inside, self.grid)
                plgpu.store(
                    ref.at[self.sample, rows[:, None], columns[None, :]],
                    value.astype(ref.dtype),
                    mask=mask,
                )

    def load_channels(
        self, ref: Ref, *index: Index, dtype: DTypeLike | None = None, lanes: Lanes | None = None
    ) -> Float[Array, ' lanes']:
        """Loads ref[*index, channel] of every lane; zero where there is no channel."""
        columns, valid = lanes or self.own
        value = plgpu.load(
            ref.at[(*index, columns)], mask=valid, other=None if valid is None else 0.0
        )
        return value if dtype is None else value.astype(dtype)

    def load_moments(
        self, refs: Sequence[Ref]
    ) -> tuple[Float[Array, ' window'], Float[Array, ' window']]:
        """Loads mean and mean squared deviation of every channel of the window.

        Args:
          refs: the parts' moments (batch, channels, 2).
        """
        found: list[Array] = []
        for which in (0, 1):
            value = None
            for ref, (columns, inside) in zip(
                refs, self.pieces(len(refs), self.window), strict=True
            ):
                other = None if inside is None else 0.0 if value is None else value
                value = plgpu.load(ref.at[self.sample, columns, which], mask=inside, other=other)
            assert value is not None, 'refs has at least one array'
            found.append(value)
        return found[0], found[1]

    def store_channels(self, ref: Ref, value: Float[Array, ' lanes'], *index: Index) -> None:
        """Stores one number per lane to ref[*index, channel]."""
        plgpu.store(
            ref.at[(*index, self.own.columns)], value.astype(ref.dtype), mask=self.own.valid
        )

    def group_sum(
        self, value: Float[Array, ' window'] | Float[Array, 'lanes window']
    ) -> Float[Array, ' lanes']:
        """Returns the sum over the channels of each lane's group.

        Args:
          value: one number per channel of the window; with one row per lane, each lane sums its own
            row.
        """
        grid = self.grid
        if grid.group == 1:
            return value
        if grid.group == grid.channels:
            valid = self.own.valid
            return jnp.broadcast_to(
                jnp.sum(value if valid is None else jnp.where(valid, value, 0.0)), (grid.lanes,)
            )
        same = (self.own.columns // grid.group)[:, None] == (self.window.columns // grid.group)[
            None, :
        ]
        rows = jnp.broadcast_to(value if value.ndim == 2 else value[None, :], same.shape)
        return jnp.sum(jnp.where(same, rows, 0.0), axis=1)


def tile_mask(
    below: Bool[Array, ' rows'] | None, inside: Bool[Array, ' lanes'] | None, grid: Grid
) -> Bool[Array, 'rows lanes'] | None:
    """Returns the mask of a register tile from the masks of its rows and its lanes."""
    shape = (grid.rows, grid.lanes)
    if below is None:
        return None if inside is None else jnp.broadcast_to(inside[None, :], shape)
    mask = jnp.broadcast_to(below[:, None], shape)
    return mask if inside is None else mask & inside[None, :]


def loop(
    steps: int, body: Callable[[Index, State], State], state: State, *, backwards: bool = False
) -> State:
    """Runs body(step, state) for every step.

    A single step is not a loop, so that the loaded values can stay in registers.
    """
    if steps == 1:
        return body(0, state)
    last = steps - 1
    return jax.lax.fori_loop(
        jnp.int32(0),
        jnp.int32(steps),
        lambda i, s: body(jnp.int32(last) - i if backwards else i, s),
        state,
    )


# Long, because each step exists twice: with and without masked rows.
def moments_of(
    program: Program, tiles: Callable[[Index], Sequence[Array]], dtype: DTypeLike
) -> tuple[Array, Array, Array | float]:
    """Returns mean, sum of squared deviations, and count of this program's pixels, for each lane.

    Every (row, lane) of the register tile keeps a mean and a sum of squared deviations of its own
    pixels. A step's tiles are reduced in two passes over registers, and then merged with the
    earlier steps (Chan, Golub & LeVeque 1979, STAN-CS-79-773, eq. 2.1); the rows are merged at the
    end. The mean is always subtracted before squaring, so a large mean costs no accuracy.
    """
    grid = program.grid
    shape = (grid.rows, grid.lanes)

    def step_moments(step: Index) -> tuple[Array, Array, Array | float]:
        values = [v.astype(dtype) for v in tiles(step)]
        masks = [program.row_mask(step, t) for t in range(grid.unroll)]
        if not grid.ragged_rows:
            mean = sum(values[1:], values[0]) * (1.0 / grid.unroll)
            deviation = jax.lax.square(values[0] - mean)
            for v in values[1:]:
                deviation = deviation + jax.lax.square(v - mean)
            return mean, deviation, float(grid.unroll)
        count = sum(
            (jnp.where(m, 1.0, 0.0).astype(dtype)[:, None] for m in masks if m is not None),
            jnp.zeros((grid.rows, 1), dtype),
        )
        mean = sum(values[1:], values[0]) / jnp.maximum(count, 1.0)
        deviation = jnp.zeros(shape, dtype)
        for v, m in zip(values, masks, strict=True):
            assert m is not None, 'ragged rows have masks'
            deviation = deviation + jnp.where(m[:, None], jax.lax.square(v - mean), 0.0)
        return mean, deviation, count

    def join(step: Index, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        mean, deviation, seen = state
        step_mean, step_deviation, count = step_moments(step)
        total = seen + count
        weight = count / jnp.maximum(total, 1.0)
        delta = step_mean - mean
        return (
            mean + delta * weight,
            deviation + step_deviation + jax.lax.square(delta) * (seen * weight),
            total,
        )

    count: Array | float
    if grid.steps == 1:
        mean, deviation, count = step_moments(0)
    else:
        seen = jnp.zeros((grid.rows, 1) if grid.ragged_rows else (), dtype)
        mean, deviation, count = loop(
            grid.steps, join, (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), seen)
        )
    if not grid.ragged_rows:
        channel_mean = jnp.sum(mean, axis=0) * (1.0 / grid.rows)
        if program.exact:
            channel_mean = channel_mean + jnp.sum(mean - channel_mean[None, :], axis=0) * (
                1.0 / grid.rows
            )
        spread = jnp.sum(deviation + jax.lax.square(mean - channel_mean[None, :]) * count, axis=0)
        return channel_mean, spread, float(grid.steps * grid.stride)
    pixels = jnp.maximum(
        jnp.minimum(grid.pixels - program.first_row, grid.steps * grid.stride), 1
    ).astype(dtype)
    channel_mean = jnp.sum(mean * count, axis=0) / pixels
    if program.exact:
        channel_mean = (
            channel_mean + jnp.sum((mean - channel_mean[None, :]) * count, axis=0) / pixels
        )
    spread = jnp.sum(deviation + jax.lax.square(mean - channel_mean[None, :]) * count, axis=0)
    return channel_mean, spread, pixels


def group_statistics(
    program: Program, mean: Array, deviation: Array, eps: float
) -> tuple[Array, Array]:
    """Returns group mean and 1 / sqrt(group variance + eps) of every lane.

    Args:
      mean, deviation: mean and mean squared deviation of the window's channels.
    """
    share = 1.0 / program.grid.group

    def apart(centre: Array) -> Array:
        return mean - centre if program.grid.whole_groups else mean[None, :] - centre[:, None]

    centre = program.group_sum(mean) * share
    if program.exact:
        centre = centre + program.group_sum(apart(centre)) * share
    spread = (deviation if program.grid.whole_groups else deviation[None, :]) + jax.lax.square(
        apart(centre)
    )
    return centre, jax.lax.rsqrt(program.group_sum(spread) * share + eps)


def sigmoid(z: Array, grid: Grid) -> Array:
    """Returns 1 / (1 + exp(−z)).

    On a GPU this takes four instructions, two of them in the special function unit; the relative
    error is about 2⁻²².
    """
    if grid.interpret or z.dtype != jnp.float32:
        return 1.0 / (1.0 + jnp.exp(-z))
    (value,) = plgpu.elementwise_inline_asm(
        SIGMOID,
        args=[z],
        constraints='=f,f',
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(z.shape, z.dtype)],
    )
    return value


def scaled(x: Array, centre: Array, factor: Array, shift: Array | None = None) -> Array:
    """Returns (x − centre) · factor + shift for every lane, in factor's type.

    A 16-bit x is rounded by up to 2⁻¹² of itself, so the rounding of one multiply-add in float32,
    2⁻²⁴ of the same size, does not matter; a float32 x subtracts first.
    """
    if x.dtype.itemsize < 4:
        constant = -centre * factor if shift is None else shift - centre * factor
        return x.astype(factor.dtype) * factor[None, :] + constant[None, :]
    y = (x.astype(factor.dtype) - centre[None, :]) * factor[None, :]
    return y if shift is None else y + shift[None, :]
