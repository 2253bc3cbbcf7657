"""The portable weight gradient of the 3×3 convolution: a split-K GEMM over the pixels.

    dW[i, j, c, f] = Σ x[b, h + i − 1, w + j − 1, c] · dy[b, h, w, f]

It is written in Pallas through Triton and supports every shape. A program computes `block_channels`
× `block_features` weights of `taps` taps, over one split of the pixels; Triton pipelines its loads
over `num_stages` steps. Each split writes its float32 partial sums, and XLA adds them in a fixed
order without atomics, so results are the same in every run. If x or dy has fewer channels than the
tensor cores take at once, the nine taps share that axis of the output, and the other operand is
read once instead of nine times.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import tile_table
from pallas_kernels.conv3x3.triton_blocks import (
    DTYPES,
    TAPS,
    Launch,
    Ref,
    below,
    call,
    dot,
    dot_size,
    every,
    folds,
    inside,
    load,
    shape_class,
    split_pixel,
    tap_offset,
)
from pallas_kernels.conv3x3.triton_weight_gradient_tiles import Tile, default_tile
from pallas_kernels.jax_modules import triton as plgpu
from pallas_kernels.types import Shaped

NAME = 'jaxunet_conv3x3_triton_weight_gradient'


def supports(parts: Sequence[Shaped], dy: Shaped) -> str | None:
    """Returns None if `weight_gradient` accepts these operands, else the problem and what to do."""
    if not parts:
        return 'parts: none given; pass at least one array (batch, height, width, channels)'
    if len(dy.shape) != 4 or 0 in dy.shape or dy.dtype not in DTYPES:
        return (
            f'dy: {dy.dtype}{list(dy.shape)}; '
            f'pass a non-empty NHWC array of float32, bfloat16 or float16'
        )
    for i, part in enumerate(parts):
        if (
            len(part.shape) != 4
            or part.shape[:3] != dy.shape[:3]
            or part.dtype != dy.dtype
            or 0 in part.shape
        ):
            return (
                f'parts[{i}]: {part.dtype}{list(part.shape)} beside dy {dy.dtype}{list(dy.shape)}; '
                'they are non-empty NHWC arrays of one dtype that differ in channels only'
            )
    return None


class _Part(NamedTuple):
    """The gradient of one part, and the units (programs of one split) that compute it.

    Fields:
      offset: its first channel among those of all parts.
      block: channels of a unit, or taps and channels if they share the axis.
    """

    offset: int
    channels: int
    block: int
    taps: int
    first_unit: int
    units: int


@dataclasses.dataclass(frozen=True)
class _Problem:
    batch: int
    height: int
    width: int
    channels: tuple[int, ...]
    features: int
    tile: Tile
    interpret: bool

    @property
    def pixels(self) -> int:
        return self.batch * self.height * self.width

    @property
    def fold_features(self) -> bool:
        """True if the taps share an axis with dy's channels, because dy has few channels and x has
        not.
        """
        return folds(self.features) and not any(folds(c) for c in self.channels)

    @property
    def block_features(self) -> int:
        if self.fold_features:
            return dot_size(TAPS * self.features)
        return min(self.tile.block_features, dot_size(self.features))

    @property
    def feature_blocks(self) -> int:
        return 1 if self.fold_features else pl.cdiv(self.features, self.block_features)

    @property
    def parts(self) -> list[_Part]:
        found, offset, first_unit = [], 0, 0
        for channels in self.channels:
            if folds(channels):
                block, blocks, taps = dot_size(TAPS * channels), 1, 9
            else:
                block = min(self.tile.block_channels, dot_size(channels))
                blocks, taps = pl.cdiv(channels, block), 9 if self.fold_features else self.tile.taps
            units = blocks * self.feature_blocks * (TAPS // taps)
            found.append(_Part(offset, channels, block, taps, first_unit, units))
            offset, first_unit = offset + channels, first_unit + units
        return found

    @property
    def units(self) -> int:
        return sum(part.units for part in self.parts)

    @property
    def steps(self) -> int:
        """Tiles of pixels that one split adds up."""
        return pl.cdiv(
            pl.cdiv(self.pixels, self.tile.block_pixels), pl.cdiv(self.tile.programs, self.units)
        )

    @property
    def splits(self) -> int:
        return pl.cdiv(self.pixels, self.steps * self.tile.block_pixels)


# One function: its three variants share the axes, the masks and the loop.
def _unit(  # noqa: PLR0915
    p: _Problem, part: _Part, x: Ref, dy: Ref, output: Ref, unit: Array, split: Array
) -> None:
    """Computes one tile of channels × features of `part.taps` taps, over one split."""
    total = sum(p.channels)
    depth = p.tile.block_pixels
    groups = TAPS // part.taps
    group, unit = jax.lax.rem(unit, groups), jax.lax.div(unit, groups)
    f_block, c_block = jax.lax.rem(unit, p.feature_blocks), jax.lax.div(unit, p.feature_blocks)
    fold_channels = folds(part.channels)

    # For each axis of the output: the index in the tensor, the tap (if it shares it), and the mask.
    n = f_block * p.block_features + jnp.arange(p.block_features, dtype=jnp.int32)[None, :]
    m = c_block * part.block + jnp.arange(part.block, dtype=jnp.int32)[None, :]
    if p.fold_features:
        n_ok = below(n, TAPS * p.features, p.block_features)
        n_tap, feature = jax.lax.div(n, p.features), jax.lax.rem(n, p.features)
    else:
        n_ok, feature = below(n, p.features, p.block_features * p.feature_blocks), n
    if fold_channels:
        m_ok = below(m, TAPS * part.channels, part.block)
        m_tap, channel = jax.lax.div(m, part.channels), jax.lax.rem(m, part.channels)
    else:
        m_ok, channel = below(m, part.channels, part.block * pl.cdiv(part.channels, part.block)), m

    def gather(
        ref: Ref,
        pixel: Array,
        row: Array,
        column: Array,
        taps: Array,
        sign: int,
        index: Array,
        ok: Array | None,
    ) -> Array:
        """Loads a tile (pixels, axis) whose axis runs over taps and channels together."""
        rows, columns = tap_offset(taps)
        rows, columns = sign * rows, sign * columns
        there = inside(row[:, None] + rows, column[:, None] + columns, p.height, p.width)
        valid = every(there, ok, pixel[:, None] < p.pixels)
        shape = (depth, taps.shape[1])
        return load(
            ref, pixel[:, None] + (rows * p.width + columns), jnp.broadcast_to(index, shape), valid
        )

    def step(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        pixel = (split * p.steps + i) * depth + jnp.arange(depth, dtype=jnp.int32)
        in_range = pixel < p.pixels
        _, row, column = split_pixel(pixel, p.height, p.width)
        if p.fold_features:
            right = gather(dy, pixel, row, column, n_tap, -1, feature, n_ok)
        else:
            right = load(dy, pixel[:, None], feature, every(in_range[:, None], n_ok))
        if fold_channels:
            left = gather(x, pixel, row, column, m_tap, 1, channel, m_ok)
            return (sums[0] + dot(left, right, (0, 0), p.interpret),)
        if p.fold_features:
            left = load(x, pixel[:, None], channel, every(in_range[:, None], m_ok))
            return (sums[0] + dot(left, right, (0, 0), p.interpret),)
        added = []
        for t, value in enumerate(sums):
            rows, columns = tap_offset(group * part.taps + t) if part.taps < 9 else tap_offset(t)
            valid = (inside(row + rows, column + columns, p.height, p.width) & in_range)[:, None]
            left = load(
                x, (pixel + (rows * p.width + columns))[:, None], channel, every(valid, m_ok)
            )
            added.append(value + dot(left, right, (0, 0), p.interpret))
        return tuple(added)

    sums = 1 if fold_channels or p.fold_features else part.taps
    zeros = tuple(jnp.zeros((part.block, p.block_features), jnp.float32) for _ in range(sums))
    first = split * (TAPS * total)
    for t, value in enumerate(jax.lax.fori_loop(0, p.steps, step, zeros)):
        m_out = m.reshape(part.block, 1)
        stored = every(None if m_ok is None else m_ok.reshape(part.block, 1), n_ok)
        if fold_channels:
            target = jax.lax.div(m_out, part.channels) * total + jax.lax.rem(m_out, part.channels)
        elif p.fold_features:
            target = jnp.broadcast_to(n_tap, value.shape) * total + m_out
        else:
            target = (group * part.taps + t) * total + m_out
        rows, columns = (
            jnp.broadcast_to(index, value.shape)
            for index in (first + part.offset + target, feature)
        )
        if stored is not None:
            # Masked-out elements need their own addresses, because the interpreter writes them too.
            rows = jnp.where(stored, rows, p.splits * TAPS * total)
        plgpu.store(output.at[rows, columns], value, mask=stored)


def _body(p: _Problem, refs: Sequence[Ref]) -> None:
    """Runs one program. `refs`: parts (pixels, Ci)…, dy (pixels, F), output (splits · 9 · C, F)."""
    *parts, dy, output = refs
    program = pl.program_id(0)
    unit, split = jax.lax.rem(program, p.units), jax.lax.div(program, p.units)
    for x, part in zip(parts, p.parts, strict=True):
        if len(parts) == 1:
            _unit(p, part, x, dy, output, unit, split)
        else:

            @pl.when((unit >= part.first_unit) & (unit < part.first_unit + part.units))
            def _(x: Ref = x, part: _Part = part) -> None:
                _unit(p, part, x, dy, output, unit - part.first_unit, split)


def weight_gradient(
    parts: tuple[Float[Array, 'batch height width _'], ...],
    dy: Float[Array, 'batch height width features'],
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float[Array, '3 3 channels features']:
    """Returns the gradient of Σ conv3x3(x, kernel) · dy with respect to the kernel (HWIO), in
    float32.

    Args:
      parts: x, joined along channels; each part is read where it is. float32, bfloat16 or float16.
      dy: of x's dtype.
      tile: None = the tile measured on this device, else `default_tile`.
      interpret: run on the CPU, for tests.

    Raises:
      ValueError: `supports` refuses the operands.
    """
    problem = supports(parts, dy)
    if problem is not None:
        raise ValueError(f'conv3x3 weight gradient (triton): {problem}')
    batch, height, width, features = dy.shape
    channels = tuple(part.shape[-1] for part in parts)
    pixels = batch * height * width
    tile = tile or tile_table.measured(
        Tile, 'conv3x3/triton_weight_gradient', dy.dtype, shape_class(channels, features, pixels)
    )
    tile = tile or default_tile(channels, features, pixels, dy.dtype.itemsize)
    return _launch(parts, dy, tile, interpret)


# Jitted, so that equal calls share one trace and one lowering.
@functools.partial(jax.jit, static_argnums=(2, 3))
def _launch(parts: tuple[Array, ...], dy: Array, tile: Tile, interpret: bool) -> Array:
    batch, height, width, features = dy.shape
    channels = tuple(part.shape[-1] for part in parts)
    pixels = batch * height * width
    p = _Problem(batch, height, width, channels, features, tile, interpret)
    operands = [
        *(part.reshape(pixels, part.shape[-1]) for part in parts),
        dy.reshape(pixels, features),
    ]
    shape = (p.splits * TAPS * sum(channels), features)
    launch = Launch(p.splits * p.units, tile.num_warps, tile.num_stages, interpret)
    partial = call(NAME, functools.partial(_body, p), operands, shape, jnp.float32, launch)
    return jnp.sum(partial.reshape(p.splits, 3, 3, sum(channels), features), axis=0)
