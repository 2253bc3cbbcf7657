"""The tables of docs/results/widths, from the rows of its measure.py."""

from __future__ import annotations

import operator
import pathlib
from collections.abc import Callable, Sequence

from support import markdown

from jaxunet.runtime.rows import Row
from tools.docs.recipe_tables import NOTHING, all_of, json_lines, measured_with, spread

FOLDER = pathlib.Path(__file__).parents[2] / 'docs/results/widths'
# Title by the beginning of the metric's name, and a factor.
METRICS = {
    'frechet_distance': ('Fréchet distance', 1.0),
    'kernel_distance': ('kernel distance · 10³', 1e3),
    'precision': ('precision', 1.0),
    'recall': ('recall', 1.0),
}


def read(folder: pathlib.Path = FOLDER) -> list[Row]:
    """The rows of the file; none if it does not exist."""
    return json_lines(folder / 'rows.jsonl')


def quality(every: Sequence[Row]) -> str:
    """Metrics by schedule and average: widths in ascending order, rates, the last weights."""
    mine = [row for row in every if 'metric' in row]
    if not mine:
        return NOTHING
    schedules = list(dict.fromkeys(row['schedule'] for row in mine))
    averages = sorted(
        {
            (schedules.index(r['schedule']), r['width'] is None, r['width'] or 0.0, r['ema'])
            for r in mine
        }
    )
    body = []
    for schedule, _, _, ema in averages:
        rows = [r for r in mine if (r['schedule'], r['ema']) == (schedules[schedule], ema)]
        cells = []
        for metric, (_, factor) in METRICS.items():
            some = [row for row in rows if row['metric'].startswith(metric)]
            cells.append(spread(some, operator.itemgetter('value'), factor=factor))
        body.append((schedules[schedule], name_of(rows[0]), *cells))
    seeds = len({row['seed'] for row in mine})
    samples, features = (
        all_of(mine, operator.itemgetter(name)) for name in ('num_samples', 'features')
    )
    table = markdown.table(
        ('learning rate', 'average', *(title for title, _ in METRICS.values())), body
    )
    return f'{table}\n\n{measured_with(mine)}; {seeds} seeds, {samples} samples each, {features}.'


def name_of(row: Row) -> str:
    """Returns the name of an average in the table."""
    if row['width'] is not None:
        return f'width {row["width"]:g}'
    return 'none' if row['ema'] == 'none' else f'rate {row["ema"]}'


def picture(folder: pathlib.Path = FOLDER) -> str:
    """Markdown of the plot, if it is there."""
    if not (folder / 'widths.png').exists():
        return NOTHING
    return '![metrics against the width of the average](results/widths/widths.png)'


TABLES: dict[str, Callable[[], str]] = {
    'widths_quality': lambda: quality(read()),
    'widths_picture': picture,
}
