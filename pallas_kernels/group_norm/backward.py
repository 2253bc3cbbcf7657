"""GroupNorm's gradient kernels in Triton: two sums over pixels, and dx, in two launches or in one.

With x̂ = (x − mean) · inverse, z = scale · x̂ + offset, y = act(z) and dz = dy · act'(z), the
gradients of offset and scale of every sample and channel are sums over the pixels,

    s₁ = Σ dz    and    s₂ = Σ dz · x̂,

and with N elements in a group

    dx = inverse · (scale · dz − (Σ_group scale · s₁ + x̂ · Σ_group scale · s₂) / N).

In one launch, a program owns whole groups of a sample: it reads their pixels for the sums, then
again in reverse order for dx. In two launches, several programs share the pixels of a sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxunet.ops.group_norm.operands import group_size
from pallas_kernels.group_norm.blocks import Lanes, Program, loop, scaled, sigmoid
from pallas_kernels.group_norm.tiles import Grid, Tile, choose_tile, fit
from pallas_kernels.jax_modules import triton as plgpu
from pallas_kernels.types import Index, Ref


class _Derivative:
    """Computes dz, x̂ and act(z) of a register tile, from x and dy."""

    def __init__(self, program: Program, refs: Sequence[Ref], silu: bool) -> None:
        scale, offset, mean, inverse = refs
        self.program, self.grid, self.scale_ref = program, program.grid, scale
        self.silu, self.wide = silu, mean.dtype
        sample = program.sample
        self.mean = program.load_channels(mean, sample)
        self.inverse = program.load_channels(inverse, sample)
        self.scale = self.load_scale(program.own)
        self.offset = program.load_channels(
            offset, sample if offset.shape[0] > 1 else 0, dtype=self.wide
        )

    def load_scale(self, lanes: Lanes) -> Array:
        """Loads the scale of these lanes."""
        sample = self.program.sample if self.scale_ref.shape[0] > 1 else 0
        return self.program.load_channels(self.scale_ref, sample, dtype=self.wide, lanes=lanes)

    def __call__(self, x: Array, dy: Array) -> tuple[Array, Array, Array]:
        """Returns dz, x̂ and act(z)."""
        normed = scaled(x, self.mean, self.inverse)
        dz = dy.astype(self.wide)
        z = normed * self.scale[None, :] + self.offset[None, :]
        if not self.silu:
            return dz, normed, z
        s = sigmoid(z, self.grid)
        active = z * s
        return dz * (s + active * (1.0 - s)), normed, active


def _sums(
    program: Program,
    derivative: _Derivative,
    read: Sequence[Callable[[Index], Sequence[Array]]],
    active: Ref | None = None,
) -> tuple[Array, Array]:
    """Returns s₁ and s₂ of one program's pixels, for each lane.

    Args:
      read: functions of a step that load its tiles of x and of dy.
      active: where to write act(z).
    """
    grid, (load_x, load_dy) = program.grid, read
    zero = jnp.zeros((grid.rows, grid.lanes), derivative.wide)

    def add(step: Array | int, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        s1, s2 = totals
        recomputed = []
        for x, dy in zip(load_x(step), load_dy(step), strict=True):
            dz, normed, y = derivative(x, dy)
            s1, s2 = s1 + dz, s2 + dz * normed  # Outside the tensor dy is zero.
            recomputed.append(y)
        if active is not None:
            program.store([active], step, recomputed)
        return s1, s2

    s1, s2 = loop(grid.steps, add, (zero, zero))
    return jnp.sum(s1, axis=0), jnp.sum(s2, axis=0)


def _gradient_sums_kernel(*refs: Ref, grid: Grid, silu: bool, activation: bool) -> None:
    """Reduces one program's pixels to s₁ and s₂.

    Args:
      refs: parts of x (batch, pixels, Ci)…, dy (batch, pixels, C), scale and offset (1|batch, C),
        mean and inverse (batch, C); results: sums (batch, splits, 2, C), and with `activation`
        act(z) (batch, pixels, C).
    """
    count = len(grid.parts)
    parts, (dy, *affine), (sums, *active) = refs[:count], refs[count : count + 5], refs[count + 5 :]
    program = Program(grid)
    derivative = _Derivative(program, affine, silu)
    read = (lambda step: program.load(parts, step), lambda step: program.load([dy], step))
    s1, s2 = _sums(program, derivative, read, active[0] if activation else None)
    program.store_channels(sums, s1, program.sample, program.split, 0)
    program.store_channels(sums, s2, program.sample, program.split, 1)


def gradient_sums(
    parts: Sequence[Float[Array, 'batch height width _']],
    dy: Float[Array, 'batch height width channels'],
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    mean: Float[Array, 'batch channels'],
    inverse: Float[Array, 'batch channels'],
    *,
    silu: bool,
    activation: bool = False,
    tile: Tile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, 'batch 2 channels'], Float[Array, 'batch height width channels'] | None]:
    """Returns s₁ and s₂ (defined above), from one read of x and dy.

    Args:
      dy: gradient of the activated output; with silu=False, of the normalised one.
      mean, inverse: as `normalise` or `affine` returns them.
      activation: also write act(z) again from the same read, in x's dtype, for a convolution's
        weight gradient to read.

    Returns: the sums, at least float32, and the activation or None.
    """
    batch, height, width, _ = parts[0].shape
    name = 'gradient_sums_activation' if activation else 'gradient_sums'
    tile = tile or choose_tile(
        name, parts[0].dtype, batch, height * width, sum(p.shape[-1] for p in parts)
    )
    return _gradient_sums(
        parts,
        dy,
        (scale, offset, mean, inverse),
        silu=silu,
        activation=activation,
        tile=tile,
        interpret=interpret,
    )


# Jitted, so that equal calls share one trace and one lowering; below too.
@functools.partial(jax.jit, static_argnames=('silu', 'activation', 'tile', 'interpret'))
def _gradient_sums(
    parts: Sequence[Array],
    dy: Array,
    norm: tuple[Array, ...],
    *,
    silu: bool,
    activation: bool,
    tile: Tile,
    interpret: bool,
) -> tuple[Array, Array | None]:
    batch, height, width, _ = parts[0].shape
    sizes = tuple(p.shape[-1] for p in parts)
    pixels, channels = height * width, sum(sizes)
    grid = fit(tile, sizes, pixels, 1, streamed=True, interpret=interpret)
    out_shape = [jax.ShapeDtypeStruct((batch, grid.splits, 2, channels), norm[2].dtype)]
    if activation:
        out_shape.append(jax.ShapeDtypeStruct((batch, pixels, channels), parts[0].dtype))
    partial, *active = pl.pallas_call(
        functools.partial(_gradient_sums_kernel, grid=grid, silu=silu, activation=activation),
        grid=(grid.blocks, batch, grid.splits),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps),
        interpret=interpret,
        name='jaxunet_group_norm_gradient_sums',
    )(*(p.reshape(batch, pixels, -1) for p in (*parts, dy)), *norm)
    sums = partial[:, 0] if grid.splits == 1 else jnp.sum(partial, axis=1)
    return sums, active[0].reshape(dy.shape) if activation else None


def _gradient_kernel(*refs: Ref, grid: Grid, silu: bool, known: bool) -> None:
    """Writes dx of one program's pixels.

    Args:
      refs: parts, dy and the norm's arrays as in `_gradient_sums_kernel`; sums (batch, 2, C), an
        operand if `known`, else a result; the parts of dx.
      known: the sums are given; else the program owns whole groups and reduces its pixels.
    """
    count = len(grid.parts)
    parts, (dy, *affine), (sums, *dx) = refs[:count], refs[count : count + 5], refs[count + 5 :]
    program = Program(grid)
    derivative = _Derivative(program, affine, silu)
    kept: dict[str, list[Array]] = {}  # the tiles read last; with one step, all tiles

    def keep(name: str, arrays: Sequence[Ref], step: Array | int) -> list[Array]:
        kept[name] = program.load(arrays, step)
        return kept[name]

    if known:
        if grid.steps == 1:
            keep('x', parts, 0)  # before the small loads below, to overlap both latencies
            keep('dy', [dy], 0)
        s1, s2 = (
            program.load_channels(sums, program.sample, i, lanes=program.window) for i in (0, 1)
        )
    else:
        s1, s2 = _sums(
            program,
            derivative,
            (lambda step: keep('x', parts, step), lambda step: keep('dy', [dy], step)),
        )
        program.store_channels(sums, s1, program.sample, 0)
        program.store_channels(sums, s2, program.sample, 1)
    share = derivative.inverse * (1.0 / (grid.group * grid.pixels))
    scale = derivative.load_scale(program.window)
    constant = program.group_sum(scale * s1) * share
    slope = program.group_sum(scale * s2) * share
    factor = derivative.scale * derivative.inverse

    def write(step: Array | int, _: None) -> None:
        resident = grid.steps == 1
        xs = kept['x'] if resident else program.load(parts, step)
        dys = kept['dy'] if resident else program.load([dy], step)
        out = []
        for x, dy_tile in zip(xs, dys, strict=True):
            dz, normed, _active = derivative(x, dy_tile)
            out.append(factor[None, :] * dz - (constant[None, :] + normed * slope[None, :]))
        program.store(dx, step, out)

    loop(grid.steps, write, None, backwards=True)


def gradient(
    parts: Sequence[Float[Array, 'batch height width _']],
    dy: Float[Array, 'batch height width channels'],
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    mean: Float[Array, 'batch channels'],
    inverse: Float[Array, 'batch channels'],
    *,
    groups: int,
    silu: bool,
    sums: Float[Array, 'batch 2 channels'] | None = None,
    tile: Tile | None = None,
    interpret: bool = False,
) -> tuple[tuple[Float[Array, 'batch height width _'], ...], Float[Array, 'batch 2 channels']]:
    """Returns the gradient of every part (in x's dtype) and the sums s₁ and s₂, in one launch.

    With `sums`, it reads x and dy once. Without `sums`, a program owns whole groups of a sample and
    reads them twice, the second time from registers if they fit, else from the caches.

    Raises:
      ValueError: the channels are not a multiple of `groups`.
    """
    batch, height, width, _ = parts[0].shape
    channels = sum(p.shape[-1] for p in parts)
    group = group_size(channels, groups)
    tile = tile or choose_tile(
        'backward' if sums is None else 'gradient',
        parts[0].dtype,
        batch,
        height * width,
        channels,
        group,
    )
    return _gradient(
        parts,
        dy,
        (scale, offset, mean, inverse),
        sums,
        group=group,
        silu=silu,
        tile=tile,
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=('group', 'silu', 'tile', 'interpret'))
def _gradient(
    parts: Sequence[Array],
    dy: Array,
    norm: tuple[Array, ...],
    sums: Array | None,
    *,
    group: int,
    silu: bool,
    tile: Tile,
    interpret: bool,
) -> tuple[tuple[Array, ...], Array]:
    batch, height, width, _ = parts[0].shape
    sizes = tuple(p.shape[-1] for p in parts)
    pixels, channels = height * width, sum(sizes)
    known = sums is not None
    grid = fit(tile, sizes, pixels, group, streamed=known, interpret=interpret)
    dx_shape = [jax.ShapeDtypeStruct((batch, pixels, size), parts[0].dtype) for size in sizes]
    sums_shape = jax.ShapeDtypeStruct((batch, 2, channels), norm[2].dtype)
    out = pl.pallas_call(
        functools.partial(_gradient_kernel, grid=grid, silu=silu, known=known),
        grid=(grid.blocks, batch, grid.splits),
        out_shape=dx_shape if known else [sums_shape, *dx_shape],
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps),
        interpret=interpret,
        name='jaxunet_group_norm_gradient' if known else 'jaxunet_group_norm_backward',
    )(
        *(p.reshape(batch, pixels, -1) for p in (*parts, dy)),
        *norm,
        *((sums,) if sums is not None else ()),
    )
    dx = out if sums is not None else out[1:]
    found = out[0] if sums is None else sums
    return tuple(d.reshape(p.shape) for d, p in zip(dx, parts, strict=True)), found
