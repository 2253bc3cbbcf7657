"""Times tiles of the Hopper convolution on this machine's GPU: the current one and `candidates`.

    python -m pallas_kernels.conv3x3.tune_hopper [--batch 32] [--directions forward,input]
        [--cases 64x64] [--seconds 60] [--write]

Directions: `forward`, `input` (the gradient by the input) and `weight` (by the weights) are plain
convolutions. `fused` is the convolution of the op `norm_silu_conv3x3` with its residual, and with
its activation where that is fused, but without the statistics.

Prints one JSON line per shape: µs of the current tile and of the fastest tiles. These are GPU times
of all kernels of a call, including sums of partial results and copies of weights. Then it prints
how much slower the current tiles are than the fastest. `--write` puts the fastest into the device's
table (`tile_table.update`). Fit `hopper_tiles.cycles` and `hopper_weight_gradient.default_tile`,
which estimate the times of other shapes, to these rows.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.cases import CIFAR10, ELEPHANTS64, Case
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.runtime import gpu_time as timing
from jaxunet.runtime.measurement import Inputs, Measurement
from pallas_kernels import tile_table
from pallas_kernels.checks import DTYPES, check_gpu, some_of
from pallas_kernels.conv3x3 import dispatch, hopper, hopper_weight_gradient
from pallas_kernels.conv3x3.schedule import Tile

AnyTile = Tile | hopper_weight_gradient.Tile
Operands = dict[str, PyTree]  # arrays or their shapes, by name
DIRECTIONS = ('forward', 'input', 'fused', 'weight')
THREADS, ROUNDS = 16, 8


class Shape(NamedTuple):
    """One direction of a case.

    Fields:
      tiles: to time, the chosen one first.
      run: computes the direction with a tile and the inputs.
      key: in the table of tiles.
    """

    case: str
    direction: str
    inputs: Operands
    flops: int
    tiles: list[AnyTile]
    run: Callable[[AnyTile, Operands], jax.Array]
    key: tile_table.Key


Job = tuple[Shape, AnyTile]  # and one of its tiles


def shape(case: Case, direction: str, batch: int, dtype: str, limit: int) -> Shape | None:
    """Returns a direction of a case; None if the Hopper kernel does not support the shape."""
    if direction == 'weight':
        return _weight_gradient(case, batch, dtype, limit)
    return _convolution(case, direction, batch, dtype, limit)


def _weight_gradient(case: Case, batch: int, dtype: str, limit: int) -> Shape | None:
    image = (batch, case.height, case.width)
    parts = tuple(jax.ShapeDtypeStruct((*image, c), dtype) for c in case.parts)
    dy = jax.ShapeDtypeStruct((*image, case.features), dtype)
    if hopper_weight_gradient.supports(parts, dy):
        return None
    every = hopper_weight_gradient.candidates(parts, dy)
    every = [hopper_weight_gradient.choose_tile(parts, dy), *every]
    tiles = list[AnyTile](dict.fromkeys(every))[:limit]

    def run(tile: AnyTile, i: Operands) -> jax.Array:
        assert isinstance(tile, hopper_weight_gradient.Tile), tile
        return hopper_weight_gradient.weight_gradient(i['x'], i['dy'], tile=tile)

    key = tile_table.Key(
        'conv3x3/hopper_weight_gradient', dtype, hopper_weight_gradient.shape_class(parts, dy)
    )
    inputs: Operands = {'x': parts, 'dy': dy}
    return Shape(case.name, 'weight', inputs, case.flops(batch), tiles, run, key)


def _convolution(case: Case, direction: str, batch: int, dtype: str, limit: int) -> Shape | None:
    array = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    image = (batch, case.height, case.width)
    parts = tuple(array((*image, c)) for c in case.parts)
    kernel, dy = array((3, 3, case.channels, case.features)), array((*image, case.features))
    bias = jax.ShapeDtypeStruct(
        (1, case.channels if direction == 'input' else case.features), 'float32'
    )
    inputs: Operands = {
        'x': (dy,) if direction == 'input' else parts,
        'kernel': kernel,
        'shift': bias,
    }
    if direction == 'fused':
        if dispatch.fuses_activation(parts[0]):
            inputs['affine'] = (jax.ShapeDtypeStruct((batch, case.channels), 'float32'),) * 2
        else:
            inputs['x'] = (array((*image, case.channels)),)
        if case.residual:
            inputs['residual'] = tuple(array((*image, c)) for c in case.residual)
        if case.residual and case.residual != (case.features,):
            inputs['shortcut'] = array((sum(case.residual), case.features))
    call = call_of(inputs, direction)
    if hopper.supports(call):
        return None
    every = [hopper.choose_tile(call), *hopper.candidates(call, limit)]
    tiles = list[AnyTile](dict.fromkeys(every))[:limit]

    def convolve(tile: AnyTile, i: Operands) -> jax.Array:
        assert isinstance(tile, Tile), tile
        return hopper.forward(call_of(i, direction), tile)

    key = tile_table.Key('conv3x3/hopper', dtype, hopper.shape_class(call))
    return Shape(case.name, direction, inputs, case.flops(batch), tiles, convolve, key)


def call_of(inputs: Operands, direction: str) -> hopper.Call:
    """Returns the call of the kernel that computes a direction, other than `weight`."""
    conv = Convolution(
        image=Activation(inputs['x']),
        kernel=inputs['kernel'],
        shift=inputs['shift'],
        residual=Activation(inputs['residual']) if 'residual' in inputs else None,
        shortcut=inputs.get('shortcut'),
    )
    return hopper.Call(conv, inputs.get('affine'), direction == 'input')


def shapes(
    directions: Sequence[str], pattern: str, batch: int, dtype: str, limit: int
) -> list[Shape]:
    """Returns all shapes of these directions in our networks.

    Plain convolutions occur once for each height, width and channels.
    """
    cases = ELEPHANTS64 + CIFAR10
    plain = dict.fromkeys(
        Case(c.height, c.width, (c.channels,), c.features, norm=False) for c in cases
    )
    fused = dict.fromkeys(c for c in cases if c.norm)
    wanted = (
        (c, d)
        for d in directions
        for c in (fused if d == 'fused' else plain)
        if re.search(pattern, c.name)
    )
    return [s for c, d in wanted if (s := shape(c, d, batch, dtype, limit)) is not None]


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--dtype', default='bfloat16', choices=DTYPES)
    parser.add_argument('--batch', type=int, default=32)
    parser.add_argument('--directions', type=some_of(DIRECTIONS), default=','.join(DIRECTIONS))
    parser.add_argument(
        '--cases', default='', help='regular expression that is searched for in the names of cases'
    )
    parser.add_argument(
        '--limit', type=int, default=8, help='tiles of each shape, the most promising first'
    )
    parser.add_argument('--top', type=int, default=3, help='fastest tiles printed of each shape')
    parser.add_argument(
        '--seconds',
        type=float,
        default=60,
        help='nothing is compiled after this; shapes take turns',
    )
    parser.add_argument('--write', action='store_true', help="update the device's table of tiles")
    return parser.parse_args()


def compile_jobs(jobs: Sequence[Job], seconds: float) -> dict[int, jax.stages.Compiled]:
    """Returns the compiled programs by the number of their job, without those late or failed."""
    stop = time.monotonic() + seconds

    def compiled(number: int) -> jax.stages.Compiled | None:
        s, tile = jobs[number]
        if time.monotonic() > stop:
            return None
        try:
            program = timing.named(f'job{number}', functools.partial(s.run, tile))
            return program.lower(s.inputs).compile()
        except Exception as error:  # one tile that fails to compile must not end the sweep
            print(
                f'{s.case} {s.direction} {tile}: {type(error).__name__}: {str(error)[:200]}',
                flush=True,
            )
            return None

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        numbered = enumerate(pool.map(compiled, range(len(jobs))))
        programs = {number: program for number, program in numbered if program is not None}
    print(f'compiled {len(programs)} of {len(jobs)}', flush=True)
    return programs


def report(
    wanted: Sequence[Shape],
    results: Mapping[tuple[str, str], list[tuple[float, AnyTile]]],
    about: dict[str, object],
    top: int,
) -> None:
    """Prints a row for each shape, then how far the choices are from the fastest tiles.

    Args:
      results: (microseconds, tile) by case and direction.
      about: the first fields of every row.
    """
    shares: dict[str, list[float]] = collections.defaultdict(list)
    for s in wanted:
        timed = sorted(results[s.case, s.direction], key=lambda row: row[0])
        chosen = next((us for us, tile in timed if tile == s.tiles[0]), None)
        row: dict[str, object] = about | {
            'case': s.case,
            'direction': s.direction,
            'chosen': [None if chosen is None else round(chosen, 1), _short(s.tiles[0])],
            'best': [[round(us, 1), _short(tile)] for us, tile in timed[:top]],
            'tried': len(timed),
        }
        if chosen is not None:
            row['chosen_to_best'] = round(chosen / timed[0][0], 3)
            row['tflops'] = round(s.flops / chosen / 1e6)
            shares[s.direction].append(chosen / timed[0][0])
        print(json.dumps(row), flush=True)
    for direction, found_shares in shares.items():
        mean, worst = statistics.geometric_mean(found_shares), max(found_shares)
        print(
            f'{direction}: chosen over best {mean:.3f} (geometric mean), {worst:.3f} (most), '
            f'{len(found_shares)} shapes'
        )


def main() -> None:
    """Runs the command."""
    args = arguments()
    check_gpu(hopper=True)
    wanted = shapes(args.directions, args.cases, args.batch, args.dtype, args.limit)
    queues = [[(s, tile) for tile in s.tiles] for s in wanted]
    jobs = [job for row in itertools.zip_longest(*queues) for job in row if job is not None]
    programs = compile_jobs(jobs, args.seconds)
    arrays = Inputs()

    def caller(number: int) -> Callable[[int], PyTree]:
        s, _ = jobs[number]
        like = Measurement('conv3x3', s.case, s.direction, args.batch, {}, s.inputs, s.flops)
        return lambda call: programs[number](arrays.of(like, call))

    times = timing.trace_times(
        {f'job{number}': caller(number) for number in programs}, rounds=ROUNDS
    )
    results: dict[tuple[str, str], list[tuple[float, AnyTile]]] = collections.defaultdict(list)
    for name, seen in times.items():
        s, tile = jobs[int(name.removeprefix('job'))]
        results[s.case, s.direction].append((seen.us, tile))
    kind = jax.devices()[0].device_kind
    report(wanted, results, {'device': kind, 'dtype': args.dtype, 'batch': args.batch}, args.top)
    if args.write:
        every = {s.key: {tile: us for us, tile in results[s.case, s.direction]} for s in wanted}
        print(tile_table.update(kind, every, {s.key: s.tiles[0] for s in wanted}))


def _short(tile: AnyTile) -> dict[str, int]:
    return dataclasses.asdict(tile)


if __name__ == '__main__':
    main()
