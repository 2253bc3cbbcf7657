"""Measures the kernels of every backend beside XLA: selection, compilation, timing, and rows."""

from __future__ import annotations

import concurrent.futures
import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import PyTree

from jaxunet.benchmark.cases import check_names, parse_batch_sizes
from jaxunet.benchmark.kernels import lowering, peers
from jaxunet.benchmark.kernels import table as kernel_table
from jaxunet.benchmark.kernels.lowering import KINDS
from jaxunet.runtime import gpu_time as timing
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.measurement import ArrayFunction, Arrays, Inputs, Measurement
from jaxunet.runtime.plugins import Backend
from jaxunet.runtime.rows import Row

DTYPE = 'bfloat16'
THREADS = 16
GROUP = 16  # measurements compiled and traced together; an interrupted run loses at most these
ROUNDS = 10
SAMPLE = 1 << 16  # elements of each output that are compared between sides
# Bytes; larger outputs are not compared: fetching them takes long, and smaller cases exist.
COMPARED = 1 << 26
# Largest difference relative to the largest element: rounding and summation order in bfloat16
# stay below it, a wrong kernel does not.
ALLOWED = 0.05
Trace = Callable[..., dict[str, timing.Times]]
Elsewhere = Mapping[tuple[str, str], concurrent.futures.Future[lowering.Lowered]]
Sides = dict[str, 'Built | Exception | None']  # by name; None: there was no time to compile it


class Built(NamedTuple):
    """A compiled side.

    Fields:
      run: the compiled program.
      lower_s: processor seconds of tracing and lowering in this thread.
      compile_s: seconds of compiling.
      temp_bytes: temporary device memory of the program.

    They are zero for PyTorch, and rows have them only of XLA and the kernels.
    """

    run: ArrayFunction
    lower_s: float = 0.0
    compile_s: float = 0.0
    temp_bytes: int = 0


def select(
    ops: Sequence[str],
    batch_sizes: Sequence[str],
    cases: str,
    backends: Sequence[Backend] = (),
    directions: Sequence[str] = (),
) -> list[Measurement]:
    """Returns the measurements that these flags ask for, in order, on XLA and these backends.

    Raises:
      UserError: an unknown op or direction, a batch size below 1, or an invalid regular expression
        or one that matches no case.
    """
    check_names('ops', ops, KINDS)
    sizes = parse_batch_sizes(batch_sizes)
    try:
        pattern = re.compile(cases)
    except re.error as error:
        raise UserError(f'--cases: {cases!r} is not a regular expression: {error}') from None
    # By name: a measurement that does not depend on the batch size is then there only once.
    named = {
        m.name: m
        for size in sizes
        for op, kind in KINDS.items()
        if not ops or op in ops
        for m in kind.measurements(size, DTYPE, backends)
    }
    every = list(named.values())
    if not every:
        raise UserError(
            f'--ops: {", ".join(ops)}: only the CUDA backend has kernels for that, and they '
            'cannot run here'
        )
    check_names('directions', directions, dict.fromkeys(m.direction for m in every))
    every = [m for m in every if not directions or m.direction in directions]
    selected = [m for m in every if pattern.search(m.case)]
    if not selected:
        known = ', '.join(list(dict.fromkeys(m.case for m in every))[:8])
        raise UserError(f'--cases: {cases!r} matches no case; there are {known}, ...')
    return selected


def comparable(wanted: Sequence[Measurement], names: Sequence[str] = ()) -> list[Measurement]:
    """Returns the measurements that have a side beside XLA.

    Args:
      names: the peers that were asked for; PyTorch becomes a side, as the others are already.

    Raises:
      UserError: there is none.
    """
    if peers.PYTORCH in names:
        wanted = peers.with_pytorch(wanted)
    several = [m for m in wanted if len(m.sides) > 1]
    if not several:
        raise UserError(
            'no backend that runs here has kernels for these cases, so there is nothing to compare '
            'with XLA; the lines above say what each backend lacks'
        )
    return several


def measure(
    wanted: Sequence[Measurement],
    *,
    stop: float,
    elsewhere: Elsewhere | None = None,
    trace: Trace = timing.trace_times,
) -> Iterator[Row | Measurement]:
    """Yields a row for each measurement, or the measurement itself if there was no time for it.

    Args:
      stop: the time (`time.monotonic`) after which no further program is compiled.
      elsewhere: sides that other processes lower, by name of measurement and side.
      trace: times the programs.
    """
    inputs, batch = Inputs(), None
    for start in range(0, len(wanted), GROUP):
        group = {f'measurement{start + i}': m for i, m in enumerate(wanted[start : start + GROUP])}
        built = build(group, stop, elsewhere or {})
        began = time.monotonic()
        programs: dict[str, Callable[[int], PyTree]] = {}
        differences: dict[str, float] = {}
        for name, m in group.items():
            if m.batch != batch:
                inputs.clear()
                batch = m.batch
            sides = built[name]
            ours = [b for side, b in sides.items() if side not in peers.PEERS]
            if not all(isinstance(b, Built) for b in ours):
                continue
            try:
                exact, *rest = (b.run(inputs.of(m, 0)) for b in ours if isinstance(b, Built))
                differences[name] = max((difference(exact, output) for output in rest), default=0.0)
            except Exception as error:  # a side that fails must not end the others
                built[name] = dict.fromkeys(m.sides, error)
                continue
            check_peers(sides, exact, inputs.of(m, 0))
            for side, b in sides.items():
                if isinstance(b, Built):
                    programs[f'{name}_{side}'] = functools.partial(_call, b.run, inputs, m)
        times = trace(programs, rounds=ROUNDS) if programs else {}
        logging.info(
            '%d of %d: timed %d programs in %.1f s',
            start + len(group),
            len(wanted),
            len(programs),
            time.monotonic() - began,
        )
        for name, m in group.items():
            seen = {side: times.get(f'{name}_{side}') for side in built[name]}
            sides = without_failed_peers(m, built[name], seen)
            failed = any(isinstance(b, Exception) for b in sides.values())
            if None in sides.values() and not failed:
                yield m
            else:
                yield to_row(m, sides, seen, differences.get(name))


def check_peers(sides: Sides, exact: PyTree, inputs: Arrays) -> None:
    """Replaces the peers that fail, or compute something else than XLA, by an exception."""
    for side, b in sides.items():
        if side in peers.PEERS and isinstance(b, Built):
            try:
                off = difference(exact, peers.fetched(side, b.run(inputs)))
                if off > ALLOWED:
                    raise ValueError(f'its results differ by {off:.2g} of the largest number')
            except Exception as error:
                sides[side] = error


def without_failed_peers(
    m: Measurement, sides: Sides, times: Mapping[str, timing.Times | None]
) -> Sides:
    """Returns the sides without the peers that failed or have no times; the log says why."""
    kept = dict(sides)
    for side, b in sides.items():
        seen = times[side]
        if side not in peers.PEERS or b is None:
            continue
        if isinstance(b, Exception) or seen is None or not seen.calls:
            why = b if isinstance(b, Exception) else 'the trace lost its kernels'
            logging.warning('%s: without %s: %s', m.name, side, why)
            del kept[side]
    return kept


def _call(run: ArrayFunction, inputs: Inputs, m: Measurement, number: int) -> PyTree:
    return run(inputs.of(m, number))


def build(group: Mapping[str, Measurement], stop: float, elsewhere: Elsewhere) -> dict[str, Sides]:
    """Compiles the sides of measurements in threads; a side that would begin after `stop` is None.

    Args:
      group: the measurements by name.
      stop, elsewhere: as for `measure`.

    Returns the sides by name of measurement and side. Their programs are called NAME_SIDE.
    """

    def one(job: tuple[str, Measurement, str]) -> Built | Exception | None:
        name, m, side = job
        waiting = elsewhere.get((m.name, side))
        if waiting is not None:
            try:
                lowered = waiting.result(timeout=max(0, stop - time.monotonic()))
                if time.monotonic() > stop:
                    return None
                function = jax.export.deserialize(bytearray(lowered.exported)).call
                return compiled(f'{name}_{side}', function, m)._replace(lower_s=lowered.seconds)
            except TimeoutError:
                return None
            except Exception as error:
                logging.warning(
                    '%s: lowers in this process: %s: %s', m.name, type(error).__name__, error
                )
        if time.monotonic() > stop:
            return None
        try:
            return compiled(f'{name}_{side}', m.sides[side], m)
        except Exception as error:  # a side that fails must not end the others
            return error

    jobs = [(name, m, side) for name, m in group.items() for side in m.sides]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(one, jobs))
    built: dict[str, Sides] = {name: {} for name in group}
    for (name, _, side), result in zip(jobs, results, strict=True):
        built[name][side] = result
    return built


def compiled(name: str, function: ArrayFunction, m: Measurement) -> Built:
    """Compiles one side of a measurement; the program is called `name` in traces."""
    if isinstance(function, peers.Foreign):
        return Built(function.named(name))

    def apart(updated: Arrays, kept: Arrays) -> PyTree:
        return function(updated | kept)

    def split(inputs: Arrays) -> tuple[Arrays, Arrays]:
        updated = {n: v for n, v in inputs.items() if n in m.updated}
        return updated, {n: v for n, v in inputs.items() if n not in m.updated}

    began = time.thread_time()
    if m.updated:
        lowered = timing.named(name, apart, donated=(0,)).lower(*split(m.inputs))
    else:
        lowered = timing.named(name, function).lower(m.inputs)
    lower_s, began = time.thread_time() - began, time.perf_counter()
    program = lowered.compile()
    compile_s = time.perf_counter() - began
    usage = program.memory_analysis()
    assert usage is not None

    def on_copies(inputs: Arrays) -> PyTree:
        updated, kept = split(inputs)
        return program(jax.tree.map(jnp.copy, updated), kept)

    run = on_copies if m.updated else program
    return Built(run, lower_s, compile_s, usage.temp_size_in_bytes)


def difference(first: PyTree, second: PyTree) -> float:
    """Returns the largest difference of two results, relative to the largest element of its array.

    NaN counts as infinite.
    """
    largest = 0.0
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        if a.nbytes > COMPARED:
            continue
        step = max(1, a.size // SAMPLE) | 1
        x, y = (np.asarray(v).ravel()[::step].astype(np.float32) for v in (a, b))
        off = float(np.abs(x - y).max(initial=0) / max(float(np.abs(x).max(initial=0)), 1e-30))
        largest = max(largest, off if np.isfinite(off) else np.inf)
    return largest


def to_row(
    m: Measurement, sides: Sides, times: Mapping[str, timing.Times | None], off: float | None
) -> Row:
    """Returns the row of one measurement, without its origin; with an `error` it has no numbers."""
    row: Row = {
        'op': m.op,
        'case': m.case,
        'direction': m.direction,
        'batch': m.batch,
        'dtype': DTYPE,
        'error': None,
    }
    for side, b in sides.items():
        if isinstance(b, Exception):
            return row | {'error': f'{side}: {type(b).__name__}: {b}'[:600]}
    for side in sides:
        seen = times[side]
        if seen is None or not seen.calls:
            return row | {
                'error': f'{side}: the trace lost {"all" if seen is None else "some"} of its '
                'kernels'
            }
    for side, b in sides.items():
        seen = times[side]
        assert isinstance(b, Built)
        assert seen is not None
        row[f'us_{side}'] = round(seen.us, 3)
        row[f'us_{side}_quartiles'] = [round(us, 3) for us in seen.quartiles]
        row[f'kernels_{side}'] = {kernel: round(us, 3) for kernel, us in seen.kernels.items()}
        if side in peers.PEERS:
            continue
        row |= {
            f'lower_s_{side}': round(b.lower_s, 3),
            f'compile_s_{side}': round(b.compile_s, 3),
            f'temp_bytes_{side}': b.temp_bytes,
        }
    moved = m.bytes_needed()
    row |= {'flops': m.flops, 'bytes': moved}
    for side, suffix in kernel_table.suffixes(row).items():
        us = row[f'us_{side}']
        row |= {
            f'ratio{suffix}': round(row['us_xla'] / us, 3),
            f'tflops{suffix}': None if m.flops is None else round(m.flops / us / 1e6, 1),
            f'gbps{suffix}': round(moved / us / 1e3, 1),
        }
    assert off is not None
    row['difference'] = float(f'{off:.2g}') if np.isfinite(off) else None
    if off > ALLOWED:
        row['error'] = (
            f'the results differ by {off:.2g} of the largest number; at most {ALLOWED} is rounding'
        )
    return row
