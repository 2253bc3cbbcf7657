"""GroupNorm's kernels on Hopper that reduce an image over its pixels.

    moments, channel_sums   x      ->  partial results of every split of the pixels
    gradient_sums           x, dy  ->  partial results [, act(z)]

A program streams its pixels from device memory to registers, 16 bytes per thread and load
(`hopper_plan.Grid`), and reduces them to one register tile. The rows of this tile are then merged
through shared memory. XLA merges the splits. `hopper` has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.group_norm.hopper_plan import Grid
from pallas_kernels.group_norm.hopper_program import Program, launch, loop, total
from pallas_kernels.types import Index, Ref

Image = Float[Array, 'batch pixels _']
Moments = tuple[Array, Array, Array | float]  # mean, sum of squared deviations, count


def moments(grid: Grid, parts: tuple[Image, ...]) -> Float[Array, 'batch splits 2 channels']:
    """Returns mean and mean squared deviation of every split's pixels.

    Every thread keeps a mean and a sum of squared deviations per channel. The tiles of a step are
    reduced in two passes over registers, and then merged with the earlier steps (Chan, Golub &
    LeVeque 1979, STAN-CS-79-773, eq. 2.1). The mean is always subtracted before squaring, so a
    large mean costs no accuracy.
    """

    def body(program: Program, *refs: Ref) -> None:
        *images, out, scratch = refs

        def reduce(part: int, channel: Index) -> None:
            _store_moments(program, out, scratch, _moments_of(program, images[part], channel))

        program.each_part(reduce)

    kept = _scratch(grid, 3 if grid.ragged else 2)
    return launch('moments', grid, body, _partials(grid, 2), parts, kept)


def _moments_of(program: Program, image: Ref, channel: Index) -> Moments:
    """Returns the moments of a program's pixels, per row and channel of its register tile."""
    grid = program.grid
    unroll = grid.tile.unroll

    def of_step(step: Index) -> Moments:
        values = [v.astype(jnp.float32) for v in program.load(image, channel, step)]
        masks = [m for n in range(unroll) if (m := program.fresh(step, n)) is not None]
        if not masks:
            mean = total(values) * (1.0 / unroll)
            return mean, total([jax.lax.square(v - mean) for v in values]), float(unroll)
        pairs = list(zip(masks, values, strict=True))
        count = total([jnp.where(mask, jnp.ones_like(v), 0.0) for mask, v in pairs])
        mean = total([jnp.where(mask, v, 0.0) for mask, v in pairs]) / jnp.maximum(count, 1.0)
        squares = [jnp.where(mask, jax.lax.square(v - mean), 0.0) for mask, v in pairs]
        return mean, total(squares), count

    def join(step: Index, state: tuple[Array, ...]) -> tuple[Array, ...]:
        mean, deviation, *seen = state  # seen: the count so far, or () if the step gives it
        step_mean, step_deviation, count = of_step(step)
        delta = step_mean - mean
        if seen:
            both = seen[0] + count
            share = count / jnp.maximum(both, 1.0)  # this step's share of the pixels so far
            earlier = seen[0]
        else:
            steps = step.astype(jnp.float32)
            share, earlier = 1.0 / (steps + 1.0), steps * float(unroll)
        spread = step_deviation + jax.lax.square(delta) * (earlier * share)
        joined = (mean + delta * share, deviation + spread)
        return (*joined, both) if seen else joined

    if grid.steps == 1:
        return of_step(jnp.int32(0))
    zero = program.zeros()
    joined = loop(grid, join, (zero, zero, zero) if grid.ragged else (zero, zero))
    return joined if grid.ragged else (*joined, float(grid.share))


def _store_moments(program: Program, out: Ref, scratch: Ref, moments: Moments) -> None:
    """Joins the rows of a program's register tile, and stores its mean and squared deviation."""
    mean, deviation, count = moments
    rows = range(program.grid.rows)
    counts: Sequence[Array | float]
    share: Array | float  # of one pixel
    if isinstance(count, float):
        means, deviations = program.rows_of(scratch, [mean, deviation])
        counts, share = [count] * len(rows), 1.0 / (len(rows) * count)
    else:
        means, deviations, seen = program.rows_of(scratch, [mean, deviation, count])
        counts, share = seen, 1.0 / jnp.maximum(total(seen), 1.0)
    centre = total([means[r] * counts[r] for r in rows]) * share
    # A second pass, relative to the first mean, which is inexact for float32 numbers far from zero.
    centre = centre + total([(means[r] - centre) * counts[r] for r in rows]) * share
    spread = [deviations[r] + jax.lax.square(means[r] - centre) * counts[r] for r in rows]
    program.store_partial(out, 0, centre)
    program.store_partial(out, 1, total(spread) * share)


def channel_sums(grid: Grid, x: Image) -> Float[Array, 'batch splits 1 channels']:
    """Returns the sums of every split's pixels."""

    def body(program: Program, image: Ref, out: Ref, scratch: Ref) -> None:
        def add(step: Index, sums: Array) -> Array:
            for n, value in enumerate(program.load(image, program.channel, step)):
                sums = sums + _fresh(program, step, n, value.astype(jnp.float32))
            return sums

        (rows,) = program.rows_of(scratch, [loop(grid, add, program.zeros())])
        program.store_partial(out, 0, total(rows))

    return launch('channel_sums', grid, body, _partials(grid, 1), [x], _scratch(grid, 1))


def gradient_sums(
    grid: Grid,
    parts: tuple[Image, ...],
    dy: Image,
    norm: Sequence[Array],
    *,
    silu: bool,
    activation: bool,
) -> tuple[Float[Array, 'batch splits 2 channels'], Float[Array, 'batch pixels channels'] | None]:
    """Returns s₁ = Σ dz and s₂ = Σ dz · x̂ of every split's pixels, and with `activation` act(z).

    Args:
      norm: scale and offset (1|batch, channels), mean and inverse (batch, channels), float32.
    """

    def body(program: Program, *refs: Ref) -> None:
        images, (upstream, *known) = refs[: len(parts)], refs[len(parts) : len(parts) + 5]
        out, *active, scratch = refs[len(parts) + 5 :]

        def reduce(part: int, channel: Index) -> None:
            scale, offset, mean, inverse = map(program.load_vector, known)
            centre, factor, shift = program.spread(mean, scale * inverse, offset)

            def add(step: Index, sums: tuple[Array, Array]) -> tuple[Array, Array]:
                s1, s2 = sums
                xs = program.load(images[part], channel, step)
                dys = program.load(upstream, program.channel, step)
                recomputed = []
                for n, (x, dy_tile) in enumerate(zip(xs, dys, strict=True)):
                    apart = x.astype(jnp.float32) - centre
                    dz, z = derivative(program, apart * factor + shift, dy_tile, silu)
                    dz = _fresh(program, step, n, dz)
                    s1, s2 = s1 + dz, s2 + dz * apart
                    recomputed.append(z)
                for ref in active:
                    program.store(ref, program.channel, step, recomputed)
                return s1, s2

            sums = loop(grid, add, (program.zeros(), program.zeros()))
            s1, s2 = (total(rows) for rows in program.rows_of(scratch, sums))
            program.store_partial(out, 0, s1)
            # x̂ = apart · inverse; all pixels share the factor, so it is applied to their sum.
            program.store_partial(out, 1, s2 * program.load_vector(known[3], program.column))

        program.each_part(reduce)

    image = jax.ShapeDtypeStruct(dy.shape, parts[0].dtype)
    results = [_partials(grid, 2), *([image] if activation else [])]
    operands = [*parts, dy, *norm]
    sums, *active = launch('gradient_sums', grid, body, results, operands, _scratch(grid, 2))
    return sums, active[0] if activation else None


def derivative(program: Program, z: Array, dy: Array, silu: bool) -> tuple[Array, Array]:
    """Returns dz = dy · act'(z), and act(z)."""
    dz = dy.astype(jnp.float32)
    if not silu:
        return dz, z
    s = program.sigmoid(z)
    active = z * s
    return dz * (s + active * (1.0 - s)), active


def _fresh(program: Program, step: Index, number: int, value: Array) -> Array:
    """Returns a register tile with zeros at the pixels that another tile covers, too."""
    mask = program.fresh(step, number)
    return value if mask is None else jnp.where(mask, value, 0.0)


def _partials(grid: Grid, numbers: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of partial results."""
    shape = (grid.batch, grid.tile.splits, numbers, sum(grid.parts))
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _scratch(grid: Grid, tiles: int) -> tuple[int, ...]:
    """Returns the shape of register tiles in shared memory."""
    return tiles, grid.rows, grid.chunk
