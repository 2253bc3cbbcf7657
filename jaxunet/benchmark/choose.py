"""Finds the fastest backend of every op on this machine, by whole training steps of a config.

A kernel that is faster alone can be slower in a step, so whole steps are timed. First, every
backend runs all ops. Then, starting from the fastest, one op at a time runs on every other backend.
The sides of a comparison take turns. `jaxunet.ops.choices` stores the result, and `backend=auto`
follows it.
"""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence

from absl import logging

from jaxunet.benchmark.cases import Benchmark, Prepared
from jaxunet.benchmark.run import describe_error, make_side, steps_of_turn
from jaxunet.benchmark.timing import interleave, summarise
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import OPS, Config
from jaxunet.data.source import Source
from jaxunet.ops import choices
from jaxunet.ops.backends import choose as kernels_of
from jaxunet.ops.backends import runnable
from jaxunet.runtime import device
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.rows import Row, git_sha

# Takes backends as in `Config.backend`; returns the milliseconds per step of each in every round,
# without the backends that fail.
Measure = Callable[[Sequence[str]], Mapping[str, Sequence[float]]]


def choose(plan: Benchmark, source: Source, command: str) -> Iterator[Row]:
    """Measures every precision of the plan at its batch size; yields the entries to keep.

    Raises:
      UserError: no backend ran a step.
    """
    for precision in plan.precisions:
        batch = plan.batch_sizes[0]
        config = plan.config.replace(precision=precision, data={'batch_size': batch})
        best, times = quickest(step_timer(config, source, plan.rounds, plan.steps))
        yield {
            'device': device.kind(),
            'precision': precision,
            'versions': choices.versions(),
            'ops': dict(kernels_of(best, here=False).names),
            'measured': times,
            'config': plan.name,
            'batch_size': batch,
            'rounds': plan.rounds,
            'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
            'git': git_sha(),
            'command': command,
        }


def check_kernels() -> None:
    """Checks that all kernels of this GPU may run.

    Raises:
      UserError: the environment variable JAXUNET_KERNELS leaves some out.
    """
    if device.requested() is not device.Kernels.FASTEST:
        raise UserError(
            f'--choose: {device.VARIABLE}={device.requested().value} leaves out kernels that '
            'backend=auto may use here; unset it'
        )


def quickest(measure: Measure) -> tuple[str, dict[str, float]]:
    """Returns the fastest backend, as in `Config.backend`, and all medians in ms.

    Raises:
      UserError: no backend ran.
    """
    backends = ['xla', *(backend.name for backend in runnable())]
    timed = measure(backends)
    if not timed:
        raise UserError('--choose: no backend ran a step; the lines above say why')
    times = {name: summarise(timed[name], None).median_ms for name in timed}
    best = min(times, key=lambda name: times[name])
    owners = {backend.name: backend.ops for backend in runnable()}
    for op in OPS:
        current = kernels_of(best, here=False).names[op]
        others = [
            f'{best}+{op}={name}'
            for name in backends
            if name != current and (name == 'xla' or op in owners[name])
        ]
        if not others:
            continue
        timed = measure([best, *others])
        if best not in timed:
            continue
        ratios = {name: summarise(timed[name], timed[best]) for name in timed if name != best}
        # The upper quartile is below 1: faster in three of four rounds. Less may be noise.
        better = {name: r.ratio for name, r in ratios.items() if r.ratio_quartiles[1] < 1}
        times |= {name: timing.median_ms for name, timing in ratios.items()}
        if better:
            best = min(better, key=lambda name: better[name])
    return best, times


def step_timer(config: Config, source: Source, rounds: int, steps: int | None) -> Measure:
    """Returns a function that times whole training steps on several backends, in turns."""
    state = fresh_state(config)

    def measure(names: Sequence[str]) -> dict[str, Sequence[float]]:
        ready: dict[str, Prepared] = {}
        for name in names:
            logging.info('%s, batch %d: %s', config.precision, config.data.batch_size, name)
            try:
                ready[name] = make_side(name, config, source, state).prepare('step')
            except Exception as error:
                logging.info('%s: %s', name, describe_error(error))
        try:
            unit = max((side.unit for side in ready.values()), default=1)
            calls = {name: side.run for name, side in ready.items()}
            by_name = interleave(calls, rounds=rounds, steps=steps_of_turn(calls, steps, unit))
        finally:
            for side in ready.values():
                side.close()
            gc.collect()
        kept: dict[str, Sequence[float]] = {}
        for name, times in by_name.items():
            if isinstance(times, Exception):
                logging.info('%s: %s', name, describe_error(times))
            else:
                kept[name] = times
        return kept

    return measure
