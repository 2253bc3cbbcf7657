"""The tables of runs that faults interrupt, from the rows of `tools/faults/run.py`, and of long
ones.
"""

from __future__ import annotations

import collections
import operator
import pathlib
from collections.abc import Callable

from support import markdown

from jaxunet.runtime import rows
from jaxunet.runtime.rows import Row
from tools.docs import soak_table
from tools.docs.recipe_tables import all_of

ROWS = pathlib.Path(__file__).parents[2] / 'docs/results/faults/rows.jsonl'
HEAD = (
    'what happened',
    'runs',
    'faults',
    'started from less than the last checkpoint',
    'runs with other bits',
    'tracebacks',
    'runs with anything else wrong',
)
SHOWN = {  # kinds of cases
    'killed': 'training killed at any moment, up to six times',
    'healed': 'training with `--restarts` killed at any moment',
    'sampling killed': '`jaxunet.sample` killed at any moment, up to three times',
    'process killed': 'one of two processes killed at any stage, up to twice',
    'signalled': 'SIGTERM, SIGINT, or two of them',
    'memory full': 'a device without memory, at any stage',
    'full disk': 'a full disk',
    'read-only disk': 'a read-only disk at a start',
    'folder removed': 'a folder of the run removed under it',
    'clock jumped': 'a wall clock that jumps by years, and a kill',
}


def table() -> str:
    """Runs by what happened to them, for every platform and backend; then the kills by stage."""
    newest = {(r['platform'], r['backend'], r['seed'], r['kind']): r for r in rows.read(ROWS)}
    parts = []
    for place in dict.fromkeys((row['platform'], row['backend']) for row in newest.values()):
        here = [row for row in newest.values() if (row['platform'], row['backend']) == place]
        parts.append(_of_a_place(place, here))
    return '\n\n'.join(parts)


def _of_a_place(place: tuple[str, str], rows: list[Row]) -> str:
    by_kind = {shown: [row for row in rows if row['kind'] == kind] for kind, shown in SHOWN.items()}
    body = [[shown, *_counts(of_kind)] for shown, of_kind in by_kind.items() if of_kind]
    stages = collections.Counter(s for r in rows if r['kind'] == 'killed' for s in r['faults'])
    kills = ', '.join(f'{stage} {count}' for stage, count in stages.most_common())
    commits = all_of(rows, operator.itemgetter('git'))
    return (
        f'{rows[-1]["device"]}, `backend={place[1]}`, jax {rows[-1]["versions"]["jax"]}, '
        f'commits {commits}; kills of training by stage: {kills}.\n\n'
        + markdown.table(HEAD, [*body, ['all', *_counts(rows)]])
    )


def _counts(rows: list[Row]) -> list[str]:
    counted: list[Callable[[Row], int]] = [
        lambda row: 1,
        lambda row: len(row['faults']),
        lambda row: row['lost'],
        lambda row: bool(row['differences']),
        lambda row: row['tracebacks'],
        lambda row: bool(row['unexpected']) and not (row['lost'] or row['tracebacks']),
    ]
    return [f'{sum(map(count, rows)):,}' for count in counted]


TABLES: dict[str, Callable[[], str]] = {'faults': table, 'soak': soak_table.table}
