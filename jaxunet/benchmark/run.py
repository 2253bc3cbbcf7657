"""Runs a plan: builds the sides of each case, times them in turns, and makes a row for each.

A side that fails gets a row with its error.
"""

from __future__ import annotations

import functools
import gc
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec, TypeVar

from absl import logging

from jaxunet.benchmark import sampling, sharing
from jaxunet.benchmark.cases import PYTORCH, Benchmark, Competitor, Prepared
from jaxunet.benchmark.device import Rates, measure_rates
from jaxunet.benchmark.jax_side import JaxSide
from jaxunet.benchmark.power import Meter, open_gpu
from jaxunet.benchmark.timing import TURN_SECONDS, Run, interleave, steps_in, summarise, turn_steps
from jaxunet.checkpoint.state import TrainState, fresh_state
from jaxunet.config import Config
from jaxunet.data.source import Source
from jaxunet.model import cost as estimate
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.rows import Row, origin

Arguments = ParamSpec('Arguments')
Result = TypeVar('Result')
# Arithmetic of a direction in forward passes: the backward pass has two products for each product
# of the forward pass. For `sample`, it is per evaluation of the network.
PASSES = {'forward': 1, 'forward+backward': 3, 'step': 3, 'sample': 1}
ALONE = ', the network alone'  # appended to a side's name


def run(plan: Benchmark, source: Source, command: str) -> Iterator[Row]:
    """Yields rows as they are measured; the row of a failed side has an `error` and no numbers.

    Args:
      source: images for the whole training steps.
      command: the command line, which every row repeats.
    """
    shared = origin('benchmark', command) | {'config': plan.name, 'images': source.name}
    flops = estimate.forward_flops(plan.config)
    for precision in plan.precisions:
        rates = functools.cache(functools.partial(_rates, shared['device'], precision))
        state = fresh_state(plan.config.replace(precision=precision))
        for size in plan.batch_sizes:
            config = plan.config.replace(precision=precision, data={'batch_size': size})
            case = shared | {
                'precision': precision,
                'batch_size': size,
                'rounds': plan.rounds,
                'steps_per_round': plan.steps,
                'forward_flops': flops * size,
            }
            yield from _case(plan, config, source, state, case, rates)
            _release(plan)


def _rates(device: str, precision: str) -> Rates:
    rates = measure_rates(precision)
    logging.info(
        '%s: %s matrix product %.3g TFLOP/s, copy %.4g GB/s',
        device,
        precision,
        rates.matmul_flops / 1e12,
        rates.copy_bytes / 1e9,
    )
    return rates


def _case(
    plan: Benchmark,
    config: Config,
    source: Source,
    state: TrainState,
    case: Row,
    rates: Callable[[], Rates],
) -> Iterator[Row]:
    """Yields the rows of all directions of one precision and batch size."""
    with sharing.compiling(plan.lock):
        made = {name: _try(make_side, name, config, source, state) for name in plan.sides}
    sides: dict[str, Competitor] = {}
    for name, side in made.items():
        if isinstance(side, Exception):
            yield case | {
                **rates().columns(),
                'backend': name,
                'direction': 'all',
                'reference': plan.sides[0],
                'error': describe_error(side),
            }
        else:
            sides[name] = side
    for direction in plan.directions:
        yield from _direction(plan, sides, direction, case, rates)


def make_side(name: str, config: Config, source: Source, state: TrainState) -> Competitor:
    """Builds the side with this name, a backend or a peer."""
    if name not in PYTORCH:
        return JaxSide(config.replace(backend=name), source, state)
    from jaxunet.benchmark.torch_side import TorchSide  # noqa: PLC0415

    return TorchSide(config, name, source, state.params)


def _direction(
    plan: Benchmark,
    sides: Mapping[str, Competitor],
    direction: str,
    case: Row,
    rates: Callable[[], Rates],
) -> Iterator[Row]:
    """Times the sides of a case in one direction; yields a row for each."""
    with sharing.compiling(plan.lock):
        built = {
            name: _try(_prepare, name, side, direction, plan, case) for name, side in sides.items()
        }
    ready = {name: prepared for name, prepared in built.items() if isinstance(prepared, Prepared)}
    runs = {name: prepared.run for name, prepared in ready.items()}
    alone = {
        f'{n}{ALONE}': prepared.alone for n, prepared in ready.items() if prepared.alone is not None
    }
    unit = max((prepared.unit for prepared in ready.values()), default=1)
    meter = Meter(open_gpu())
    with sharing.measuring(plan.lock):
        case = case | rates().columns()
        steps = steps_of_turn(runs, plan.steps, unit)
        times = interleave(runs | alone, rounds=plan.rounds, steps=steps, turn=meter.turn)
    first = times.get(plan.sides[0])
    reference = first if isinstance(first, list) else None
    for name, prepared in built.items():
        row = case | {
            'backend': name,
            'direction': direction,
            'reference': plan.sides[0],
            'steps_per_round': steps,
        }
        outcome = prepared if isinstance(prepared, Exception) else times[name]
        network = times.get(f'{name}{ALONE}')
        if isinstance(outcome, Exception):
            yield row | {'error': describe_error(outcome)}
        elif isinstance(network, Exception):
            yield row | {'error': describe_error(network)}
        else:
            numbers = measured(ready[name], outcome, reference, row, rates())
            numbers |= meter.numbers(name, steps * row['batch_size'])
            yield row | numbers | (_share(plan, outcome, network) if network else {})
    for prepared in ready.values():
        prepared.close()


def _prepare(name: str, side: Competitor, direction: str, plan: Benchmark, case: Row) -> Prepared:
    """Compiles a direction of a side; only jaxunet's sides draw samples."""
    logging.info(
        '%s, %s, batch %d, %s: %s',
        plan.name,
        case['precision'],
        case['batch_size'],
        direction,
        name,
    )
    if direction == 'sample' and isinstance(side, JaxSide):
        return sampling.prepare(side.config, side.start.params, plan.sampling, side.notes)
    return side.prepare(direction)


def steps_of_turn(runs: Mapping[str, Run], asked: int | None, unit: int) -> int:
    """Returns the steps of one turn, a multiple of `unit`.

    Args:
      runs: the sides by name; those that fail do not count.
      asked: at least this many; None = as `turn_steps` chooses.
      unit: see `Prepared`.
    """
    if asked is not None:
        return -(-asked // unit) * unit
    counts = [_try(steps_in, TURN_SECONDS, call, unit) for call in runs.values()]
    return turn_steps([count for count in counts if isinstance(count, int)], unit)


def measured(
    prepared: Prepared, times: list[float], first: list[float] | None, row: Row, rates: Rates
) -> Row:
    """Returns the numbers of a row.

    `mfu` and `bandwidth_share` are relative to the measured rates of the device; None: unknown.
    """
    timing = summarise(times, first)
    seconds = timing.median_ms / 1e3
    moved, known = prepared.bytes_moved, first is not None
    passes = PASSES[row['direction']] * prepared.evaluations
    return {
        'median_ms': timing.median_ms,
        'quartiles_ms': list(timing.quartiles_ms),
        'ratio': timing.ratio if known else None,
        'ratio_quartiles': list(timing.ratio_quartiles) if known else None,
        'images_per_second': row['batch_size'] / seconds,
        'mfu': passes * row['forward_flops'] / seconds / rates.matmul_flops,
        'bytes_moved': moved,
        'bandwidth_share': moved / seconds / rates.copy_bytes if moved is not None else None,
        'peak_bytes': prepared.peak_bytes,
        'lower_s': prepared.lower_s,
        'compile_s': prepared.compile_s,
        'steps_per_call': 1 if prepared.alone else prepared.unit,
        'concurrent_kernels': prepared.concurrent,
        'error': None,
        **prepared.notes,
    }


def _share(plan: Benchmark, times: list[float], alone: list[float]) -> Row:
    """Returns the fields that only rows of `sample` have."""
    network = summarise(alone, times)  # its share of a step, within a round
    return {
        'sampled_images': plan.sampling.images,
        'network_ms': network.median_ms,
        'share_of_network': network.ratio,
    }


def describe_error(error: BaseException) -> str:
    """Returns the message of a UserError; otherwise type and text, and logs the traceback."""
    if isinstance(error, UserError):
        return str(error)
    logging.info('%s', ''.join(traceback.format_exception(error)))
    return f'{type(error).__name__}: {error}'[:600]


def _try(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Result | Exception:
    """Calls a function; returns its result, or the exception that it raised."""
    try:
        return function(*arguments, **options)
    except Exception as error:
        return error


def _release(plan: Benchmark) -> None:
    gc.collect()
    if set(plan.sides) & set(PYTORCH):
        from jaxunet.benchmark.torch_side import release  # noqa: PLC0415

        release()
