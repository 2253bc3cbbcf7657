"""GroupNorm's kernels on Hopper that follow the reductions over pixels and write the results.

    affine      moments         ->  a and b of a · x + b, mean, inverse
    normalise   moments, x      ->  y, mean, inverse
    gradient    sums, x, dy     ->  dx

A program first reduces the channels of every group of its sample (`hopper_program.Groups`), and its
threads get the results of their own channels through shared memory. This is little work compared
with the pixels, and saves a launch. Then the program streams its pixels from device memory to
registers and back, 16 bytes per thread and load. `hopper` has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.group_norm.hopper_plan import Grid
from pallas_kernels.group_norm.hopper_program import Groups, Program, launch, loop
from pallas_kernels.group_norm.hopper_reductions import Image, derivative
from pallas_kernels.types import Index, Ref


def _statistics(
    program: Program, known: Ref, scratch: Ref, eps: float
) -> list[Float[Array, ' chunk']]:
    """Returns the group's mean and 1 / sqrt(variance + eps) of the program's channels.

    Args:
      known: moments (batch, 2, groups, channels of a group).
    """
    groups = Groups(program, *known.shape[2:])
    means, deviations = groups.load(known, 0), groups.load(known, 1)
    mean = groups.mean(means)
    # A second pass, relative to the first mean, which is inexact for float32 numbers far from zero.
    mean = mean + groups.mean(means - mean)
    variance = groups.mean(deviations + jax.lax.square(means - mean))
    return groups.vectors(scratch, [mean, jax.lax.rsqrt(variance + eps)])


def _store_first(program: Program, refs: Sequence[Ref], values: Sequence[Array]) -> None:
    """Stores vectors that are the same in all splits of a sample, from the first split."""

    @pl.when(program.split == 0)
    def _() -> None:
        for ref, value in zip(refs, values, strict=True):
            program.store_vector(ref, value)


def affine(
    grid: Grid,
    known: Float[Array, 'batch 2 groups size'],
    scale: Array,
    offset: Array,
    *,
    eps: float,
) -> list[Float[Array, 'batch channels']]:
    """Returns a, b, mean and inverse of each sample and channel.

    Args:
      grid: with one split.
      known: the moments of every channel.
      scale, offset: (1|batch, channels), float32; below too.
    """

    def body(program: Program, moments: Ref, *refs: Ref) -> None:
        scale, offset, *results, scratch = refs
        mean, inverse = _statistics(program, moments, scratch, eps)
        a = program.load_vector(scale) * inverse
        values = [a, program.load_vector(offset) - mean * a, mean, inverse]
        _store_first(program, results, values)

    operands = [known, scale, offset]
    return launch('affine', grid, body, [_vector(grid)] * 4, operands, known.shape[1:])


def normalise(
    grid: Grid,
    parts: tuple[Image, ...],
    known: Float[Array, 'batch 2 groups size'],
    scale: Array,
    offset: Array,
    *,
    eps: float,
    silu: bool,
) -> list[Array]:
    """Returns act(norm(x) · scale + offset) (batch, pixels, channels), mean and inverse."""

    def body(program: Program, *refs: Ref) -> None:
        images, (moments, scale, offset, y, *results, scratch) = (
            refs[: len(parts)],
            refs[len(parts) :],
        )
        mean, inverse = _statistics(program, moments, scratch, eps)
        _store_first(program, results, [mean, inverse])
        factor, shift = program.load_vector(scale) * inverse, program.load_vector(offset)
        centre, factor, shift = program.spread(mean, factor, shift)

        def write(part: int, channel: Index) -> None:
            def step(number: Index, state: tuple[()]) -> tuple[()]:
                values = []
                for value in program.load(images[part], channel, number):
                    z = (value.astype(jnp.float32) - centre) * factor + shift
                    values.append(z * program.sigmoid(z) if silu else z)
                program.store(y, program.channel, number, values)
                return state

            loop(grid, step, ())

        program.each_part(write)

    image = jax.ShapeDtypeStruct((grid.batch, grid.pixels, sum(grid.parts)), parts[0].dtype)
    results = [image, _vector(grid), _vector(grid)]
    operands = [*parts, known, scale, offset]
    return launch('normalise', grid, body, results, operands, known.shape[1:])


def gradient(
    grid: Grid,
    parts: tuple[Image, ...],
    dy: Image,
    norm: Sequence[Array],
    sums: Float[Array, 'batch 2 groups size'],
    *,
    silu: bool,
) -> list[Image]:
    """Returns dx = inverse · (scale · dz − (Σ_group scale · s₁ + x̂ · Σ_group scale · s₂) / N).

    Args:
      norm: scale and offset (1|batch, channels), mean and inverse (batch, channels), float32.
      sums: s₁ and s₂ of every channel.

    Returns: the gradient of each part.
    """
    scale_by_group = norm[0].reshape(norm[0].shape[0], *sums.shape[2:])

    def body(program: Program, *refs: Ref) -> None:
        images, (upstream, *known, scale_ref, sums_ref), (*dx, scratch) = (
            refs[: len(parts)],
            refs[len(parts) : len(parts) + 7],
            refs[len(parts) + 7 :],
        )
        groups = Groups(program, *sums_ref.shape[2:])
        scales = groups.load(scale_ref)
        means = [groups.mean(scales * groups.load(sums_ref, n)) for n in (0, 1)]
        # The means of scale · dz and of scale · dz · x̂ over a group's channels and pixels.
        first, second = (v * (1.0 / grid.pixels) for v in groups.vectors(scratch, means))
        scale, offset, mean, inverse = map(program.load_vector, known)
        centre, factor, shift, constant, slope = program.spread(
            mean, scale * inverse, offset, inverse * first, jax.lax.square(inverse) * second
        )

        def write(part: int, channel: Index) -> None:
            def step(number: Index, state: tuple[()]) -> tuple[()]:
                xs = program.load(images[part], channel, number)
                dys = program.load(upstream, program.channel, number)
                values = []
                for x, dy_tile in zip(xs, dys, strict=True):
                    apart = x.astype(jnp.float32) - centre
                    dz, _ = derivative(program, apart * factor + shift, dy_tile, silu)
                    values.append(factor * dz - (constant + apart * slope))
                program.store(dx[part], channel, number, values)
                return state

            loop(grid, step, ())

        program.each_part(write)

    results = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in parts]
    operands = [*parts, dy, *norm, scale_by_group, sums]
    return launch('gradient', grid, body, results, operands, sums.shape[1:])


def _vector(grid: Grid) -> jax.ShapeDtypeStruct:
    """Returns the shape of one number per sample and channel."""
    return jax.ShapeDtypeStruct((grid.batch, sum(grid.parts)), jnp.float32)
