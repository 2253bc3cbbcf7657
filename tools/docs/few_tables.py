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
TEACHER, ADAMW, MUON = 'teacher', 'tuned', 'muon-'  # rate and seconds follow the last
FID = value('train', 'fid')
METRICS = [COLUMNS[name] for name in ('fid', 'kid', 'precision', 'recall', 'copies')]
RATE = 'optimizer.learning_rate'


def kind(row: Row) -> str:
    """Returns TEACHER, ADAMW or MUON."""
    return MUON if row['case'].startswith(MUON) else row['case']


def chosen(rows: Sequence[Row]) -> list[Row]:
    """Returns rows of one set, of tunings by Muon only those with the rate of the longest.

    Of several such rates, it is the best in two evaluations.
    """
    tunings = [row for row in rows if kind(row) == MUON]
    best = min(
        (row for row in tunings if row['evaluations'] == 2),
        key=lambda row: (-row['seconds'], FID(row)),
        default=None,
    )
    rate = best and best['fields'][RATE]
    return [row for row in rows if row not in tunings or row['fields'][RATE] == rate]


def tuning(row: Row) -> str:
    """Returns the optimizer, the rate and q of a tuning."""
    rate = f'{row["fields"][RATE]:.1e}'.replace('.0e-0', 'e-').replace('e-0', 'e-')
    if kind(row) == MUON:
        return f'Muon, {rate} falling'
    return f'AdamW, {rate}, q = {row["fields"]["diffusion.consistency_q"]}'


def quality(every: Sequence[Row]) -> str:
    """Teachers and their tuned models: by images, optimizer, seconds and evaluations."""
    if not every:
        return NOTHING
    sets = list(dict.fromkeys(row['data'] for row in every))
    by_set = {name: chosen([row for row in every if row['data'] == name]) for name in sets}
    mine = [row for rows in by_set.values() for row in rows]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in mine:
        order = (TEACHER, MUON, ADAMW).index(kind(row))
        key = (sets.index(row['data']), order, row['seconds'], -row['evaluations'])
        groups.setdefault(key, []).append(row)
    body = []
    for (place, order, seconds, evaluations), rows in sorted(groups.items()):
        heun = [r for r in by_set[sets[place]] if r['sampler'] == 'heun:25']
        ratio = ''
        if order and heun:
            ratio = f'{np.mean([FID(r) for r in rows]) / FID(heun[0]):.2f}'
        body.append(
            (
                sets[place],
                f'{seconds:g} s of tuning' if order else f'teacher, {seconds:g} s',
                all_of(rows, tuning if order else lambda row: row['sampler'].replace(':', ' ')),
                str(-evaluations),
                str(len(rows)),
                all_of(rows, lambda row: f'{row["step"]:,}') if len(rows) == 1 else steps(rows),
                *(text(rows) for _, text in METRICS),
                ratio,
                spread(rows, value('train', 'fid', 'judged')),
                spread(rows, lambda row: 1 / row.get('seconds_per_sample', np.nan)),
            )
        )
    head = ('images', 'model', 'sampler or tuning', 'evaluations', 'seeds', 'steps')
    titles = [title for title, _ in METRICS]
    table = markdown.table((*head, *titles, 'of Heun 25', 'by the judge', 'images/s'), body)
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


def rates(every: Sequence[Row]) -> str:
    """The shortest tunings by Muon: Fréchet distance by rate, evaluations and average."""
    tunings = [row for row in every if (kind(row), row['seed']) == (MUON, 0)]
    if not tunings:
        return NOTHING
    shortest = min(row['seconds'] for row in tunings)
    mine = [row for row in tunings if row['seconds'] == shortest]
    groups: dict[tuple[str, float], dict[int, Row]] = {}
    for row in mine:
        groups.setdefault((row['data'], row['fields'][RATE]), {})[row['evaluations']] = row
    averages = list(mine[0]['average_fid'])
    body = [
        (
            data,
            f'{rate:g}',
            f'{rows[2]["step"]:,}',
            rows[2]['average'],
            *(spread([rows[n]], FID) if n in rows else '' for n in (1, 2, 4)),
            *(markdown.number(rows[2]['average_fid'][name], 3) for name in averages),
        )
        for (data, rate), rows in sorted(groups.items())
    ]
    head = ('images', 'rate', 'steps', 'average', '1 evaluation', '2', '4')
    table = markdown.table((*head, *(f'2, average {name}' for name in averages)), body)
    features = all_of(mine, operator.itemgetter('features'))
    return f'{table}\n\n{measured_with(mine)}; {shortest:g} s of tuning, features\n{features}.'


TABLES: dict[str, Callable[[], str]] = {
    'few_steps': lambda: quality(read(FOLDER)),
    'few_steps_rates': lambda: rates(read(FOLDER)),
}
