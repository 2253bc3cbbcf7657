"""Runs the steps of a config on a GPU, and makes rows of their budget."""

from __future__ import annotations

import pathlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence

import jax
from absl import logging

from jaxunet.benchmark.cases import benchmark_config
from jaxunet.benchmark.device import measure_rates
from jaxunet.benchmark.jax_side import JaxSide, synthetic_source
from jaxunet.benchmark.roofline.measured import Line, StepKernels, measure
from jaxunet.benchmark.roofline.work import step_work
from jaxunet.benchmark.run import steps_of_turn
from jaxunet.benchmark.timing import interleave
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import Config
from jaxunet.data.source import Source
from jaxunet.ops.backends import choose
from jaxunet.profile.capture import capture
from jaxunet.profile.summary import summarise
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.rows import Row, origin

KIND = 'roofline'
STEP = 'step'  # class of the row with the sums over all classes
TRACED = 5  # traced steps
ROUNDS = 5  # turns that time a step without the tracer; their median counts


def run(name: str, config: Config, batch_sizes: Sequence[int], command: str) -> Iterator[Row]:
    """Yields the rows of each batch size: one per class and level, then one of the whole step.

    Images are random: times do not depend on them.

    Args:
      name: the config's name in the rows.
      batch_sizes: batch sizes to measure; empty = the config's.
      command: the command line, which every row repeats.

    Raises:
      UserError: there is no GPU, the config splits a batch over several devices or micro-batches,
        its backend is missing, or the tracer saw nothing of the device.
    """
    check_gpu()
    config = benchmark_config(config)
    kernels = choose(config.backend, config.precision)
    rates = measure_rates(config.precision)
    shared = origin(KIND, command) | {
        'config': name,
        'precision': config.precision,
        'backend': config.backend,
        'ops': str(kernels),
        **rates.columns(),
    }
    for size in batch_sizes or [config.data.batch_size]:
        sized = config.replace(data={'batch_size': size})
        work = step_work(sized, [op for op, backend in kernels.names.items() if backend == 'xla'])
        source = synthetic_source(sized)
        logging.info('%s, batch %d: traces a step', name, size)
        with tempfile.TemporaryDirectory() as folder:
            # Kernels that overlap would count twice.
            alone = sized.replace(
                train={'steps_per_call': 1}, parallel={'concurrent_kernels': False}
            )
            captured = capture(alone, source, pathlib.Path(folder), steps=TRACED)
        measured = measure(captured.trace, captured.hlo, TRACED, work, rates)
        busy_ms = summarise(captured.trace, TRACED).busy_ms
        logging.info('%s, batch %d: times steps', name, size)
        step_ms = captured.step_ms if sized == alone else wall_ms(sized, source)
        yield from to_rows(shared | {'batch_size': size}, measured, busy_ms, step_ms)


def check_gpu() -> None:
    """Raises UserError unless JAX's device is a GPU."""
    if jax.default_backend() != 'gpu':
        raise UserError(
            '--roofline: times the kernels of a training step on an NVIDIA GPU; found '
            f'{jax.default_backend()} (JAX finds GPUs with jax[cuda12] or jax[cuda13])'
        )


def wall_ms(config: Config, source: Source) -> float:
    """Returns the wall milliseconds of a step, with as many steps per call as training has."""
    prepared = JaxSide(config, source, fresh_state(config)).prepare(STEP)
    runs = {STEP: prepared.run}
    steps = steps_of_turn(runs, None, prepared.unit)
    times = interleave(runs, rounds=ROUNDS, steps=steps)[STEP]
    prepared.close()
    if isinstance(times, Exception):
        raise times
    return statistics.median(times)


def to_rows(case: Row, measured: StepKernels, busy_ms: float, step_ms: float) -> Iterator[Row]:
    """Yields the rows of one step.

    Args:
      case: the fields that all rows share.
      measured: the kernels of the step.
      busy_ms: time in which any kernel ran, per step.
      step_ms: wall time of a step.
    """
    for line in measured.lines:
        level = 'x'.join(map(str, line.level)) or None
        yield case | {'class': line.kind, 'level': level, **_numbers([line])}
    whole = [line for line in measured.lines if not line.level]
    yield case | {
        'class': STEP,
        'level': None,
        **_numbers(whole),
        'busy_ms': busy_ms,
        'step_ms': step_ms,
        'gaps_ms': step_ms - busy_ms,
        'unplaced': measured.unplaced,
        'unknown': measured.unknown,
    }


def _numbers(lines: Sequence[Line]) -> Row:
    """Returns the sums of the lines' numbers."""
    floor_ms, ms = sum(line.floor_ms for line in lines), sum(line.ms for line in lines)
    return {
        'launches': sum(line.launches for line in lines),
        'flops': sum(line.flops for line in lines),
        'bytes': sum(line.bytes for line in lines),
        'floor_ms': floor_ms,
        'ms': ms,
        'above_ms': ms - floor_ms,
    }
