"""The tables of the comparison files in docs/results, from the rows beside them."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

from jaxunet.compare import tables
from jaxunet.compare.report import PLOT
from jaxunet.compare.statistics import mean_over
from jaxunet.compare.study_file import read_study
from jaxunet.compare.tables import Measured

RESULTS = pathlib.Path(__file__).parents[2] / 'docs/results'
# FID of 50,000 samples by training steps, from the README of tqch/ddpm-torch.
DDPM_TORCH = {46_800: 9.16, 93_600: 5.78, 187_200: 4.08}


@functools.cache
def measured(name: str) -> Measured:
    """The comparison docs/results/NAME/NAME.toml with its rows."""
    folder = RESULTS / name
    study = read_study(folder / f'{name}.toml')
    return tables.measured(study, [folder / 'rows.jsonl'], [folder / 'stretches.jsonl'])


def table(name: str, make: Callable[[Measured], str]) -> Callable[[], str]:
    """A table of docs/results/NAME."""
    return lambda: make(measured(name))


def origin(found: Measured) -> str:
    """Describes the rows: device, versions, commits, samples, and their cost."""
    if not found.rows:
        return tables.NOTHING
    return f'{tables.origin(found)}\n\n{tables.cost(found)}'


def picture(name: str) -> Callable[[], str]:
    """Markdown of the plot of docs/results/NAME, if it is there."""

    def show() -> str:
        if not (RESULTS / name / PLOT).exists():
            return tables.NOTHING
        return f'![quality against seconds of training](results/{name}/{PLOT})'

    return show


def long_run(found: Measured) -> str:
    """The distances of the long run by steps, beside the FIDs of ddpm-torch."""
    if not found.cells:
        return tables.NOTHING
    distances = found.study.distances
    body = []
    for (name, seconds), rows in sorted(found.cells.items()):
        values = [f'{metric.find(rows[0]):.4g}' for metric in distances]
        body.append([name, f'{seconds:g}', f'{rows[0]["step"]:,}', *values, ''])
    body += [
        ['ddpm-torch, published', '', f'{steps:,}', *([''] * len(distances)), f'{fid:.2f}']
        for steps, fid in DDPM_TORCH.items()
    ]
    head = ['run', 's', 'steps', *(f'{metric.title}, our features' for metric in distances)]
    return tables.table([*head, 'FID'], body)


def by_sampler(found: Measured) -> str:
    """The first distance by method, time and sampler, with the chosen averages by seed."""
    if not found.rows:
        return tables.NOTHING
    metric = found.study.distances[0]
    samplers = sorted({row['sampler'] for row in found.rows})
    body = []
    for name in found.methods:
        cells = [name]
        for time in found.times:
            here = [r for r in found.rows if (r['case'], r['seconds']) == (name, time)]
            averages = {row['seed']: str(row.get('average', '')) for row in here}
            cells.append(', '.join(averages[seed] for seed in sorted(averages)))
            for sampler in samplers:
                values = [metric.find(row) for row in here if row['sampler'] == sampler]
                cells.append(f'{mean_over(values).value:.4g}' if values else '')
        body.append(cells)
    columns = ('averages', *(sampler.replace(':', ' ') for sampler in samplers))
    head = (f'{time:g} s: {column}' for time in found.times for column in columns)
    return tables.table(['method', *head], body)


TABLES: dict[str, Callable[[], str]] = {
    'methods_quality': table('methods', tables.quality),
    'methods_picture': picture('methods'),
    'methods_baseline': table('methods', tables.against_baseline),
    'methods_best': table('methods', tables.against_best),
    'methods_sooner': table('methods', tables.sooner),
    'methods_end': table('methods', tables.at_the_end),
    'methods_samplers': table('methods', by_sampler),
    'methods_steps': table('methods', lambda found: tables.step_times(found.step_costs)),
    'methods_missing': table('methods', tables.missing),
    'methods_origin': table('methods', origin),
    'long_run': table('long_run', long_run),
    'long_run_picture': picture('long_run'),
    'long_run_missing': table('long_run', tables.missing),
    'long_run_origin': table('long_run', origin),
}
