"""Recorded loss trajectories, and the distance between two of them."""

import pathlib
from collections.abc import Sequence

import numpy as np

from jaxunet.runtime import rows

ROWS = pathlib.Path(__file__).parents[2] / 'docs/results/golden/rows.jsonl'
SPAN = 20  # steps

Case = tuple[str, str, str, str]  # network, backend, precision, version of JAX


def distance(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the root mean square of the relative differences between means over `SPAN` steps."""
    means = [np.reshape(losses, (-1, SPAN)).mean(1) for losses in (first, second)]
    return float(np.sqrt(np.mean((means[0] / means[1] - 1) ** 2)))


def recorded() -> dict[Case, rows.Row]:
    """Returns the newest row of each case."""
    found = rows.read(ROWS) if ROWS.exists() else []
    return {
        (row['network'], row['backend'], row['precision'], row['versions']['jax']): row
        for row in found
    }
