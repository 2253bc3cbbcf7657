"""Times the attention kernels' tiles on this machine's GPU, and the op in comparison with XLA's.

    python -m pallas_kernels.attention.tune [--batch 32] [--shapes 256:6:32,64:8:32]
        [--kernels both,forward] [--seconds 60] [--write]

A shape is tokens:heads:width[:batch]. `both` times the op on the kernels that it takes on this GPU,
on XLA, and on the Triton kernels if the op takes others: forward alone, and with its gradient. The
other names are Triton kernels, whose tiles it times; a line names those without a tile that fits.
Times are sums of GPU kernel time per call from a profiler trace, without launch overhead. Prints
one JSON line per result. `--write` puts the fastest tiles into the device's table
(`tile_table.update`).
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import json
import random
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxunet.ops.attention import reference
from jaxunet.runtime import gpu_time as timing
from pallas_kernels import tile_table
from pallas_kernels.attention import dispatch, triton, triton_backward
from pallas_kernels.attention.tiles import (
    KERNELS,
    Tile,
    candidates,
    default_tile,
    default_tiles,
    shape_class,
)
from pallas_kernels.attention.vjp import attention
from pallas_kernels.checks import DTYPES, check_gpu, some_of

SHAPES = '256:6:32,64:8:32,256:1:256,1024:4:64,256:8:64,4096:8:64:4,1024:8:128'
SIDES = ('ours', 'triton', 'xla')  # the op on the chosen kernels, on Triton's, on XLA
PAIR = KERNELS[2:]  # the two backward kernels, which are timed together
SETS = 2  # sets of inputs that a program processes
Shape = tuple[int, int, int, int]  # batch, tokens, heads, width
JobTiles = Tile | tuple[Tile, Tile] | None  # for one kernel, for both backward kernels, for the op
Job = tuple[Shape, str, JobTiles]  # shape, what, tiles


def inputs(
    shape: Shape, dtype: jnp.dtype
) -> tuple[list[Array], list[Array], list[tuple[Array, Array, Array]]]:
    """Returns sets of qkv, of the output's gradient, and of what the forward kernel returns.

    The last are for the backward kernels' tiles; there are none if no tile of `forward` fits.
    """
    batch, tokens, heads, width = shape
    keys = jax.random.split(jax.random.key(0), 2 * SETS)
    qkv = [
        jax.random.normal(k, (batch, tokens, 3 * heads * width)).astype(dtype) for k in keys[:SETS]
    ]
    grad = [jax.random.normal(k, (batch, tokens, heads * width)).astype(dtype) for k in keys[SETS:]]
    if not candidates('forward', tokens, width, dtype):
        return qkv, grad, []
    tiles = default_tiles(tokens, width, dtype)
    exact = triton_backward.wants_exact(tiles.backward, tokens, dtype)
    forward = jax.jit(lambda x: triton.forward(x, heads, tiles.forward, exact=exact))
    return qkv, grad, [forward(x) for x in qkv]


def op_on(side: str, heads: int, width: int) -> Callable[[Array], Array]:
    """Returns the op on the kernels of one of SIDES, as a function of qkv."""
    if side == 'xla':
        return functools.partial(reference.attention, num_heads=heads)

    def op(qkv: Array) -> Array:
        tiles = default_tiles(qkv.shape[1], width, qkv.dtype) if side == 'triton' else None
        return attention(qkv, num_heads=heads, tiles=tiles)

    return op


def build(job: Job) -> Callable[..., PyTree]:
    """Returns a function of the inputs that runs one kernel, or the op, on every set."""
    (_, _, heads, width), what, tile = job
    side, _, direction = what.partition('_')
    if side in SIDES:
        op = op_on(side, heads, width)
        if direction == 'forward':
            return lambda qkv, grad, kept: [op(x) for x in qkv]

        def both(x: Array, g: Array) -> tuple[Array, PyTree]:
            out, pull = jax.vjp(op, x)
            return out, pull(g)

        return lambda qkv, grad, kept: [both(x, g) for x, g in zip(qkv, grad, strict=True)]
    assert tile is not None, f'{what}: only the op itself has no tile'
    if isinstance(tile, Tile) and what == 'forward':
        return lambda qkv, grad, kept: [triton.forward(x, heads, tile) for x in qkv]
    return lambda qkv, grad, kept: [
        triton_backward.backward(x, k[2], k[1], g, tile)
        for x, k, g in zip(qkv, kept, grad, strict=True)
    ]


def tiles_to_time(shape: Shape, dtype: jnp.dtype) -> dict[str, list[Tile]]:
    """Returns the candidates of each kernel that can be timed, the chosen tile first.

    Backward kernels need candidates of `forward`, whose results they read; those of PAIR also need
    each other's.
    """
    _, tokens, _, width = shape
    tiles = {}
    for name in KERNELS:
        if found := candidates(name, tokens, width, dtype):
            chosen = default_tile(name, tokens, width, dtype)
            tiles[name] = [*dict.fromkeys([chosen, *random.sample(found, len(found))])]
    if 'forward' not in tiles:
        return {}
    return tiles if tiles.keys() >= set(PAIR) else {k: v for k, v in tiles.items() if k not in PAIR}


def jobs_for(shape: Shape, kernels: list[str], dtype: jnp.dtype) -> list[Job]:
    """Returns all jobs of a shape; the two backward kernels are timed in pairs."""
    batch, tokens, heads, width = shape
    jobs: list[Job] = []
    if 'both' in kernels:
        qkv = jax.ShapeDtypeStruct((batch, tokens, 3 * heads * width), dtype)
        on_triton = dispatch.choose(qkv, heads, interpret=False) is not None
        jobs += [
            (shape, f'{side}_{direction}', None)
            for side in SIDES
            if side != 'triton' or not on_triton
            for direction in ('forward', 'both')
        ]
    tiles = tiles_to_time(shape, dtype)
    if without := [name for name in KERNELS if name in kernels and name not in tiles]:
        print(f'{shape} {dtype}: no tiles to time for {", ".join(without)}', flush=True)
    jobs += [
        (shape, name, tile)
        for name in ('forward', 'backward')
        if name in kernels
        for tile in tiles.get(name, ())
    ]
    if set(PAIR) & set(kernels) & set(tiles):
        dq, dkv = (tiles[name] for name in PAIR)
        jobs += [
            (shape, 'pair', (dq[i % len(dq)], dkv[i % len(dkv)]))
            for i in range(max(len(dq), len(dkv)))
        ]
    return jobs


Timed = dict[tile_table.Key, dict[Tile, float]]
Result = tuple[str, JobTiles, dict[str, float]]  # what, tiles, microseconds of each kernel


def keyed(kernel: str, shape: Shape, dtype: jnp.dtype) -> tile_table.Key:
    """Returns the key of a kernel and shape in the table of tiles."""
    return tile_table.Key(f'attention/{kernel}', dtype.name, shape_class(shape[1], shape[3]))


def chosen_tiles(shape: Shape, dtype: jnp.dtype) -> dict[tile_table.Key, Tile]:
    """Returns the tile that the op currently takes for each kernel."""
    return {
        keyed(kernel, shape, dtype): default_tile(kernel, shape[1], shape[3], dtype)
        for kernel in KERNELS
    }


def described(shape: Shape, dtype: jnp.dtype) -> dict[str, object]:
    """Returns the fields that all rows of a shape have."""
    batch, tokens, heads, width = shape
    return {
        'device': jax.devices()[0].device_kind,
        'dtype': str(dtype),
        'batch': batch,
        'tokens': tokens,
        'heads': heads,
        'width': width,
    }


def report_op(shape: Shape, dtype: jnp.dtype, results: list[Result]) -> None:
    """Prints the times of the op and of XLA, in microseconds."""
    batch, tokens, heads, width = shape
    row = described(shape, dtype)
    totals = {what: sum(us.values()) for what, _, us in results if what.startswith(SIDES)}
    for direction, passes in (('forward', 1.0), ('both', 3.5)):
        if ours := totals.get(f'ours_{direction}'):
            teraflops = 4 * batch * heads * tokens**2 * width * passes / ours / 1e6
            xla = totals.get(f'xla_{direction}', float('nan'))
            found = {
                'us': round(ours, 1),
                'tflops': round(teraflops),
                'xla_us': round(xla, 1),
                'ratio': round(xla / ours, 2),
            }
            if triton_us := totals.get(f'triton_{direction}'):
                found |= {
                    'triton_us': round(triton_us, 1),
                    'triton_ratio': round(triton_us / ours, 2),
                }
            split = next(us for what, _, us in results if what == f'ours_{direction}')
            names = {
                name.removeprefix('jaxunet_attention_'): round(us, 1) for name, us in split.items()
            }
            print(json.dumps(row | {'what': direction} | found | {'kernels': names}), flush=True)


def report_tiles(shape: Shape, dtype: jnp.dtype, results: list[Result], top: int) -> Timed:
    """Prints the fastest tiles of each kernel.

    Returns: the times of all tiles, in microseconds.
    """
    _, tokens, _, width = shape
    row = described(shape, dtype)
    timed: dict[str, list[tuple[float, Tile]]] = collections.defaultdict(list)
    for what, tile, kernels in results:
        tiles = (
            {}
            if tile is None
            else {what: tile}
            if isinstance(tile, Tile)
            else dict(zip(PAIR, tile, strict=True))
        )
        for kernel, used in tiles.items():
            timed[kernel].append((kernels[f'jaxunet_attention_{kernel}'], used))
    for kernel, rows in timed.items():
        default = default_tile(kernel, tokens, width, dtype)
        best = [[round(us, 1), *dataclasses.astuple(tile)] for us, tile in sorted(rows)[:top]]
        chosen = next((round(us, 1) for us, tile in rows if tile == default), None)
        print(
            json.dumps(
                row | {'kernel': kernel, 'best': best, 'tried': len(rows), 'chosen': chosen}
            ),
            flush=True,
        )
    # A tile that was timed in several pairs keeps the last of its times here, which is the
    # shortest.
    return {
        keyed(kernel, shape, dtype): {tile: us for us, tile in sorted(rows, reverse=True)}
        for kernel, rows in timed.items()
    }


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--batch', type=int, default=32)
    parser.add_argument('--shapes', default=SHAPES)
    known = ('both', *KERNELS)
    parser.add_argument('--kernels', type=some_of(known), default=','.join(known))
    parser.add_argument('--dtype', default='bfloat16', choices=DTYPES)
    parser.add_argument(
        '--seconds', type=float, default=60, help='no further tile is compiled after this'
    )
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--top', type=int, default=4)
    parser.add_argument('--write', action='store_true', help="update the device's table of tiles")
    args = parser.parse_args()
    check_gpu()
    dtype, start = jnp.dtype(args.dtype), time.monotonic()
    shapes: list[Shape] = []
    for text in args.shapes.split(','):
        tokens, heads, width, *batch = map(int, text.split(':'))
        shapes.append((batch[0] if batch else args.batch, tokens, heads, width))
    arrays = {shape: inputs(shape, dtype) for shape in shapes}
    # Shapes take turns, so that each gets its share before time is up; the op itself comes first.
    queues = [jobs_for(shape, args.kernels, dtype) for shape in shapes]
    jobs = [queue[i] for i in range(max(map(len, queues))) for queue in queues if i < len(queue)]

    def compiled(number: int) -> Callable[[int], PyTree] | str | None:
        shape, what, tile = jobs[number]
        if time.monotonic() - start > args.seconds:
            return None
        try:
            program = (
                timing.named(f'job{number}', build(jobs[number])).lower(*arrays[shape]).compile()
            )
            return lambda _: program(*arrays[shape])
        except jax.errors.JaxRuntimeError as error:
            return f'{shape} {what} {tile}: {str(error)[:100]}'

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        built = list(pool.map(compiled, range(len(jobs))))
    for message in [b for b in built if isinstance(b, str)][:5]:
        print(message)
    good: dict[str, Callable[[int], PyTree]] = {
        f'job{i}': b for i, b in enumerate(built) if b is not None and not isinstance(b, str)
    }
    print(f'compiled {len(good)} of {len(jobs)} in {time.monotonic() - start:.0f} s', flush=True)
    results = collections.defaultdict(list)
    for name, times in timing.trace_times(good, rounds=args.repeats).items():
        shape, what, tile = jobs[int(name.removeprefix('job'))]
        results[shape].append(
            (what, tile, {kernel: us / SETS for kernel, us in times.kernels.items()})
        )
    timed: Timed = {}
    for shape in shapes:
        report_op(shape, dtype, results[shape])
        timed |= report_tiles(shape, dtype, results[shape], args.top)
    if args.write:
        chosen = {key: tile for shape in shapes for key, tile in chosen_tiles(shape, dtype).items()}
        print(tile_table.update(jax.devices()[0].device_kind, timed, chosen))


if __name__ == '__main__':
    main()
