"""The table of docs/results/recipes/sharing.jsonl: steps of processes that share a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from support import markdown

from jaxunet.runtime.rows import Row
from tools.docs import recipe_tables


def table(rows: Sequence[Row]) -> str:
    """Step times and throughput by number of processes, with and without NVIDIA's service.

    Args:
      rows: one row for each process, with median and quartiles of its step time in ms.
    """
    groups: dict[tuple[int, bool], list[Row]] = {}
    for row in rows:
        groups.setdefault((row['processes'], row['mps']), []).append(row)

    def rate(key: tuple[int, bool]) -> float:
        return float(key[0] * np.mean([1e3 * row['batch_size'] / row['ms'] for row in groups[key]]))

    body = [
        (
            str(processes),
            'yes' if mps else 'no',
            recipe_tables.all_of(mine, lambda row: row.get('case', '')),
            ', '.join(
                f'{row["ms"]:.2f} ({row["quartiles"][0]:.2f} to {row["quartiles"][2]:.2f})'
                for row in mine
            ),
            f'{rate((processes, mps)):,.0f}',
            f'{rate((processes, mps)) / rate((1, False)):.2f}',
        )
        for (processes, mps), mine in sorted(groups.items())
    ]
    head = ('processes', 'MPS', 'objectives', 'ms a step, median (quartiles)', 'images/s', 'ratio')
    return f'{markdown.table(head, body)}\n\n{recipe_tables.measured_with(rows)}.'


def sharing() -> str:
    """The table of the committed rows; their step times come from the logs of the processes."""
    return table(recipe_tables.json_lines(recipe_tables.FOLDER / 'sharing.jsonl'))
