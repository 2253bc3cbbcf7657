"""The programs of the portable convolution; `pallas_kernels.conv3x3.triton` explains them.

A program gets references to whole operands, as matrices: the parts of x (pixels, channels), the
kernel (taps · channels, features) and the result (pixels, features). It computes addresses and
masks itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.conv3x3.activation import affine_silu
from pallas_kernels.conv3x3.triton_blocks import (
    TAPS,
    Ref,
    as_column,
    below,
    dot,
    dot_size,
    every,
    folds,
    inside,
    load,
    split_pixel,
    tap_offset,
)
from pallas_kernels.conv3x3.triton_tiles import Tile
from pallas_kernels.jax_modules import triton as plgpu

Affine = tuple[Ref, Ref] | None  # a and b of SiLU(a · x + b), both (batch, channels)
SUM_PIXELS = 256  # pixels of one program that adds up products


class Part(NamedTuple):
    """One part of x.

    Fields:
      ref: (pixels, channels).
      offset: its first channel among those of all parts.
    """

    ref: Ref
    channels: int
    offset: int


class Output(NamedTuple):
    """The features of a block, (1, block), and the mask of those that exist (None: all)."""

    feature: Array
    exists: Array | None


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static shapes and options of one call.

    Fields:
      channels: of each part.
      shifts: rows of the shift, 1 or the batch.
      affine, residual: True if there is one.
    """

    batch: int
    height: int
    width: int
    channels: tuple[int, ...]
    features: int
    shifts: int
    affine: bool
    residual: bool
    tile: Tile
    interpret: bool

    @property
    def pixels(self) -> int:
        """Pixels of the whole batch."""
        return self.batch * self.height * self.width

    @property
    def total(self) -> int:
        """Channels of all parts."""
        return sum(self.channels)

    def take(self, refs: Sequence[Ref]) -> tuple[list[Part], Ref, Affine, list[Ref]]:
        """Splits references into parts, kernel, affine and others."""
        count = len(self.channels)
        offsets = [sum(self.channels[:i]) for i in range(count)]
        parts = [Part(*part) for part in zip(refs[:count], self.channels, offsets, strict=True)]
        kernel, rest = refs[count], list(refs[count + 1 :])
        affine: Affine = (rest.pop(0), rest.pop(0)) if self.affine else None
        return parts, kernel, affine, rest


class Pixels:
    """A block of consecutive pixels: where they are, their samples, and which exist.

    Fields:
      sample: (1, 1) if all are of one sample, else (size, 1).
      exists, sample_exists: masks; None if all exist.
    """

    def __init__(self, p: Problem, block: Array, size: int) -> None:
        first = block * size
        self.index = first + jnp.arange(size, dtype=jnp.int32)
        self.exists = below(self.index, p.pixels, pl.cdiv(p.pixels, size) * size)
        sample, self.row, self.column = split_pixel(self.index, p.height, p.width)
        one_sample = p.batch == 1 or p.height * p.width % size == 0
        self.sample = (
            jax.lax.div(first, p.height * p.width).reshape(1, 1) if one_sample else sample[:, None]
        )
        self.sample_exists = None if one_sample else as_column(self.exists)

    def shift(self, ref: Ref, out: Output, shifts: int) -> Array:
        """Loads the shift of these pixels: (1, block) or (size, block)."""
        sample = jnp.zeros((1, 1), jnp.int32) if shifts == 1 else self.sample
        return load(
            ref, sample, out.feature, every(None if shifts == 1 else self.sample_exists, out.exists)
        )

    def activate(self, x: Array, affine: Affine, channel: Array, channel_ok: Array | None) -> Array:
        """Returns SiLU(a · x + b), or x without an affine.

        Channels that do not exist stay zero, because x, a and b are loaded as zero there.
        """
        if affine is None:
            return x
        ok = every(self.sample_exists, channel_ok)
        active = affine_silu(
            x, load(affine[0], self.sample, channel, ok), load(affine[1], self.sample, channel, ok)
        )
        return active.astype(x.dtype)


def forward_program(p: Problem, refs: Sequence[Ref]) -> None:
    """Computes one tile of the convolution.

    Args:
      refs: parts (pixels, Ci)…, kernel (9 C, F), shift (1|B, F), [residual (pixels, F)], y (pixels,
        F).
    """
    parts, kernel, _, rest = p.take(refs)
    t = p.tile
    blocks = pl.cdiv(p.features, t.block_features)
    program = pl.program_id(0)
    # Neighbouring programs read the same pixels, which are then in L2.
    pixels = Pixels(p, jax.lax.div(program, blocks), t.block_pixels)
    feature = (
        jax.lax.rem(program, blocks) * t.block_features
        + jnp.arange(t.block_features, dtype=jnp.int32)[None, :]
    )
    out = Output(feature, below(feature, p.features, blocks * t.block_features))
    sums = jnp.zeros((t.block_pixels, t.block_features), jnp.float32)
    for part in parts:
        add = _add_folded if folds(part.channels) else _add_looped
        sums = add(p, pixels, part, kernel, out, sums)
    _finish(p, pixels, rest, out, sums)


def _add_folded(
    p: Problem, pixels: Pixels, part: Part, kernel: Ref, out: Output, sums: Array
) -> Array:
    """Adds the products of one part whose channels share the K axis with the taps."""
    depth = dot_size(TAPS * part.channels)
    k = jnp.arange(depth, dtype=jnp.int32)
    k_ok = below(k, TAPS * part.channels, depth)
    tap, channel = jax.lax.div(k, part.channels), jax.lax.rem(k, part.channels)
    rows, columns = tap_offset(tap[None, :])
    valid = every(
        inside(pixels.row[:, None] + rows, pixels.column[:, None] + columns, p.height, p.width),
        None if k_ok is None else k_ok[None, :],
        as_column(pixels.exists),
    )
    wide = jnp.broadcast_to(channel[None, :], (p.tile.block_pixels, depth))
    x = load(part.ref, pixels.index[:, None] + (rows * p.width + columns), wide, valid)
    w = load(
        kernel,
        (tap * p.total + channel + part.offset)[:, None],
        out.feature,
        every(as_column(k_ok), out.exists),
    )
    return sums + dot(x, w, (1, 0), p.interpret)


def _add_looped(
    p: Problem, pixels: Pixels, part: Part, kernel: Ref, out: Output, sums: Array
) -> Array:
    """Adds the products of one part, tap by tap and some channels at a time."""
    depth = min(p.tile.block_channels, dot_size(part.channels))
    chunks = pl.cdiv(part.channels, depth)

    def step(i: Array, sums: Array) -> Array:
        tap, chunk = jax.lax.div(i, chunks), jax.lax.rem(i, chunks)
        rows, columns = tap_offset(tap)
        channel = chunk * depth + jnp.arange(depth, dtype=jnp.int32)
        channel_ok = below(channel, part.channels, chunks * depth)
        ok = None if channel_ok is None else channel_ok[None, :]
        there = every(
            inside(pixels.row + rows, pixels.column + columns, p.height, p.width), pixels.exists
        )
        valid = every(as_column(there), ok)
        x = load(
            part.ref, (pixels.index + (rows * p.width + columns))[:, None], channel[None, :], valid
        )
        w = load(
            kernel,
            (channel + (tap * p.total + part.offset))[:, None],
            out.feature,
            every(as_column(channel_ok), out.exists),
        )
        return sums + dot(x, w, (1, 0), p.interpret)

    return jax.lax.fori_loop(0, TAPS * chunks, step, sums)


def _finish(p: Problem, pixels: Pixels, refs: Sequence[Ref], out: Output, sums: Array) -> None:
    """The epilogue: adds shift and residual, and stores. `refs`: shift, [residual], y."""
    *residual, y = refs[1:]
    sums += pixels.shift(refs[0], out, p.shifts)
    stored = every(as_column(pixels.exists), out.exists)
    for ref in residual:
        sums += load(ref, pixels.index[:, None], out.feature, stored).astype(jnp.float32)
    plgpu.store(y.at[pixels.index[:, None], out.feature], sums.astype(y.dtype), mask=stored)


def products_program(p: Problem, refs: Sequence[Ref]) -> None:
    """Computes one tile of the products of all taps.

    Args:
      refs: parts (pixels, Ci)…, kernel (9 C, F), [a, b (B, C)], products (9 F, pixels) float32.
    """
    parts, kernel, affine, (output,) = p.take(refs)
    t = p.tile
    size = TAPS * p.features
    width = min(t.block_features, dot_size(size))
    blocks = pl.cdiv(size, width)
    program = pl.program_id(0)
    pixels = Pixels(p, jax.lax.div(program, blocks), t.block_pixels)
    n = jax.lax.rem(program, blocks) * width + jnp.arange(width, dtype=jnp.int32)
    n_ok = below(n, size, blocks * width)
    n_row = None if n_ok is None else n_ok[None, :]
    tap, feature = jax.lax.div(n, p.features), jax.lax.rem(n, p.features)
    sums = jnp.zeros((t.block_pixels, width), jnp.float32)
    for part in parts:
        depth = min(t.block_channels, dot_size(part.channels))
        chunks = pl.cdiv(part.channels, depth)

        def step(
            i: Array, sums: Array, part: Part = part, depth: int = depth, chunks: int = chunks
        ) -> Array:
            channel = i * depth + jnp.arange(depth, dtype=jnp.int32)
            channel_ok = below(channel, part.channels, chunks * depth)
            ok = None if channel_ok is None else channel_ok[None, :]
            x = load(
                part.ref,
                pixels.index[:, None],
                channel[None, :],
                every(as_column(pixels.exists), ok),
            )
            x = pixels.activate(x, affine, channel[None, :] + part.offset, ok)
            rows = tap[None, :] * p.total + (channel + part.offset)[:, None]
            w = load(
                kernel,
                rows,
                jnp.broadcast_to(feature[None, :], rows.shape),
                every(as_column(channel_ok), n_row),
            )
            return sums + dot(x, w, (1, 0), p.interpret)

        sums = step(jnp.int32(0), sums) if chunks == 1 else jax.lax.fori_loop(0, chunks, step, sums)
    stored = every(as_column(pixels.exists), n_row)
    plgpu.store(output.at[n[None, :], pixels.index[:, None]], sums, mask=stored)


def sum_program(p: Problem, refs: Sequence[Ref]) -> None:
    """Adds up the products of `SUM_PIXELS` pixels over the taps.

    Args:
      refs: products (9 F, pixels), shift (1|B, F), [residual (pixels, F)], y (pixels, F).
    """
    products, *rest = refs
    pixels = Pixels(p, pl.program_id(0), SUM_PIXELS)
    width = pl.next_power_of_2(p.features)
    feature = jnp.arange(width, dtype=jnp.int32)[None, :]
    out = Output(feature, below(feature, p.features, width))
    sums = jnp.zeros((SUM_PIXELS, width), jnp.float32)
    for tap in range(TAPS):
        rows, columns = tap_offset(tap)
        there = every(
            inside(pixels.row + rows, pixels.column + columns, p.height, p.width), pixels.exists
        )
        neighbour = (pixels.index + (rows * p.width + columns))[:, None]
        sums += load(
            products, tap * p.features + feature, neighbour, every(as_column(there), out.exists)
        )
    _finish(p, pixels, rest, out, sums)
