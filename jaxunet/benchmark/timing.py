"""Times several sides in turns, so that a drift of the machine's speed affects all equally."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from jaxunet.runtime.garbage import garbage_set_aside

Run = Callable[[int], None]  # runs this many steps and returns once the device has finished them
# Seconds of one turn: much longer than the few milliseconds at its start in which the device waits.
TURN_SECONDS = 0.5
MIN_STEPS = 10


class Timing(NamedTuple):
    """Milliseconds per step, and the ratio to the first side within each round.

    Each is a median over rounds, with lower and upper quartiles.
    """

    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio: float
    ratio_quartiles: tuple[float, float]


def turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """Returns the order of the sides in each round: forwards and backwards alternately."""
    return [list(names) if i % 2 == 0 else list(names)[::-1] for i in range(rounds)]


def steps_in(
    seconds: float, run: Run, unit: int = 1, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Returns how many steps of a warmed-up side take about `seconds`, rounded up.

    Args:
      unit: `run` takes multiples of this.
    """
    run(unit)
    began = clock()
    run(2 * unit)
    return math.ceil(2 * unit * seconds / max(clock() - began, 1e-6))


def turn_steps(counts: Sequence[int], unit: int = 1) -> int:
    """Returns the steps of one turn, the same for all sides: a multiple of `unit`.

    The fastest side takes `TURN_SECONDS`, unless the slowest would then take more than four times
    as long. There are at least `MIN_STEPS` steps.

    Args:
      counts: `steps_in(TURN_SECONDS, ...)` of each side that runs.
    """
    steps = max(MIN_STEPS, min(max(counts), 4 * min(counts))) if counts else MIN_STEPS
    return math.ceil(steps / unit) * unit


def interleave(
    sides: Mapping[str, Run],
    *,
    rounds: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
    turn: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
) -> dict[str, list[float] | Exception]:
    """Returns milliseconds per step of every side in every round, by name.

    A side that raises is left out of the later rounds, and its exception is returned instead.

    Args:
      sides: functions to run, by name.
      rounds: turns of each side.
      steps: steps of one turn, timed together.
      turn: a context around each turn of the side with this name, such as `Meter.turn`.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    failed: dict[str, Exception] = {}
    with garbage_set_aside():
        for order in turns(list(sides), rounds):
            for name in order:
                if name in failed:
                    continue
                try:
                    with turn(name):
                        began = clock()
                        sides[name](steps)
                        times[name].append((clock() - began) / steps * 1e3)
                except Exception as error:
                    failed[name] = error
    return {name: failed.get(name, times[name]) for name in sides}


def summarise(times: Sequence[float], first: Sequence[float] | None) -> Timing:
    """Returns medians and quartiles over rounds, of times and of ratios to the first side.

    Ratios are taken within a round; they are NaN if the first side failed (`first` is None).
    """
    ratios = np.divide(times, first) if first is not None else np.full(len(times), np.nan)
    low, median, high = np.percentile(times, (25, 50, 75))
    ratio_low, ratio, ratio_high = np.percentile(ratios, (25, 50, 75))
    return Timing(
        float(median),
        (float(low), float(high)),
        float(ratio),
        (float(ratio_low), float(ratio_high)),
    )
