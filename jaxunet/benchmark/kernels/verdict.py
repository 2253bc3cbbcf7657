"""The bars for the speed of kernels, and the verdict on a group of rows.

A group is all cases of one op, direction and batch size. It meets the bars if both hold:

- The geometric mean of XLA's time over the kernels' time is at least `ratio_bar`, or every case
  reaches `SHARE` of the device's measured rate of matrix products or of copies.
- No case has less than `LEAST` of XLA's speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from jaxunet.runtime.rows import Row

RATES = ('matmul_flops', 'copy_bytes_per_s')  # measured rates; older rows do not have them
SHARE = 0.85
LEAST = 0.95
RATIO, OF_WEIGHT_GRADIENT, OF_ATTENTION = 1.5, 1.3, 3.0


class Verdict(NamedTuple):
    """The bars that a group meets or misses.

    Fields:
      share: the lowest share of the device's rates; None if a row has no rates.
      text: 'met', or 'not met' and the bars that it misses.
    """

    share: float | None
    text: str


def ratio_bar(op: str, direction: str) -> float:
    """Returns the least geometric mean of XLA's time over the kernels' for a group."""
    if op == 'attention':
        return OF_ATTENTION
    return OF_WEIGHT_GRADIENT if direction == 'weight_gradient' else RATIO


def share_of_rates(row: Row) -> float | None:
    """Returns the larger of a case's shares of the device's matrix-product and copy rates.

    None if the row does not have these rates.

    Args:
      row: a row of one backend, from `table.by_backend`.
    """
    products, copies = (row.get(name) for name in RATES)
    if not products or not copies:
        return None
    return max(row['gbps'] * 1e9 / copies, (row['tflops'] or 0) * 1e12 / products)


def verdict(group: Sequence[Row]) -> Verdict:
    """Returns the verdict on the rows of a group, all of one backend."""
    shares = [share_of_rates(row) for row in group]
    known = [share for share in shares if share is not None]
    share = min(known) if len(known) == len(shares) else None
    mean = statistics.geometric_mean(row['ratio'] for row in group)
    bar = ratio_bar(group[0]['op'], group[0]['direction'])
    slow = sum(row['ratio'] < LEAST for row in group)
    missed = []
    if mean < bar and (share is None or share < SHARE):
        under = sum(share < SHARE for share in known)
        rates = f'{under} under {SHARE:.0%} of the rates' if share is not None else 'rates unknown'
        missed.append(f'mean under {bar:g}, {rates}')
    if slow:
        missed.append(f'{slow} under {LEAST:g} of XLA')
    return Verdict(share, f'not met: {"; ".join(missed)}' if missed else 'met')
