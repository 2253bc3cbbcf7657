"""The tables of docs/results/recipes, from the rows of `python -m jaxunet.compare.queue`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from jaxunet.compare.results import time_to
from jaxunet.runtime.rows import Row
from support import markdown

FOLDER = pathlib.Path(__file__).parents[2] / 'docs/results/recipes'
LIMITS = (50, 20)  # evaluations of the network a sample
BASELINE = 'epsilon-linear'
NOTHING = 'Nothing is measured yet.'
PICTURES = {
    'quality.png': 'quality against seconds of training',
    'objects.jpg': 'unpicked samples by objective and seconds of training, 9,000 photographs',
    'elephants.jpg': 'unpicked samples by objective and seconds of training, 500 elephants',
    'overfitting.png': 'held-out loss and copies against seconds of training',
}
Find = Callable[[Row], float]


def read(folder: pathlib.Path = FOLDER, name: str = 'rows.jsonl') -> list[Row]:
    """The rows, of which a later one replaces an earlier one of the same checkpoint and sampler."""
    path = folder / name
    lines = path.read_text().splitlines() if path.exists() else []
    found = {}
    for row in map(json.loads, lines):
        found[row['data'], row['case'], row['seed'], row['seconds'], row['sampler']] = row
    return list(found.values())


def earlier() -> list[Row]:
    """The rows of runs whose processes had the GPU alone, with features that are not kept."""
    return read(name='earlier.jsonl')


def best(found: Sequence[Row], limit: int, metric: str) -> list[Row]:
    """The rows of the sampler with the smallest mean metric within a number of evaluations.

    A sampler counts if it has drawn from as many seeds as any other.
    """
    by_sampler: dict[str, list[Row]] = {}
    for row in found:
        if row['evaluations'] <= limit:
            by_sampler.setdefault(row['sampler'], []).append(row)
    most = max(map(len, by_sampler.values()), default=0)
    return min(
        (rows for rows in by_sampler.values() if len(rows) == most),
        key=lambda rows: np.mean([row['values']['train'][metric] for row in rows]),
        default=[],
    )


def groups(found: Sequence[Row], data: str) -> dict[tuple[str, float], list[Row]]:
    """Rows by (case, seconds), in the order of the cases and then of time."""
    mine = [row for row in found if row['data'] == data]
    cases = list(dict.fromkeys(row['case'] for row in mine))
    if BASELINE in cases:
        cases.remove(BASELINE)
        cases.insert(0, BASELINE)
    keys = sorted(
        {(row['case'], row['seconds']) for row in mine}, key=lambda k: (cases.index(k[0]), k[1])
    )
    return {key: [r for r in mine if (r['case'], r['seconds']) == key] for key in keys}


def value(reference: str, metric: str) -> Find:
    """Reads a metric of a row."""
    return lambda row: row['values'].get(reference, {}).get(metric, np.nan)


def spread(rows: Sequence[Row], find: Find, digits: int = 3, factor: float = 1) -> str:
    """Mean over seeds, and half their range where there are several."""
    values = [factor * find(row) for row in rows]
    if not values or np.isnan(values).any():
        return ''
    text = markdown.number(float(np.mean(values)), digits)
    half = (max(values) - min(values)) / 2
    return text if len(values) == 1 else f'{text} ± {markdown.number(half, 2)}'


def objectives(found: Sequence[Row]) -> str:
    """Quality by objective, seconds and evaluations, on 9,000 photographs."""
    body = []
    for (case, seconds), group in groups(found, 'objects64').items():
        for limit in LIMITS:
            rows = best(group, limit, 'fid')
            if rows:
                body.append(
                    (
                        case,
                        f'{seconds:g}',
                        str(limit),
                        f'{rows[0]["sampler"].replace(":", " ")}',
                        str(len(rows)),
                        f'{np.mean([row["step"] for row in rows]):,.0f}',
                        spread(rows, value('train', 'fid')),
                        spread(rows, value('train', 'kid'), factor=1e3),
                        spread(rows, value('test', 'kid'), factor=1e3),
                        spread(rows, value('train', 'precision')),
                        spread(rows, value('train', 'recall')),
                        spread(rows, value('train', 'copies')),
                    )
                )
    head = (
        'objective',
        's',
        'evaluations at most',
        'best sampler',
        'seeds',
        'steps',
        'Fréchet distance',
        'kernel distance · 10³',
        'to test images · 10³',
        'precision',
        'recall',
        'copies',
    )
    return with_origin(head, body, found, 'objects64')


def sampling_times(found: Sequence[Row]) -> str:
    """Milliseconds a sample by sampler, of the rows whose process had the device alone."""
    mine = [r for r in found if r['data'] == 'objects64' and 'seconds_per_sample' in r]
    body = []
    for sampler in dict.fromkeys(row['sampler'] for row in mine):
        rows = [row for row in mine if row['sampler'] == sampler]
        times = [1e3 * row['seconds_per_sample'] for row in rows]
        body.append(
            (
                sampler.replace(':', ' '),
                str(rows[0]['evaluations']),
                f'{np.mean(times):.2f}',
                f'{min(times):.2f}-{max(times):.2f}',
            )
        )
    return with_origin(('sampler', 'evaluations', 'ms a sample', 'range'), body, mine, 'objects64')


def sooner(found: Sequence[Row]) -> str:
    """Seconds that each objective needs for the quality of the baseline's last checkpoint."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for (case, _), group in groups(found, 'objects64').items():
        rows = best(group, LIMITS[0], 'fid')
        points = [(row['training_seconds'], row['values']['train']['fid']) for row in rows]
        if points:
            curves.setdefault(case, []).append(tuple(np.mean(points, axis=0)))
    if BASELINE not in curves:
        return NOTHING
    longest, target = curves[BASELINE][-1]
    body = []
    for case, points in curves.items():
        seconds, values = np.array(points).T
        when = time_to(target, seconds, values, higher=False)
        bound = '≤ ' if when == seconds[0] and case != BASELINE else ''
        shown = f'{bound}{when:.0f}' if np.isfinite(when) else f'not in {seconds[-1]:.0f}'
        ratio = f'{"≥ " if bound else ""}{longest / when:.1f}' if np.isfinite(when) else ''
        body.append((case, shown, ratio))
    head = (
        'objective',
        f's to a Fréchet distance of {target:.3g} ({BASELINE} after {longest:.0f} s)',
        'times sooner',
    )
    return markdown.table(head, body)


def elephants(found: Sequence[Row]) -> str:
    """Quality and copies by objective and seconds, on 500 photographs."""
    body = []
    for (case, seconds), group in groups(found, 'elephants64').items():
        rows = best(group, LIMITS[0], 'kid')
        if rows:
            body.append(
                (
                    case,
                    f'{seconds:g}',
                    f'{np.mean([row["step"] for row in rows]):,.0f}',
                    rows[0]['sampler'].replace(':', ' '),
                    spread(rows, value('train', 'kid'), factor=1e3),
                    spread(rows, value('train', 'precision')),
                    spread(rows, value('train', 'recall')),
                    spread(rows, value('train', 'copies')),
                )
            )
    head = ('objective', 's', 'steps', 'sampler', 'kernel distance · 10³', 'precision', 'recall')
    return with_origin((*head, 'copies'), body, found, 'elephants64')


def pictures(folder: pathlib.Path = FOLDER) -> str:
    """Markdown of the pictures that are there."""
    found = [
        f'![{text}](results/recipes/{name})'
        for name, text in PICTURES.items()
        if (folder / name).exists()
    ]
    return '\n\n'.join(found) or NOTHING


def with_origin(
    head: Sequence[str], body: Sequence[Sequence[str]], found: Sequence[Row], data: str
) -> str:
    """A table and a line that says what its rows were measured with."""
    if not body:
        return NOTHING
    mine = [row for row in found if row['data'] == data]

    def all_of(find: Callable[[Row], object]) -> str:
        return ', '.join(dict.fromkeys(str(find(row)) for row in mine))

    references = '; '.join(
        dict.fromkeys(
            ', '.join(f'{count:,} {name}' for name, count in row['references'].items())
            for row in mine
        )
    )
    return (
        f'{markdown.table(head, body)}\n\n'
        f'{all_of(lambda r: r["device"])}, jax {all_of(lambda r: r["versions"]["jax"])}, commit '
        f'{all_of(lambda r: r["git"])}; {all_of(lambda r: r["num_samples"])} samples,\nbatches of '
        f'{all_of(lambda r: r["batch_size"])}; images to compare with: {references}; features '
        f'{all_of(lambda r: r["features"])}.'
    )
