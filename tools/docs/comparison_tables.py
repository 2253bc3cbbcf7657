"""The tables of the comparison files in docs/results, from the rows beside them."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

from jaxunet.compare import tables
from jaxunet.compare.comparison_file import read_comparison
from jaxunet.compare.report import PLOT
from jaxunet.compare.tables import Results
from jaxunet.runtime.markdown import table as table_of

RESULTS = pathlib.Path(__file__).parents[2] / 'docs/results'
# FID of 50,000 samples by training steps, from the README of tqch/ddpm-torch.
DDPM_TORCH = {46_800: 9.16, 93_600: 5.78, 187_200: 4.08}


@functools.cache
def measured(name: str) -> Results:
    """The comparison docs/results/NAME/NAME.toml with its rows."""
    folder = RESULTS / name
    comparison = read_comparison(folder / f'{name}.toml')
    return tables.measured(comparison, [folder / 'rows.jsonl'], [folder / 'stretches.jsonl'])


def table(name: str, make: Callable[[Results], str]) -> Callable[[], str]:
    """A table of docs/results/NAME."""
    return lambda: make(measured(name))


def origin(results: Results) -> str:
    """Describes the rows: device, versions, commits, samples, and their cost."""
    if not results.rows:
        return tables.NOTHING
    return f'{tables.origin(results)}\n\n{tables.cost(results)}'


def picture(name: str) -> Callable[[], str]:
    """Markdown of the plot of docs/results/NAME, if it is there."""

    def show() -> str:
        if not (RESULTS / name / PLOT).exists():
            return tables.NOTHING
        return f'![quality against seconds of training](results/{name}/{PLOT})'

    return show


def long_run(results: Results) -> str:
    """The distances of the long run by steps, beside the FIDs of ddpm-torch."""
    if not results.cells:
        return tables.NOTHING
    distances = results.comparison.distances
    body = []
    for (name, seconds), rows in sorted(results.cells.items()):
        values = [f'{metric.find(rows[0]):.4g}' for metric in distances]
        body.append([name, f'{seconds:g}', f'{rows[0]["step"]:,}', *values, ''])
    body += [
        ['ddpm-torch, published', '', f'{steps:,}', *([''] * len(distances)), f'{fid:.2f}']
        for steps, fid in DDPM_TORCH.items()
    ]
    head = ['run', 's', 'steps', *(f'{metric.title}, our features' for metric in distances)]
    return table_of([*head, 'FID'], body)


TABLES: dict[str, Callable[[], str]] = {
    'methods_quality': table('methods', tables.quality),
    'methods_picture': picture('methods'),
    'methods_origin': table('methods', origin),
    'long_run': table('long_run', long_run),
    'long_run_picture': picture('long_run'),
    'long_run_origin': table('long_run', origin),
}
