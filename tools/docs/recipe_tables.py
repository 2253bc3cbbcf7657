"""The tables of docs/results/recipes, from the rows of `python -m jaxunet.compare.queue`."""

from __future__ import annotations

import json
import operator
import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from support import markdown

from jaxunet.runtime.rows import Row

FOLDER = pathlib.Path(__file__).parents[2] / 'docs/results/recipes'
DIGITS = FOLDER.parent / 'digits'
LIMIT = 50  # most evaluations of the network for a sample
BASELINE = 'epsilon-linear'
FEW = ('flow', 'v-cosine')  # objectives that the table of few images shows
NOTHING = 'Nothing is measured yet.'
GRIDS = {  # data set -> caption of its grids
    'objects64': 'Samples of the 9,000 photographs, not selected:',
    'elephants64': 'Samples of the 500 elephants, not selected:',
}
Find = Callable[[Row], float]


def json_lines(path: pathlib.Path) -> list[Row]:
    """The rows of a file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read(folder: pathlib.Path = FOLDER, name: str = 'rows.jsonl') -> list[Row]:
    """The rows of a file; later ones replace earlier ones of the same checkpoint and sampler."""
    key = operator.itemgetter('data', 'case', 'seed', 'seconds', 'sampler')
    return list({key(row): row for row in json_lines(folder / name)}.values())


def best(every: Sequence[Row], limit: int, metric: str) -> list[Row]:
    """The rows of the sampler with the smallest mean metric within a number of evaluations.

    Only samplers with rows for the largest number of seeds count.
    """
    by_sampler: dict[str, list[Row]] = {}
    for row in every:
        if row['evaluations'] <= limit:
            by_sampler.setdefault(row['sampler'], []).append(row)
    most = max(map(len, by_sampler.values()), default=0)
    return min(
        (rows for rows in by_sampler.values() if len(rows) == most),
        key=lambda rows: np.mean([row['values']['train'][metric] for row in rows]),
        default=[],
    )


def groups(rows: Sequence[Row], data: str) -> dict[tuple[str, float], list[Row]]:
    """Rows by (case, seconds), in the order of the cases and then of time.

    Raises:
      ValueError: the distances come from several feature networks, so they do not compare.
    """
    mine = [row for row in rows if row['data'] == data]
    features = {row['features'] for row in mine}
    if len(features) > 1:
        raise ValueError(f'{data}: rows of several features: {", ".join(sorted(features))}')
    cases = cases_of(mine)
    keys = sorted(
        {(row['case'], row['seconds']) for row in mine}, key=lambda k: (cases.index(k[0]), k[1])
    )
    return {key: [r for r in mine if (r['case'], r['seconds']) == key] for key in keys}


def cases_of(rows: Sequence[Row]) -> list[str]:
    """The cases of rows, each once: the baseline first, the others in the order of the rows."""
    return sorted(dict.fromkeys(row['case'] for row in rows), key=lambda case: case != BASELINE)


def value(reference: str, metric: str, network: str = 'values') -> Find:
    """Returns a function that reads a metric of a row; `judged` are those of the judge."""
    return lambda row: row.get(network, {}).get(reference, {}).get(metric, np.nan)


def spread(rows: Sequence[Row], find: Find, digits: int = 3, factor: float = 1) -> str:
    """Mean over seeds, and half their range where there are several."""
    values = [factor * find(row) for row in rows]
    if not values or np.isnan(values).any():
        return ''
    text = markdown.number(float(np.mean(values)), digits)
    half = (max(values) - min(values)) / 2
    return text if len(values) == 1 else f'{text} ± {markdown.number(half, 2)}'


# A column: its title, and its text for the rows of a line.
Column = tuple[str, Callable[[Sequence[Row]], str]]


def metric(title: str, find: Find, factor: float = 1) -> Column:
    """A column with the `spread` of a number."""
    return title, lambda rows: spread(rows, find, factor=factor)


COLUMNS: dict[str, Column] = {
    'seeds': ('seeds', lambda rows: str(len(rows))),
    'sampler': ('sampler', lambda rows: rows[0]['sampler'].replace(':', ' ')),
    'evaluations': ('evaluations', lambda rows: str(rows[0]['evaluations'])),
    'average': ('average', lambda rows: all_of(rows, operator.itemgetter('average'))),
    'steps': ('steps', lambda rows: all_of(rows, lambda row: f'{row["step"]:,}')),
    'mean steps': ('steps', lambda rows: f'{np.mean([row["step"] for row in rows]):,.0f}'),
    'fid': metric('Fréchet distance', value('train', 'fid')),
    'kid': metric('kernel distance · 10³', value('train', 'kid'), 1e3),
    'test kid': metric('to test images · 10³', value('test', 'kid'), 1e3),
    **{name: metric(name, value('train', name)) for name in ('precision', 'recall', 'copies')},
    'seen': metric(
        'loss on training images', lambda row: row.get('losses', {}).get('seen_loss', np.nan)
    ),
    'held out': metric(
        'on held-out images', lambda row: row.get('losses', {}).get('held_out_loss', np.nan)
    ),
    'judged': (
        'by the judge',
        lambda rows: spread(
            [row for row in rows if 'judge' in row], value('train', 'fid', 'judged')
        ),
    ),
}
Lines = Sequence[tuple[Sequence[str], Sequence[Row]]]  # first cells of each line, and its rows


def table(head: Sequence[str], lines: Lines, columns: Sequence[str]) -> str:
    """A table of the first cells under `head`, and these `COLUMNS`."""
    body = [(*cells, *(COLUMNS[name][1](rows) for name in columns)) for cells, rows in lines]
    return markdown.table((*head, *(COLUMNS[name][0] for name in columns)), body)


def objectives(every: Sequence[Row]) -> str:
    """Quality by objective and seconds, on 9,000 photographs; each with its best sampler."""
    lines = [
        ((case, f'{seconds:g}', rows[0]['sampler'].replace(':', ' ')), rows)
        for (case, seconds), group in groups(every, 'objects64').items()
        if (rows := best(group, LIMIT, 'fid'))
    ]
    columns = ('seeds', 'mean steps', 'fid', 'kid', 'test kid', 'precision', 'recall', 'copies')
    return with_origin(('objective', 's', 'best sampler'), lines, columns, every, 'objects64')


def digits(every: Sequence[Row]) -> str:
    """Quality by objective and sampler after the last step, on the embedded digits."""
    last = {case: group for (case, _), group in groups(every, 'digits').items()}
    lines = [
        ((case,), [row for row in group if row['sampler'] == sampler])
        for case, group in last.items()
        for sampler in dict.fromkeys(row['sampler'] for row in group)
    ]
    columns = ('steps', 'sampler', 'evaluations', 'seeds', 'fid', 'kid', 'precision', 'recall')
    return with_origin(('objective',), lines, columns, every, 'digits')


def elephants(every: Sequence[Row]) -> str:
    """Quality, copies and held-out loss of `FEW` by seconds, on 500 photographs.

    Each with the sampler of the smallest kernel distance.
    """
    every = [row for row in every if row['case'].removesuffix('-augmented') in FEW]
    lines = [
        ((case, f'{seconds:g}'), best(group, LIMIT, 'kid'))
        for (case, seconds), group in groups(every, 'elephants64').items()
    ]
    columns = ('mean steps', 'sampler', 'kid', 'precision', 'recall', 'copies', 'seen', 'held out')
    return with_origin(('objective', 's'), lines, columns, every, 'elephants64')


def endings(folder: pathlib.Path = FOLDER) -> str:
    """Quality by images, seconds and ending, and the samples of two of them.

    The judge's distance is the mean over the seeds that it has judged.
    """
    every = read(folder, 'endings.jsonl')
    if not every:
        return NOTHING
    lines = [
        ((data, f'{seconds:g}', case.removesuffix(f'-{seconds:g}s')), rows)
        for data in sorted({row['data'] for row in every}, reverse=True)
        for (case, seconds), rows in sorted(groups(every, data).items(), key=lambda g: g[0][1])
    ]
    columns = ('seeds', 'steps', 'average', 'fid', 'judged', 'kid', 'test kid')
    columns += ('precision', 'recall', 'copies')
    judged = [row for row in every if 'judge' in row]
    names = [f'features {all_of(every, operator.itemgetter("features"))}']
    names += [f'judge {all_of(judged, operator.itemgetter("judge"))}'] if judged else []
    origin = '; '.join([measured_with(every), *names])
    text = f'{table(("images", "s", "ending"), lines, columns)}\n\n{origin}.'
    if (folder / 'endings.jpg').exists():
        text += (
            '\n\n![objects64 after 180 s: constant-1 on the left, linear-4 on the right]'
            '(results/recipes/endings.jpg)'
        )
    return text


def pictures(folder: pathlib.Path = FOLDER) -> str:
    """Markdown of the existing plots and grids, each with the run that it shows."""
    kept = origins(folder)
    parts = []
    if (folder / 'quality.png').exists():
        parts.append('![quality against seconds of training](results/recipes/quality.png)')
    for data, title in GRIDS.items():
        table = grids([o for o in kept if o['data'] == data and o['file'].startswith('grids/')])
        parts += [title, table] if table else []
    if (folder / 'overfitting.png').exists():
        runs = [row for row in read(folder) if row['data'] == 'elephants64']
        runs += [origin for origin in kept if origin['file'].startswith('logs/')]
        parts.append(
            '![held-out loss and copies against seconds of training]'
            f'(results/recipes/overfitting.png)\n\nThe elephants: {measured_with(runs)}.'
        )
    return '\n\n'.join(parts) or NOTHING


def origins(folder: pathlib.Path = FOLDER) -> list[Row]:
    """The runs of the grids and logs that are kept, a row for each file."""
    return json_lines(folder / 'pictures.jsonl')


def grids(kept: Sequence[Row]) -> str:
    """Grids by case and seconds, each with its sampler, steps and commit; '' if there are none."""
    cases = cases_of(kept)
    times = sorted({row['seconds'] for row in kept})
    shown = {
        (row['case'], row['seconds']): (
            f'![{row["case"]}, {row["seconds"]:g} s](results/recipes/{row["file"]})<br>'
            f'{row["sampler"].replace(":", " ")}, {row["step"]:,} steps, commit {row["git"]}'
        )
        for row in kept
    }
    body = [(case, *(shown.get((case, time), '') for time in times)) for case in cases]
    return markdown.table(('', *(f'{time:g} s' for time in times)), body) if body else ''


def recipe_picture(folder: pathlib.Path = FOLDER) -> str:
    """Markdown of README's picture with its caption."""
    (run,) = [row for row in origins(folder) if row['file'] == 'images.jpg']
    own = 'this recipe' if run['case'] == 'images' else f'`{run["case"]}` with the same network'
    return (
        '<img src="docs/results/recipes/images.jpg" width="400"\n'
        ' alt="64 samples of 20 kinds of objects">\n\n'
        f'64 unselected samples of {own} after {run["seconds"]:g} seconds of training\non 9,000 '
        f'photographs ({run["step"]:,} steps; {run["sampler"].replace(":", " ")}; one '
        f'{run["device"]}, commit {run["git"]}).'
    )


def with_origin(
    head: Sequence[str], lines: Lines, columns: Sequence[str], rows: Sequence[Row], data: str
) -> str:
    """A `table`, and a line that says with what its rows were measured."""
    if not lines:
        return NOTHING
    mine = [row for row in rows if row['data'] == data]
    samples, batches, features = (
        all_of(mine, operator.itemgetter(name))
        for name in ('num_samples', 'batch_size', 'features')
    )
    references = '; '.join(
        dict.fromkeys(
            ', '.join(f'{count:,} {name}' for name, count in row['references'].items())
            for row in mine
        )
    )
    return (
        f'{table(head, lines, columns)}\n\n'
        f'{measured_with(mine)}; {samples} samples,\nbatches of {batches}; images to compare with: '
        f'{references}; features {features}.'
    )


def measured_with(rows: Sequence[Row]) -> str:
    """Devices of rows, each with its versions of JAX and commits."""
    by_device: dict[str, list[Row]] = {}
    for row in rows:
        by_device.setdefault(row['device'], []).append(row)
    return '; '.join(
        f'{device}, jax {all_of(mine, lambda row: row["versions"]["jax"])}, '
        f'commit {all_of(mine, operator.itemgetter("git"))}'
        for device, mine in by_device.items()
    )


def all_of(rows: Iterable[Row], find: Callable[[Row], object]) -> str:
    """The values of rows, each once."""
    return ', '.join(dict.fromkeys(str(find(row)) for row in rows))


TABLES: dict[str, Callable[[], str]] = {
    'recipes': lambda: objectives(read()),
    'recipes_elephants': lambda: elephants(read()),
    'recipes_endings': endings,
    'recipes_pictures': pictures,
    'recipe_picture': recipe_picture,
    'recipes_digits': lambda: digits(read(DIGITS)),
}
