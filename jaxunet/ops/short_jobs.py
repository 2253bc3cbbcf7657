"""Chooses the backend of a short sampling job, which may end before some backends have compiled.

`sampling_costs.json` holds measured costs, one row per device family, precision and backend:

    start_s          seconds from the start of the command to its first evaluation, all caches empty
    teraflop_per_s   TFLOP of the network's forward pass per second, in full batches

A job of W TFLOP then takes start_s + W / teraflop_per_s. Both were measured with the network of
configs/elephants64.py and are estimates for others. To measure and refit:

    python tools/gpu/starts.py --output rows.jsonl
    python tools/gpu/starts.py --fit rows.jsonl
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from absl import logging

from jaxunet.config import OPS
from jaxunet.ops.backends import UNNAMED, choose
from jaxunet.runtime import device
from jaxunet.runtime.errors import UserError

FILE = pathlib.Path(__file__).with_name('sampling_costs.json')


class Cost(NamedTuple):
    """The measured costs of a backend; the module's docstring has the units."""

    start_s: float
    teraflop_per_s: float

    def seconds(self, work: float) -> float:
        """Returns the seconds that a job of `work` TFLOP takes."""
        return self.start_s + work / self.teraflop_per_s


@functools.cache
def measured() -> dict[tuple[str, str], dict[str, Cost]]:
    """Returns the costs by backend, for each family of devices and precision."""
    found: dict[tuple[str, str], dict[str, Cost]] = {}
    for row in json.loads(FILE.read_text())['rows']:
        costs = found.setdefault((row['family'], row['precision']), {})
        costs[row['backend']] = Cost(row['start_s'], row['teraflop_per_s'])
    return found


def backend_for(backend: str, precision: str, work: Callable[[], float]) -> str:
    """Returns the backend for a job; logs why if it is not the one that was asked for.

    Only `auto` is replaced; a backend that the config names is kept.

    Args:
      work: returns the TFLOP of the job on one device; called only if it matters.
    """
    if backend != UNNAMED or (family := device.family()) is None:
        return backend
    costs = {
        name: cost
        for name, cost in measured().get((family.value, precision), {}).items()
        if _runs(name, precision)
    }
    asked = next((name for name in costs if _same(name, backend, precision)), None)
    if asked is None or len(costs) == 1:
        return backend
    size = work()
    best = min(costs, key=lambda name: costs[name].seconds(size))
    if best == asked:
        return backend
    logging.info(
        'backend=auto: %s for this short job, about %.0f s with compiling; '
        'what auto takes for long ones needs about %.0f s (--backend names one)',
        best,
        costs[best].seconds(size),
        costs[asked].seconds(size),
    )
    return best


def _same(one: str, other: str, precision: str) -> bool:
    """Returns True if two backends sample with the same ops."""
    first, second = choose(one, precision), choose(other, precision)
    return all(first[op] == second[op] for op in OPS if op != 'adamw')


def _runs(backend: str, precision: str) -> bool:
    try:
        choose(backend, precision)
    except UserError:
        return False
    return True
