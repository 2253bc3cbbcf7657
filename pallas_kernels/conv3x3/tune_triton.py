"""Times tiles of the portable convolution on this machine's GPU, beside XLA.

    python -m pallas_kernels.conv3x3.tune_triton [--dtype bfloat16] [--batch 32] [--shapes 64:64-64]
        [--directions forward] [--write]

Times are sums of GPU kernel time per call from a profiler trace, without launch overhead; medians
over the calls. `--write` puts the fastest tiles into the device's table (`tile_table.update`);
other shapes take `default_tile`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jaxunet.runtime import gpu_time as timing
from pallas_kernels import tile_table
from pallas_kernels.checks import DTYPES, check_gpu
from pallas_kernels.conv3x3 import (
    triton,
    triton_tiles,
    triton_weight_gradient,
    triton_weight_gradient_tiles,
)
from pallas_kernels.conv3x3.triton_blocks import shape_class

ELEPHANTS64 = (
    '64:3-64,64:64-64,64:128-64,64:192-64,64:64-3,'
    '32:64-128,32:128-128,32:192-128,32:256-128,32:320-128,'
    '16:128-192,16:192-192,16:320-192,16:384-192,16:448-192,'
    '8:192-256,8:256-256,8:448-256,8:512-256'
)
CALLS = 8
AnyTile = triton_tiles.Tile | triton_weight_gradient_tiles.Tile
DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', DTYPES, 'Type of x, kernel and gradients.')
BATCH = flags.DEFINE_integer('batch', 32, 'Images.')
SHAPES = flags.DEFINE_list(
    'shapes', ELEPHANTS64, 'side:channels-features, …; channels of several parts are joined by +.'
)
DIRECTIONS = flags.DEFINE_list(
    'directions',
    'forward,input,weight',
    'Of forward, fused (scale, offset and SiLU first), input, weight.',
)
flags.register_validator(
    DIRECTIONS,
    {'forward', 'fused', 'input', 'weight'}.issuperset,
    message='expected some of forward, fused, input, weight',
)
TOP = flags.DEFINE_integer(
    'top', 3, 'Fastest tiles printed for each shape; 0 = time the chosen tile alone.', lower_bound=0
)
WRITE = flags.DEFINE_bool(
    'write',
    False,
    "Update the device's table of tiles with the directions forward, input and weight.",
)
# Largest difference from XLA, relative to the largest value; a tile that exceeds it is not written.
ALLOWED = 0.05


class Shape(NamedTuple):
    """A convolution of parts of `channels` channels to `features`, on images of side × side."""

    side: int
    channels: tuple[int, ...]
    features: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads side:channels-features, with the channels of several parts joined by +."""
        side, rest = text.split(':')
        channels, features = rest.split('-')
        return cls(int(side), tuple(map(int, channels.split('+'))), int(features))

    @property
    def total(self) -> int:
        """Channels of all parts."""
        return sum(self.channels)


class Operands(NamedTuple):
    """The arrays of one shape; a and b are those of the activation SiLU(a · x + b)."""

    parts: tuple[jax.Array, ...]
    kernel: jax.Array
    dy: jax.Array
    a: jax.Array
    b: jax.Array

    @property
    def x(self) -> jax.Array:
        """The parts as one array."""
        return self.parts[0] if len(self.parts) == 1 else jnp.concatenate(self.parts, axis=-1)

    @classmethod
    def draw(cls, shape: Shape, dtype: jnp.dtype, seed: int) -> Operands:
        """Returns random operands of unit variance; the kernel keeps that of x."""
        generator = np.random.default_rng(seed)

        def normal(*size: int, dtype: jnp.dtype = dtype, scale: float = 1.0) -> jax.Array:
            return jnp.asarray(scale * generator.standard_normal(size, dtype=np.float32)).astype(
                dtype
            )

        batch, side, wide = BATCH.value, shape.side, jnp.dtype(jnp.float32)
        parts = tuple(normal(batch, side, side, c) for c in shape.channels)
        kernel = normal(3, 3, shape.total, shape.features, scale=(9 * shape.total) ** -0.5)
        dy = normal(batch, side, side, shape.features)
        return cls(parts, kernel, dy, *(normal(batch, shape.total, dtype=wide) for _ in 'ab'))


def lax_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns XLA's 3×3 convolution."""
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )


def plain(direction: str, o: Operands) -> jax.Array:
    """Computes a direction with XLA."""
    if direction == 'forward':
        return lax_conv(o.x, o.kernel)
    if direction == 'fused':
        active = jax.nn.silu(
            o.a[:, None, None, :] * o.x.astype(jnp.float32) + o.b[:, None, None, :]
        )
        return lax_conv(active.astype(o.kernel.dtype), o.kernel)
    if direction == 'input':
        return jax.vjp(lambda x: lax_conv(x, o.kernel), o.x)[1](o.dy)[0]
    return jax.vjp(lambda k: lax_conv(o.x, k), o.kernel)[1](o.dy)[0]


def ours(direction: str, tile: AnyTile, o: Operands) -> jax.Array:
    """Computes a direction with the kernels."""
    if isinstance(tile, triton_weight_gradient_tiles.Tile):
        return triton_weight_gradient.weight_gradient(o.parts, o.dy, tile=tile)
    if direction == 'input':
        flipped = o.kernel[::-1, ::-1].swapaxes(2, 3)
        return triton.forward(
            (o.dy,), flipped, jnp.zeros((1, flipped.shape[-1]), jnp.float32), tile=tile
        )
    affine = (o.a, o.b) if direction == 'fused' else None
    return triton.forward(
        o.parts, o.kernel, jnp.zeros((1, o.kernel.shape[-1]), jnp.float32), affine=affine, tile=tile
    )


def sizes(direction: str, shape: Shape) -> tuple[tuple[int, ...], int, int]:
    """Returns the channels of the parts, the features and the pixels of a direction's kernel."""
    channels, features = (
        ((shape.features,), shape.total)
        if direction == 'input'
        else (shape.channels, shape.features)
    )
    return channels, features, BATCH.value * shape.side**2


def key_of(direction: str, shape: Shape) -> tile_table.Key:
    """Returns the key of a direction and shape in the table of tiles."""
    kernel = 'conv3x3/triton_weight_gradient' if direction == 'weight' else 'conv3x3/triton'
    return tile_table.Key(kernel, DTYPE.value, shape_class(*sizes(direction, shape)))


def tiles(direction: str, shape: Shape, itemsize: int) -> list[AnyTile]:
    """Returns the current tile, then the others to time."""
    module: ModuleType = triton_weight_gradient_tiles if direction == 'weight' else triton_tiles
    arguments = *sizes(direction, shape), itemsize
    chosen = tile_table.measured(module.Tile, *key_of(direction, shape)) or module.default_tile(
        *arguments
    )
    return [*dict.fromkeys([chosen, *(module.candidates(*arguments) if TOP.value else [])])]


class Run(NamedTuple):
    """One function to time; `tile` is None for XLA."""

    shape: str
    direction: str
    tile: AnyTile | None
    name: str
    sets: list[Operands]

    def compile(self) -> jax.stages.Compiled | None:
        """Returns the compiled program; None, with a printed line, if it does not compile."""
        f = (
            functools.partial(plain, self.direction)
            if self.tile is None
            else functools.partial(ours, self.direction, self.tile)
        )
        try:
            return timing.named(self.name, f).lower(self.sets[0]).compile()
        except Exception as error:  # one tile that fails to compile must not end the sweep
            print(
                f'{self.shape} {self.direction} {self.tile}: '
                f'{type(error).__name__}: {str(error)[:200]}',
                flush=True,
            )
            return None


class Result(NamedTuple):
    """The microseconds of a tile, and its difference from XLA as a share of the largest value."""

    us: float
    tile: AnyTile
    difference: float


Results = dict[tuple[str, str], list[Result]]  # by shape and direction


def plan_runs(dtype: jnp.dtype) -> tuple[list[Run], dict[tile_table.Key, AnyTile]]:
    """Returns the functions to time, and the tile that is chosen now for each key."""
    runs: list[Run] = []
    chosen: dict[tile_table.Key, AnyTile] = {}
    for text in SHAPES.value:
        shape = Shape.parse(text)
        sets = [Operands.draw(shape, dtype, seed) for seed in range(2)]
        for direction in DIRECTIONS.value:
            found_tiles = tiles(direction, shape, dtype.itemsize)
            chosen[key_of(direction, shape)] = found_tiles[0]
            for tile in [None, *found_tiles]:
                runs.append(Run(text, direction, tile, f'function_{len(runs)}', sets))
    return runs, chosen


def compile_runs(runs: Sequence[Run]) -> dict[str, jax.stages.Compiled]:
    """Returns the compiled programs by name, without those that do not compile."""
    # XLA picks its convolution by timing, so its programs compile one at a time.
    compiled = {run.name: run.compile() for run in runs if run.tile is None}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        rest = [run for run in runs if run.tile is not None]
        compiled |= dict(zip((run.name for run in rest), pool.map(Run.compile, rest), strict=True))
    return {name: program for name, program in compiled.items() if program is not None}


def time_runs(
    runs: Sequence[Run], programs: Mapping[str, jax.stages.Compiled]
) -> tuple[dict[tuple[str, str], float], Results]:
    """Returns the microseconds of XLA, and the results of the tiles, fastest first."""

    def caller(run: Run) -> Callable[[int], jax.Array]:
        return lambda i: programs[run.name](run.sets[i % len(run.sets)])

    runs = [run for run in runs if run.name in programs]
    calls = {run.name: caller(run) for run in runs}
    times = {name: found.us for name, found in timing.trace_times(calls, rounds=CALLS).items()}
    xla, expected = {}, {}
    results: Results = collections.defaultdict(list)
    for run in runs:
        key = run.shape, run.direction
        value = np.asarray(calls[run.name](0).astype(jnp.float32))
        if run.tile is None:
            xla[key], expected[key] = times[run.name], value
        else:
            difference = float(np.abs(value - expected[key]).max() / np.abs(expected[key]).max())
            results[key].append(Result(times[run.name], run.tile, difference))
    for found in results.values():
        found.sort(key=lambda result: result.us)
    return xla, results


def report(xla: Mapping[tuple[str, str], float], results: Results) -> None:
    """Prints a row for each of the fastest tiles."""
    for key, found in results.items():
        for us, tile, difference in found[: max(TOP.value, 1)]:
            row = {
                'shape': key[0],
                'direction': key[1],
                'dtype': DTYPE.value,
                'batch': BATCH.value,
                'xla_us': round(xla[key], 1),
                'us': round(us, 1),
                'ratio': round(xla[key] / us, 2),
                'difference': float(f'{difference:.1e}'),
                'tile': list(vars(tile).values()),
            }
            print(json.dumps(row), flush=True)


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    if argv[1:]:
        raise app.UsageError(f'unexpected arguments: {argv[1:]}')
    check_gpu()
    runs, chosen = plan_runs(jnp.dtype(DTYPE.value))
    xla, results = time_runs(runs, compile_runs(runs))
    report(xla, results)
    if WRITE.value:
        timed: dict[tile_table.Key, dict[AnyTile, float]] = collections.defaultdict(dict)
        for (text, direction), found in results.items():
            if direction != 'fused':  # takes the tile of `forward`
                timed[key_of(direction, Shape.parse(text))] |= {
                    tile: us for us, tile, difference in found if difference < ALLOWED
                }
        print(tile_table.update(jax.devices()[0].device_kind, timed, chosen))


if __name__ == '__main__':
    app.run(main)
