"""The tables of docs/results/few_steps, from the rows of its measure.py."""

from __future__ import annotations

import operator
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from support import markdown

from jaxunet.runtime.rows import Row
from tools.docs.recipe_tables import NOTHING, all_of, measured_with, read, spread, value

FOLDER = pathlib.Path(__file__).parents[2] / 'docs/results/few_steps'
TEACHER, TUNED = 'teacher', ('tuned', 'tuned_q64')
MUON = 'muon-'  # the seconds of the run follow
FID = value('train', 'fid')
# Title by metric, and a factor.
METRICS = {
    'fid': ('Fréchet distance', 1.0),
    'kid': ('kernel distance · 10³', 1e3),
    'precision': ('precision', 1.0),
    'recall': ('recall', 1.0),
    'copies': ('copies', 1.0),
}
SETTINGS = {
    'q': 'diffusion.consistency_q',
    'rate': 'optimizer.learning_rate',
    'dropout': 'model.dropout',
}


def is_short(row: Row) -> bool:
    """Returns True for a row of a short tuning, which chose settings."""
    return row['case'] not in (TEACHER, *TUNED) and not row['case'].startswith(MUON)


def q_of(row: Row) -> str:
    """Returns q of a tuning, of its first and last stage, and the optimizer if it is Muon."""
    fields = row['fields']
    first, stages = fields[SETTINGS['q']], fields.get('diffusion.consistency_stages', 1)
    text = str(first) if stages == 1 else f'{first} to {first**stages}'
    return f'{text}, Muon' if row['case'].startswith(MUON) else text


def quality(every: Sequence[Row]) -> str:
    """Teachers and their tuned models: by images, seconds of tuning and evaluations."""
    mine = [row for row in every if not is_short(row)]
    if not mine:
        return NOTHING
    sets = list(dict.fromkeys(row['data'] for row in mine))
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in mine:
        place = sets.index(row['data'])
        case = MUON if row['case'].startswith(MUON) else row['case']
        key = (place, case == MUON, case != TEACHER, case, row['seconds'], -row['evaluations'])
        groups.setdefault(key, []).append(row)
    body = []
    for (place, _, tuned, _, seconds, evaluations), rows in sorted(groups.items()):
        heun = [r for r in mine if (r['data'], r['sampler']) == (sets[place], 'heun:25')]
        ratio = ''
        if tuned and heun:
            ratio = f'{np.mean([FID(r) for r in rows]) / FID(heun[0]):.2f}'
        name = all_of(rows, lambda row: row['sampler'].replace(':', ' '))
        body.append(
            (
                sets[place],
                f'{seconds:g} s of tuning' if tuned else f'teacher, {seconds:g} s',
                q_of(rows[0]) if tuned else name,
                str(-evaluations),
                str(len(rows)),
                all_of(rows, lambda row: f'{row["step"]:,}') if len(rows) == 1 else steps(rows),
                *(
                    spread(rows, value('train', m), factor=factor)
                    for m, (_, factor) in METRICS.items()
                ),
                ratio,
                spread(rows, value('train', 'fid', 'judged')),
                spread(rows, lambda row: 1 / row.get('seconds_per_sample', np.nan)),
            )
        )
    head = ('images', 'model', 'sampler or q', 'evaluations', 'seeds', 'steps')
    titles = [title for title, _ in METRICS.values()]
    table = markdown.table((*head, *titles, 'of Heun 25', 'by the judge', 'images/s'), body)
    by_set = {name: [row for row in mine if row['data'] == name] for name in sets}
    samples = '; '.join(
        f'{name}: {all_of(rows, operator.itemgetter("num_samples"))} samples, '
        f'{all_of(rows, operator.itemgetter("features"))}'
        for name, rows in by_set.items()
    )
    judged = [row for row in mine if 'judge' in row]
    judge = f'; judge: {all_of(judged, operator.itemgetter("judge"))}' if judged else ''
    return f'{table}\n\n{measured_with(mine)}; {samples}{judge}.'


def steps(rows: Sequence[Row]) -> str:
    """The smallest and largest number of steps."""
    found = [row['step'] for row in rows]
    return f'{min(found):,} to {max(found):,}' if min(found) < max(found) else f'{found[0]:,}'


def screening(every: Sequence[Row]) -> str:
    """The short tunings, the best first: Fréchet distance by evaluations and average."""
    mine = [row for row in every if is_short(row)]
    groups: dict[tuple[str, str], dict[int, Row]] = {}
    for row in mine:
        groups.setdefault((row['data'], row['case']), {})[row['evaluations']] = row
    if not groups:
        return NOTHING
    averages = list(next(iter(mine))['average_fid'])
    body = []
    ordered = sorted(groups.values(), key=lambda rows: (rows[2]['data'], FID(rows[2])))
    for rows in ordered:
        first = rows[2]
        body.append(
            (
                first['data'],
                *(f'{first["fields"][path]:.2g}' for path in SETTINGS.values()),
                f'{first["step"]:,}',
                first['average'],
                *(spread([rows[n]], FID) if n in rows else '' for n in (1, 2, 4)),
                *(markdown.number(first['average_fid'][name], 3) for name in averages),
            )
        )
    head = ('images', *SETTINGS, 'steps', 'average', '1 evaluation', '2', '4')
    table = markdown.table((*head, *(f'2, average {name}' for name in averages)), body)
    samples, features, seconds = (
        all_of(mine, operator.itemgetter(name)) for name in ('num_samples', 'features', 'seconds')
    )
    return (
        f'{table}\n\n{measured_with(mine)}; {seconds} s of tuning, {samples} samples, features\n'
        f'{features}.'
    )


TABLES: dict[str, Callable[[], str]] = {
    'few_steps': lambda: quality(read(FOLDER)),
    'few_steps_screening': lambda: screening(read(FOLDER)),
}
