"""Timing of several sides in one run: they take turns, so that a machine whose speed drifts does so for all of them alike."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Run = Callable[[int], None]  # does that many steps and returns when the device has finished them
TURN_SECONDS = 0.5  # at its start the device waits for the host, for some milliseconds that no training run has
MIN_STEPS = 10


class Timing(NamedTuple):
    """Milliseconds a step, and the ratio to the first side of the same rounds: medians, with lower and upper quartiles."""

    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio: float
    ratio_quartiles: tuple[float, float]


def turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """The order of the sides in each round: forwards and backwards in turn, so that nobody is always first after a pause."""
    return [list(names) if i % 2 == 0 else list(names)[::-1] for i in range(rounds)]


def steps_in(
    seconds: float, run: Run, unit: int = 1, clock: Callable[[], float] = time.perf_counter
) -> int:
    """How many steps of a side that has run before, and that takes multiples of `unit`, take about so long, rounded up."""
    run(unit)
    began = clock()
    run(2 * unit)
    return math.ceil(2 * unit * seconds / max(clock() - began, 1e-6))


def turn_steps(counts: Sequence[int], unit: int = 1) -> int:
    """Steps of everybody's turn, from the `steps_in` of `TURN_SECONDS` of each side (of those that run): as many as take the quickest side
    that long, if the slowest then takes no more than four times it, and at least `MIN_STEPS`; a multiple of `unit`, rounded up."""
    steps = max(MIN_STEPS, min(max(counts), 4 * min(counts))) if counts else MIN_STEPS
    return math.ceil(steps / unit) * unit


@contextlib.contextmanager
def garbage_set_aside() -> Iterator[None]:
    """What is there now is not gone through: that takes a tenth of a second and more, in the middle of somebody's turn."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def interleave(
    sides: Mapping[str, Run],
    *,
    rounds: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float] | Exception]:
    """Milliseconds a step of every side in every round, by name; or the exception that ended a side, without the others.

    Args:
      sides: what to run, by name.
      rounds: how often each side has its turn.
      steps: steps of one turn; only their sum is timed.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    failed: dict[str, Exception] = {}
    with garbage_set_aside():
        for order in turns(list(sides), rounds):
            for name in order:
                if name in failed:
                    continue
                try:
                    began = clock()
                    sides[name](steps)
                    times[name].append((clock() - began) / steps * 1e3)
                except Exception as error:
                    failed[name] = error
    return {name: failed.get(name, times[name]) for name in sides}


def summarise(times: Sequence[float], first: Sequence[float] | None) -> Timing:
    """Medians and quartiles of one side's rounds, and of its ratio to `first`, the same rounds of the first side (None: it failed).

    A ratio is taken within a round. Without a first side it is NaN.
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
