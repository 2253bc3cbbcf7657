"""Times the GroupNorm kernels' tiles on this machine's GPU, in comparison with XLA.

    python -m pallas_kernels.group_norm.tune [--batch 32] [--shapes 64:64,64:64+64]
        [--kernels forward,backward] [--seconds 60] [--write]

A shape is side:channels, with the channels of several parts joined by +. `both` is the whole op,
forward and backward, on the kernels that it runs on this GPU; `both_triton` on the Triton kernels;
`both_xla` on XLA. The other names are Triton kernels, whose tiles it times. Times are sums of GPU
kernel time per call from a profiler trace, without launch overhead. Calls are shuffled, so that no
call always finds its inputs in the cache because of the call before it. `--write` puts the fastest
tiles into the device's table (`tile_table.update`).
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxunet.ops.activation import Activation
from jaxunet.ops.group_norm import reference
from jaxunet.runtime import gpu_time as timing
from pallas_kernels import tile_table
from pallas_kernels.checks import DTYPES, check_gpu, some_of
from pallas_kernels.group_norm import backward, forward, statistics, vjp
from pallas_kernels.group_norm.parameters import parameter_gradients
from pallas_kernels.group_norm.tiles import Tile, choose_tile, shape_class

ELEPHANTS64 = (
    '64:64,64:64+64,64:128+64,32:64,32:128,32:128+64,32:128+128,32:192+128,'
    '16:128,16:192,16:192+128,16:192+192,16:256+192,8:192,8:256,8:256+192,8:256+256'
)
WHOLE_OP = ('both_xla', 'both', 'both_triton')  # forward and backward, on each side
CALLS = 6
GROUPS, EPS = 32, 1e-5


def whole_groups_candidates(pixels: int) -> list[Tile]:
    """Returns tiles for kernels whose programs own all pixels of some groups."""
    found = set()
    for lanes, elements, unroll, warps in itertools.product(
        (16, 32, 64), (4096, 8192, 16384, 32768), (1, 2, 4), (4, 8, 16)
    ):
        held = min(elements, pixels * lanes)
        rows = held // lanes // unroll
        if rows >= 8 and 8 <= held // (32 * warps) <= 64:
            found.add(Tile(lanes, rows, unroll, warps))
    return sorted(found, key=repr)


def stream_candidates(pixels: int) -> list[Tile]:
    """Returns tiles for kernels whose programs share a sample's pixels."""
    found = set()
    for lanes, elements, unroll, warps, steps in itertools.product(
        (32, 64, 128), (2048, 4096, 8192), (1, 2, 4), (4, 8), (1, 2, 4, 8)
    ):
        rows = min(elements // lanes // unroll, pixels)
        if rows >= 8 and elements // (32 * warps) >= 8:
            found.add(Tile(lanes, rows, unroll, warps, max(1, pixels // (rows * unroll * steps))))
    return sorted(found, key=repr)


def candidates(kernel: str, pixels: int) -> list[Tile | None]:
    """Returns the tiles to time; [None] for the whole op, which takes the chosen ones."""
    if kernel in WHOLE_OP:
        return [None]
    if kernel in ('forward', 'backward'):
        return [*whole_groups_candidates(pixels)]
    return [*stream_candidates(pixels)]


class Operands(NamedTuple):
    """The operands of all kernels for one shape; `moments`: of each part; `sums`: s₁ and s₂."""

    parts: tuple[Array, ...]
    moments: tuple[Array, ...]
    dy: Array
    scale: Array
    offset: Array
    mean: Array
    inverse: Array
    sums: Array


def function(kernel: str, tile: Tile | None) -> Callable[[Operands], PyTree]:
    """Returns a kernel as a function of `Operands`."""
    options: dict[str, Any] = {'groups': GROUPS, 'eps': EPS, 'silu': True}

    def both(op: Callable[..., Array], o: Operands) -> PyTree:
        y, pull = jax.vjp(
            lambda *a: op(Activation(a[0]), a[1], a[2], **options), o.parts, o.scale, o.offset
        )
        return y, pull(o.dy)

    def both_triton(o: Operands) -> PyTree:
        _, height, width, _ = o.dy.shape
        alone = vjp.owns_pixels(o.dy.nbytes // (height * width), height * width)
        found = None if alone else tuple(map(statistics.moments, o.parts))
        y, *group = forward.normalise(o.parts, found, o.scale, o.offset, **options)
        norm = (o.scale, o.offset, *group)
        sums = None if alone else backward.gradient_sums(o.parts, o.dy, *norm, silu=True)[0]
        dx, sums = backward.gradient(o.parts, o.dy, *norm, groups=GROUPS, silu=True, sums=sums)
        return y, dx, parameter_gradients(sums, o.scale, o.offset)

    def normalise(o: Operands, moments: tuple[Array, ...] | None) -> PyTree:
        return forward.normalise(o.parts, moments, o.scale, o.offset, tile=tile, **options)

    def gradient_sums(o: Operands, activation: bool) -> PyTree:
        norm = (o.scale, o.offset, o.mean, o.inverse)
        return backward.gradient_sums(
            o.parts, o.dy, *norm, silu=True, activation=activation, tile=tile
        )

    def gradient(o: Operands, sums: Array | None) -> PyTree:
        norm = (o.scale, o.offset, o.mean, o.inverse)
        return backward.gradient(
            o.parts, o.dy, *norm, groups=GROUPS, silu=True, sums=sums, tile=tile
        )

    table: dict[str, Callable[[Operands], PyTree]] = {
        'both': lambda o: both(vjp.group_norm, o),
        'both_triton': both_triton,
        'both_xla': lambda o: both(reference.group_norm, o),
        'forward': lambda o: normalise(o, None),
        'normalise': lambda o: normalise(o, o.moments),
        'moments': lambda o: statistics.moments(o.dy, tile=tile),
        'channel_sums': lambda o: statistics.channel_sums(o.dy, tile=tile),
        'backward': lambda o: gradient(o, None),
        'gradient_sums': lambda o: gradient_sums(o, False),
        'gradient_sums_activation': lambda o: gradient_sums(o, True),
        'gradient': lambda o: gradient(o, o.sums),
    }
    return table[kernel]


# Tensors that a kernel reads or writes, for the rate in GB/s.
PASSES = {
    'forward': 2,
    'normalise': 2,
    'moments': 1,
    'channel_sums': 1,
    'backward': 3,
    'gradient_sums': 2,
    'gradient_sums_activation': 3,
    'gradient': 3,
}


class Timing(NamedTuple):
    """The microseconds of a call, in all and by kernel; without a tile, of the whole op."""

    us: float
    tile: Tile | None
    kernels: dict[str, float]


Job = tuple[str, str, Tile | None]  # shape, kernel, tile


def parse(shape: str) -> tuple[int, tuple[int, ...]]:
    """Returns side and channels of the parts of side:channels."""
    side, channels = shape.split(':')
    return int(side), tuple(int(c) for c in channels.split('+'))


def draw(shape: str, batch: int, dtype: jnp.dtype, keys: Iterator[jax.Array]) -> Operands:
    """Returns random operands of a shape."""
    side, channels = parse(shape)
    total = sum(channels)
    parts = tuple(jax.random.normal(next(keys), (batch, side, side, c), dtype) for c in channels)
    moments = tuple(jnp.ones((batch, c, 2)) for c in channels)
    scale, offset, mean, inverse = (
        jax.random.normal(next(keys), (n, total)) for n in (1, 1, batch, batch)
    )
    dy = jax.random.normal(next(keys), (batch, side, side, total), dtype)
    sums = jax.random.normal(next(keys), (batch, 2, total))
    return Operands(parts, moments, dy, scale, offset, mean, inverse, sums)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--dtype', default='bfloat16', choices=DTYPES)
    parser.add_argument('--batch', type=int, default=32)
    parser.add_argument('--shapes', default=ELEPHANTS64)
    parser.add_argument(
        '--kernels',
        type=some_of((*WHOLE_OP, *PASSES)),
        default=','.join((*WHOLE_OP, 'forward', 'backward')),
    )
    parser.add_argument(
        '--seconds',
        type=float,
        default=60,
        help='time for compiling; candidates beyond it are left out',
    )
    parser.add_argument(
        '--top', type=int, default=4, help='tiles printed for each shape and kernel'
    )
    parser.add_argument('--write', action='store_true', help="update the device's table of tiles")
    return parser.parse_args()


def compile_jobs(
    jobs: Sequence[Job], inputs: Mapping[str, Operands], seconds: float
) -> dict[str, jax.stages.Compiled]:
    """Returns the compiled programs, j0, j1, …, by name, without those that are late or fail."""
    start = time.monotonic()

    def build(numbered: tuple[int, Job]) -> jax.stages.Compiled | str | None:
        i, (shape, kernel, tile) = numbered
        if time.monotonic() - start > seconds:
            return None
        try:
            return timing.named(f'j{i}', function(kernel, tile)).lower(inputs[shape]).compile()
        except Exception as error:  # one tile that fails to compile must not end the sweep
            return f'{kernel} {shape} {tile} {type(error).__name__}: {str(error)[:200]}'

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(build, enumerate(jobs)))
    for message in [b for b in built if isinstance(b, str)][:5]:
        print(message)
    good = {f'j{i}': b for i, b in enumerate(built) if b is not None and not isinstance(b, str)}
    print(f'compiled {len(good)} of {len(jobs)} in {time.monotonic() - start:.0f} s', flush=True)
    return good


def report(
    kernel: str, rows: Sequence[Timing], default: float, xla: float, tensor: float, top: int
) -> dict[str, object]:
    """Returns the part of a printed row that depends on the kernel.

    Args:
      default: microseconds of the current tile.
      xla: microseconds of the op on XLA; only `both` uses it.
      tensor: megabytes of one tensor.
      top: fastest tiles to list.
    """
    by_kernel = {
        name.removeprefix('jaxunet_group_norm_'): round(us, 1)
        for name, us in rows[0].kernels.items()
    }
    if kernel in ('both', 'both_triton'):
        return {
            'xla': round(xla, 1),
            'ratio': round(xla / default, 2),
            'gbs': round(5 * tensor / default * 1e3),
            'kernels': by_kernel,
        }
    if kernel == 'both_xla':
        return {'kernels': by_kernel}
    timed = sorted((row.us, row.tile) for row in rows if row.tile is not None)
    best = timed[:top] if len(rows) > 1 else []
    return {
        'gbs': round(PASSES[kernel] * tensor / default * 1e3),
        'best': [[round(us, 1), *vars(tile).values()] for us, tile in best],
        'tried': len(rows),
    }


def main() -> None:
    """Runs the command."""
    args = arguments()
    check_gpu()
    dtype = jnp.dtype(args.dtype)
    random_keys = iter(jax.random.split(jax.random.key(0), 10_000))
    queues: list[list[Job]] = []
    inputs: dict[str, Operands] = {}
    keys: dict[tuple[str, str], tile_table.Key] = {}
    chosen: dict[tile_table.Key, Tile] = {}
    for shape in args.shapes.split(','):
        side, channels = parse(shape)
        inputs[shape] = draw(shape, args.batch, dtype, random_keys)
        for kernel in args.kernels:
            tiles = candidates(kernel, side * side)
            random.Random(0).shuffle(tiles)
            if kernel not in WHOLE_OP:
                sizes = args.batch, side * side, sum(channels)
                keys[shape, kernel] = key = tile_table.Key(
                    f'group_norm/{kernel}', dtype.name, shape_class(*sizes)
                )
                chosen[key] = choose_tile(kernel, dtype, *sizes, sum(channels) // GROUPS)
                tiles = [*dict.fromkeys([chosen[key], *tiles])]
            queues.append([(shape, kernel, tile) for tile in tiles])
    jobs = [job for row in itertools.zip_longest(*queues) for job in row if job is not None]
    good = compile_jobs(jobs, inputs, args.seconds)

    def caller(name: str) -> Callable[[int], PyTree]:
        return lambda _: good[name](inputs[jobs[int(name[1:])][0]])

    times = timing.trace_times({name: caller(name) for name in good}, rounds=CALLS)
    results: dict[tuple[str, str], list[Timing]] = collections.defaultdict(list)
    for name, found in times.items():
        shape, kernel, tile = jobs[int(name[1:])]
        results[shape, kernel].append(Timing(sum(found.kernels.values()), tile, found.kernels))
    for (shape, kernel), rows in sorted(
        results.items(), key=lambda item: (item[0][1], args.shapes.find(item[0][0]))
    ):
        first = chosen[keys[shape, kernel]] if (shape, kernel) in keys else None
        default = next((row.us for row in rows if row.tile == first), float('nan'))
        plain = results.get((shape, 'both_xla'))
        xla = plain[0].us if plain else float('nan')
        tensor = inputs[shape].dy.size * dtype.itemsize / 1e6
        row = {'kernel': kernel, 'shape': shape, 'batch': args.batch, 'us': round(default, 1)}
        row |= report(kernel, rows, default, xla, tensor, args.top)
        print(json.dumps(row), flush=True)
    if args.write:
        timed = {
            keys[job]: {row.tile: row.us for row in rows if row.tile is not None}
            for job, rows in results.items()
            if job in keys
        }
        print(tile_table.update(jax.devices()[0].device_kind, timed, chosen))


if __name__ == '__main__':
    main()
