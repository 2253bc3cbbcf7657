"""The tables of docs/results/few_steps, from the rows of its measure.py."""

from __future__ import annotations

import operator
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from support import markdown

from jaxunet.runtime.rows import Row
from tools.docs.recipe_tables import COLUMNS, NOTHING, all_of, measured_with, read, spread, value

FOLDER = pathlib.Path(__file__).parents[2] / 'docs/results/few_steps'
TEACHER = 'teacher'
FID = value('train', 'fid')
METRICS = [COLUMNS[name] for name in ('fid', 'kid', 'precision', 'recall', 'copies')]
RATE = 'optimizer.learning_rate'


def quality(every: Sequence[Row]) -> str:
    """Teachers and their tuned models: by images, seconds, rate and evaluations."""
    if not every:
        return NOTHING
    sets = list(dict.fromkeys(row['data'] for row in every))
    by_set = {name: [row for row in every if row['data'] == name] for name in sets}
    groups: dict[tuple[int, bool, float, str, int], list[Row]] = {}
    for row in every:
        tuned = row['case'] != TEACHER
        key = (sets.index(row['data']), tuned, row['seconds'], row['case'], -row['evaluations'])
        groups.setdefault(key, []).append(row)
    body = []
    for (place, tuned, seconds, _, evaluations), rows in sorted(groups.items()):
        heun = [r for r in by_set[sets[place]] if r['sampler'] == 'heun:25']
        ratio = ''
        if tuned and heun:
            ratio = f'{np.mean([FID(r) for r in rows]) / FID(heun[0]):.2f}'
        body.append(
            (
                sets[place],
                f'{seconds:g} s of tuning' if tuned else f'teacher, {seconds:g} s',
                all_of(rows, rate if tuned else lambda row: row['sampler'].replace(':', ' ')),
                str(-evaluations),
                str(len(rows)),
                steps(rows),
                *(text(rows) for _, text in METRICS),
                ratio,
                spread(rows, value('train', 'fid', 'judged')),
            )
        )
    head = ('images', 'model', 'sampler or rate', 'evaluations', 'seeds', 'steps')
    titles = [title for title, _ in METRICS]
    table = markdown.table((*head, *titles, 'of Heun 25', 'by the judge'), body)
    samples = '; '.join(
        f'{name}: {all_of(rows, operator.itemgetter("num_samples"))} samples, '
        f'{all_of(rows, operator.itemgetter("features"))}'
        for name, rows in by_set.items()
    )
    judged = [row for row in every if 'judge' in row]
    judge = f'; judge: {all_of(judged, operator.itemgetter("judge"))}' if judged else ''
    return f'{table}\n\n{measured_with(every)}; {samples}{judge}.'


def rate(row: Row) -> str:
    """The learning rate with which a tuning begins."""
    return f'{row["fields"][RATE]:.1e}'.replace('.0e-0', 'e-').replace('e-0', 'e-')


def steps(rows: Sequence[Row]) -> str:
    """The smallest and largest number of steps."""
    found = [row['step'] for row in rows]
    return f'{min(found):,} to {max(found):,}' if min(found) < max(found) else f'{found[0]:,}'


TABLES: dict[str, Callable[[], str]] = {
    'few_steps': lambda: quality(read(FOLDER)),
}
