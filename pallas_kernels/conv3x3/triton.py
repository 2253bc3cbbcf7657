"""The portable 3×3 convolution (sm_80, sm_89, sm_90): implicit GEMM through Pallas' Triton lowering; takes every shape.

A program computes `block_pixels` consecutive pixels (over batch, height and width together) × `block_features` outputs. The K axis
runs over taps and channels; a tap is a shift of the pixel index, and what it reads outside of its image is masked to zero.

Few channels would leave the tensor cores mostly padding, so they are joined with the nine taps:
- A part with fewer than 16 channels has one K axis for taps and channels (3 channels: 27 of 32), read as a gather.
- With fewer than 16 features x is read once instead of nine times: one kernel forms all taps' products, (9 F, pixels) in float32,
  and another adds to each pixel what its neighbours hold for it.

The activation is fused where x is read once. Elsewhere every tap would compute it again (measured on an H200, 64² 64→64 in bfloat16:
153 µs), so there one elementwise pass comes before (28 µs and that pass).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import tile_table
from pallas_kernels.conv3x3.triton_blocks import (
    DTYPES,
    TAPS,
    Launch,
    activated,
    affine_silu,
    as_column,
    below,
    call,
    check_block,
    check_launch,
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

Affine = tuple[Any, Any] | None
NAME = 'jaxunet_conv3x3_triton_forward'
PRODUCTS_NAME = 'jaxunet_conv3x3_triton_products'
ENOUGH = (
    108  # programs that keep a GPU busy: its multiprocessors, 108 to 132 of them on those in mind
)
SUM_PIXELS = 256  # of one program of the kernel that adds up products


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the work is cut; every block is a power of two ≥ 16.

    Fields:
      block_pixels, block_features: output of one program; with fewer than 16 features, of products of taps and features.
      block_channels: K of one dot, at most; not of parts whose channels are joined with the taps.
      num_warps, num_stages: warps of a program, depth of its load pipeline.
    """

    block_pixels: int = 128
    block_features: int = 64
    block_channels: int = 64
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        for field in ('block_pixels', 'block_features', 'block_channels'):
            check_block(field, getattr(self, field))
        check_launch(self.num_warps, self.num_stages)


def gathers(channels: Sequence[int], features: int) -> bool:
    """Whether products are formed first and gathered afterwards."""
    return folds(features) and not all(folds(c) for c in channels)


def default_tile(channels: Sequence[int], features: int, pixels: int, itemsize: int) -> Tile:
    """A tile for parts of `channels` channels → `features`, over `pixels` = batch · height · width.

    The fastest on an H200 among those that need at most the 99 KiB of shared memory a program has on sm_89. `itemsize` is the bytes of
    an element: the three products of a float32 dot leave no registers for a deeper pipeline.
    """
    widest = dot_size(TAPS * features if gathers(channels, features) else features)
    if itemsize == 4 or all(folds(c) for c in channels):
        return Tile(128, min(64, widest), 64, 4, 1)
    if gathers(channels, features):
        return Tile(128, min(64, widest), 64, 4, 2)
    if widest > 64 and pl.cdiv(pixels, 128) * pl.cdiv(features, 128) >= ENOUGH:
        return Tile(128, 128, 64, 8, 3)
    if pl.cdiv(pixels, 128) * pl.cdiv(features, 64) >= ENOUGH:
        return Tile(128, min(64, widest), 64, 4, 2)
    return Tile(64, min(64, widest), 128, 4, 3)


def candidates(channels: Sequence[int], features: int, pixels: int, itemsize: int) -> list[Tile]:
    """Tiles worth timing for this shape, `itemsize` being the bytes of an element."""
    del pixels
    looped = [c for c in channels if not folds(c) or gathers(channels, features)]
    widest = dot_size(TAPS * features if gathers(channels, features) else features)
    deepest = dot_size(max(looped, default=1))
    found = []
    for block_features in sorted(
        {min(widest, 64), min(widest, 128), widest if features % 256 == 0 else min(widest, 128)}
    ):
        for block_pixels in (64, 128, 256):
            for block_channels in sorted(
                {min(deepest, 128 // itemsize), min(deepest, 256 // itemsize)}
            ):
                for num_warps in (4, 8):
                    for num_stages in (1, 2, 3) if looped else (1,):
                        size = block_pixels * block_features
                        shared = (
                            num_stages * block_channels * (block_pixels + block_features) * itemsize
                        )
                        if shared <= 220 * 1024 and 64 * 32 <= 4 * size // num_warps <= 128 * 128:
                            found.append(
                                Tile(
                                    block_pixels,
                                    block_features,
                                    block_channels,
                                    num_warps,
                                    num_stages,
                                )
                            )
    return found


def supports(parts: Sequence[Any], kernel: Any) -> str | None:
    """None if `forward` takes these operands (anything with a shape and dtype), else what is wrong and what to do."""
    if not parts:
        return 'parts: none given; pass at least one array (batch, height, width, channels)'
    first = parts[0]
    for i, part in enumerate(parts):
        if (
            part.ndim != 4
            or part.shape[:3] != first.shape[:3]
            or part.dtype != first.dtype
            or 0 in part.shape
        ):
            return (
                f'parts[{i}]: {part.dtype}{list(part.shape)} beside parts[0] {first.dtype}{list(first.shape)}; '
                'parts are non-empty NHWC arrays of one dtype that differ in channels only'
            )
    if first.dtype not in DTYPES:
        return f'parts: dtype {first.dtype}; use float32, bfloat16 or float16'
    channels = sum(part.shape[-1] for part in parts)
    if kernel.ndim != 4 or kernel.shape[:3] != (3, 3, channels) or kernel.shape[3] == 0:
        return f'kernel: shape {list(kernel.shape)}; expected [3, 3, {channels}, features], {channels} being the channels of all parts'
    if kernel.dtype != first.dtype:
        return f'kernel: dtype {kernel.dtype}, but parts are {first.dtype}; cast one of them'
    return None


class _Part(NamedTuple):
    """One part of x, (pixels, channels), and its first channel among all."""

    ref: Any
    channels: int
    offset: int


class _Output(NamedTuple):
    """The features of a block, (1, block), and which of them exist."""

    feature: Array
    exists: Array | None


@dataclasses.dataclass(frozen=True)
class _Problem:
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
        return self.batch * self.height * self.width

    @property
    def total(self) -> int:
        return sum(self.channels)

    def take(self, refs: Sequence[Any]) -> tuple[list[_Part], Any, Affine, list[Any]]:
        """Splits references into parts, kernel, affine, others."""
        count = len(self.channels)
        offsets = [sum(self.channels[:i]) for i in range(count)]
        parts = [_Part(*part) for part in zip(refs[:count], self.channels, offsets, strict=True)]
        kernel, rest = refs[count], list(refs[count + 1 :])
        affine: Affine = (rest.pop(0), rest.pop(0)) if self.affine else None
        return parts, kernel, affine, rest


class _Pixels:
    """A block of consecutive pixels: where they are, of which sample, and which exist."""

    def __init__(self, p: _Problem, block: Array, size: int) -> None:
        first = block * size
        self.index = first + jnp.arange(size, dtype=jnp.int32)
        self.exists = below(self.index, p.pixels, pl.cdiv(p.pixels, size) * size)
        sample, self.row, self.column = split_pixel(self.index, p.height, p.width)
        one_sample = p.batch == 1 or p.height * p.width % size == 0
        self.sample = (
            jax.lax.div(first, p.height * p.width).reshape(1, 1) if one_sample else sample[:, None]
        )
        self.sample_exists = None if one_sample else as_column(self.exists)

    def shift(self, ref: Any, out: _Output, shifts: int) -> Array:
        sample = jnp.zeros((1, 1), jnp.int32) if shifts == 1 else self.sample
        return load(
            ref, sample, out.feature, every(None if shifts == 1 else self.sample_exists, out.exists)
        )

    def activate(self, x: Array, affine: Affine, channel: Array, channel_ok: Array | None) -> Array:
        """SiLU(a · x + b) if there is an affine; zero for channels that do not exist, where x, a and b are loaded as zero."""
        if affine is None:
            return x
        ok = every(self.sample_exists, channel_ok)
        active = affine_silu(
            x, load(affine[0], self.sample, channel, ok), load(affine[1], self.sample, channel, ok)
        )
        return active.astype(x.dtype)


def _forward(p: _Problem, refs: Sequence[Any]) -> None:
    """One program. refs: parts (pixels, Ci)…, kernel (9 C, F), shift (1|B, F), [residual (pixels, F)], y (pixels, F)."""
    parts, kernel, _, rest = p.take(refs)
    t = p.tile
    blocks = pl.cdiv(p.features, t.block_features)
    program = pl.program_id(0)
    # Neighbouring programs share their pixels, which are then in the L2 cache.
    pixels = _Pixels(p, jax.lax.div(program, blocks), t.block_pixels)
    feature = (
        jax.lax.rem(program, blocks) * t.block_features
        + jnp.arange(t.block_features, dtype=jnp.int32)[None, :]
    )
    out = _Output(feature, below(feature, p.features, blocks * t.block_features))
    sums = jnp.zeros((t.block_pixels, t.block_features), jnp.float32)
    for part in parts:
        add = _add_folded if folds(part.channels) else _add_looped
        sums = add(p, pixels, part, kernel, out, sums)
    _finish(p, pixels, rest, out, sums)


def _add_folded(
    p: _Problem, pixels: _Pixels, part: _Part, kernel: Any, out: _Output, sums: Array
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
    p: _Problem, pixels: _Pixels, part: _Part, kernel: Any, out: _Output, sums: Array
) -> Array:
    """Adds the products of one part, tap after tap and some channels at a time."""
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


def _finish(p: _Problem, pixels: _Pixels, refs: Sequence[Any], out: _Output, sums: Array) -> None:
    """Adds shift and residual and stores. refs: shift, [residual], y."""
    *residual, y = refs[1:]
    sums += pixels.shift(refs[0], out, p.shifts)
    stored = every(as_column(pixels.exists), out.exists)
    for ref in residual:
        sums += load(ref, pixels.index[:, None], out.feature, stored).astype(jnp.float32)
    plgpu.store(y.at[pixels.index[:, None], out.feature], sums.astype(y.dtype), mask=stored)


def _products(p: _Problem, refs: Sequence[Any]) -> None:
    """One program of the products. refs: parts (pixels, Ci)…, kernel (9 C, F), [a, b (B, C)], products (9 F, pixels) float32."""
    parts, kernel, affine, (output,) = p.take(refs)
    t = p.tile
    size = TAPS * p.features
    width = min(t.block_features, dot_size(size))
    blocks = pl.cdiv(size, width)
    program = pl.program_id(0)
    pixels = _Pixels(p, jax.lax.div(program, blocks), t.block_pixels)
    n = jax.lax.rem(program, blocks) * width + jnp.arange(width, dtype=jnp.int32)
    n_ok = below(n, size, blocks * width)
    n_row = None if n_ok is None else n_ok[None, :]
    tap, feature = jax.lax.div(n, p.features), jax.lax.rem(n, p.features)
    sums = jnp.zeros((t.block_pixels, width), jnp.float32)
    for part in parts:
        depth = min(t.block_channels, dot_size(part.channels))
        chunks = pl.cdiv(part.channels, depth)

        def step(
            i: Array, sums: Array, part: _Part = part, depth: int = depth, chunks: int = chunks
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


def _sum_products(p: _Problem, refs: Sequence[Any]) -> None:
    """One program of the sum. refs: products (9 F, pixels), shift (1|B, F), [residual (pixels, F)], y (pixels, F)."""
    products, *rest = refs
    pixels = _Pixels(p, pl.program_id(0), SUM_PIXELS)
    width = pl.next_power_of_2(p.features)
    feature = jnp.arange(width, dtype=jnp.int32)[None, :]
    out = _Output(feature, below(feature, p.features, width))
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


def forward(
    parts: tuple[Float[Array, 'batch height width _'], ...],
    kernel: Float[Array, '3 3 channels features'],
    shift: Float[Array, '#batch features'],
    *,
    residual: Float[Array, 'batch height width features'] | None = None,
    affine: tuple[Float[Array, 'batch channels'], Float[Array, 'batch channels']] | None = None,
    tile: Tile | None = None,
    out_dtype: DTypeLike | None = None,
    interpret: bool = False,
) -> Float[Array, 'batch height width features']:
    """conv3x3(act(x)) + shift [+ residual], act(x) = SiLU(a · x + b) with `affine` = (a, b), else x; zero padding after act.

    Args:
      parts: what x joins along channels, each read where it is; one dtype of float32, bfloat16, float16.
      kernel: HWIO, of x's dtype.
      shift: float32 bias (1, F) or bias and time shift per sample (batch, F).
      residual: added in float32.
      affine: float32 scale and offset per sample and channel, over the channels of all parts.
      tile: None = the device's measured tile, else `default_tile`.
      out_dtype: None = x's dtype. Products and everything around them are in float32, cast once.
      interpret: run on the CPU, for tests.

    Raises:
      ValueError: see `supports`; or shift, residual or affine of another shape.
    """
    problem = supports(parts, kernel)
    batch, height, width, _ = parts[0].shape if parts else (0, 0, 0, 0)
    channels, features = tuple(part.shape[-1] for part in parts), kernel.shape[-1]
    if problem is None and shift.shape not in {(1, features), (batch, features)}:
        problem = (
            f'shift: shape {list(shift.shape)}; expected [1, {features}] or [{batch}, {features}]'
        )
    if (
        problem is None
        and residual is not None
        and residual.shape != (batch, height, width, features)
    ):
        problem = f'residual: shape {list(residual.shape)}; expected [{batch}, {height}, {width}, {features}]'
    for name, value in zip('ab', affine or (), strict=False):
        if problem is None and value.shape != (batch, sum(channels)):
            problem = (
                f'affine {name}: shape {list(value.shape)}; expected [{batch}, {sum(channels)}]'
            )
    if problem is not None:
        raise ValueError(f'conv3x3 (triton): {problem}')
    dtype, pixels = parts[0].dtype, batch * height * width
    tile = tile or tile_table.measured(
        Tile, 'conv3x3/triton', dtype, shape_class(channels, features, pixels)
    )
    tile = tile or default_tile(channels, features, pixels, dtype.itemsize)
    return _launch(
        parts, kernel, shift, residual, affine, tile, jnp.dtype(out_dtype or dtype), interpret
    )


@functools.partial(
    jax.jit, static_argnums=(5, 6, 7)
)  # so that equal calls share one trace and one lowering
def _launch(
    parts: tuple[Array, ...],
    kernel: Array,
    shift: Array,
    residual: Any,
    affine: Affine,
    tile: Tile,
    out_dtype: Any,
    interpret: bool,
) -> Array:
    (batch, height, width, _), features = parts[0].shape, kernel.shape[-1]
    channels, pixels = tuple(part.shape[-1] for part in parts), batch * height * width
    if affine is not None and not gathers(channels, features):
        parts, affine = activated(parts, affine), None
    p = _Problem(
        batch,
        height,
        width,
        channels,
        features,
        shift.shape[0],
        affine is not None,
        residual is not None,
        tile,
        interpret,
    )
    inputs = [
        *(part.reshape(pixels, part.shape[-1]) for part in parts),
        kernel.reshape(TAPS * p.total, features),
    ]
    inputs += [value.astype(jnp.float32) for value in affine or ()]
    around = [shift.astype(jnp.float32)] + (
        [] if residual is None else [residual.reshape(pixels, features)]
    )
    shape, blocks = (pixels, features), pl.cdiv(pixels, tile.block_pixels)

    def launch(programs: int) -> Launch:
        return Launch(programs, tile.num_warps, tile.num_stages, interpret)

    if gathers(channels, features):
        size = TAPS * features
        columns = pl.cdiv(size, min(tile.block_features, dot_size(size)))
        products = call(
            PRODUCTS_NAME,
            functools.partial(_products, p),
            inputs,
            (size, pixels),
            jnp.float32,
            launch(blocks * columns),
        )
        last = Launch(pl.cdiv(pixels, SUM_PIXELS), 4, 1, interpret)
        y = call(
            NAME, functools.partial(_sum_products, p), [products, *around], shape, out_dtype, last
        )
    else:
        columns = pl.cdiv(features, tile.block_features)
        y = call(
            NAME,
            functools.partial(_forward, p),
            inputs + around,
            shape,
            out_dtype,
            launch(blocks * columns),
        )
    return y.reshape(batch, height, width, features)
