"""The table of docs/results/kernels/peers.jsonl: kernels beside other libraries."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from support import markdown

from jaxunet.benchmark.kernels.table import TIMED
from jaxunet.runtime import rows
from jaxunet.runtime.rows import Row
from tools.docs.recipe_tables import FOLDER, all_of, measured_with

ROWS = FOLDER.parent / 'kernels/peers.jsonl'
FIRST, *OTHERS = TIMED  # the CUDA kernels, and what their times are compared with
LIBRARIES = ('torch', 'nvidia-cudnn-cu13')


def cases(found: Iterable[Row]) -> list[Row]:
    """Returns one row for each measurement.

    Args:
      found: rows of `jaxunet.benchmark.kernels`. To save bytes, one row may hold all shapes of an
        op and direction: its field `cases` has the times of each.
    """
    return [
        row | {'case': case} | times
        for row in found
        for case, times in row.get('cases', {row.get('case'): {}}).items()
    ]


def time(row: Row, side: str) -> float:
    """Returns the microseconds of a side; 0 if it has none."""
    return row.get(f'us_{side}') or 0.0


def beside(measured: Sequence[Row]) -> str:
    """Returns Markdown: the CUDA kernels' time, and the others' as multiples of it.

    Attention has a line for each shape. A line of another op sums the shapes that have the times of
    all sides that the op has.

    Args:
      measured: one row for each measurement, with times `us_SIDE`. Sides may be missing.
    """
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in measured:
        groups.setdefault((row['op'], row['direction'], row['batch']), []).append(row)
    sides = [side for side in OTHERS if any(time(row, side) for row in measured)]
    body = []
    for (op, direction, batch), mine in groups.items():
        needed = [side for side in sides if any(time(row, side) for row in mine)]
        whole = [row for row in mine if all(time(row, side) for side in needed)]
        lines = {f'{len(whole)} of {len(mine)}': whole}
        if op == 'attention':
            lines = {row['case']: [row] for row in mine}
        for shape, summed in lines.items():
            us = {side: [time(row, side) for row in summed] for side in (FIRST, *sides)}
            own = sum(us[FIRST])
            ratios = (f'{sum(us[s]) / own:.2f}' if all(us[s]) else '–' for s in sides)
            body.append((op, direction, str(batch), shape, f'{own:.1f}', *ratios))
    head = ('op', 'direction', 'batch', 'shapes', f'{TIMED[FIRST]}, µs')
    table = markdown.table((*head, *(f'{TIMED[side]} / CUDA' for side in sides)), body)
    libraries = ', '.join(
        dict.fromkeys(f'{name} {row["versions"][name]}' for name in LIBRARIES for row in measured)
    )
    types = all_of(measured, operator.itemgetter('dtype'))
    return f'{table}\n\n{measured_with(measured)}; {libraries}; {types}.'


def beside_libraries() -> str:
    """The table of the committed rows."""
    return beside(cases(rows.read(ROWS)))
