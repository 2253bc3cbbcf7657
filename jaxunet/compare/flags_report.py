"""Writes the report of a comparison that flags state: compare.csv, report.md and quality.png."""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence

from jaxunet.compare import report
from jaxunet.compare.comparison import Comparison, Reference, Round
from jaxunet.compare.runner import COSTS, Spec, divided_cores
from jaxunet.compare.step_times import latest_row
from jaxunet.compare.tables import Measured
from jaxunet.compare.worker import ROW_FIELDS, finished, run_folder, run_name
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError

COLUMNS = (
    'method',
    'seed',
    'status',
    'milestone',
    'training_seconds',
    'step',
    'metric',
    'value',
    'std',
    'num_samples',
    'sampler',
    'evaluations',
    'reference',
    'features',
    'resize',
    'reason',
)
# Fields that are equal in all rows, except that some metrics have no reference.
EQUAL = ('features', 'reference', 'num_samples', 'sampler', 'evaluations')
# Fields of a row that reports of comparison files have, too.
SHARED = (
    'training_seconds',
    'step',
    'num_samples',
    'sampler',
    'features',
    'device',
    'driver',
    'versions',
    'git',
)


def collect(spec: Spec, directory: pathlib.Path) -> list[rows.Row]:
    """Returns all rows by method, seed and milestone, with a row for each metric.

    Later rows replace earlier ones of the same milestone and metric.

    Raises:
      UserError: the runs were measured in different ways, so they do not compare.
    """
    found: dict[tuple[str, int, int, str], rows.Row] = {}
    for method, seeds in spec.seeds.items():
        for seed in range(seeds):
            for row in finished(run_folder(directory, run_name(method, seed)), ROW_FIELDS):
                if 0 <= row['milestone'] < spec.evaluations[method]:
                    found[method, seed, row['milestone'], row['name']] = row
    for field in EQUAL:
        ways = {str(row[field]): row for row in found.values() if row[field] is not None}
        if len(ways) > 1:
            found_ways = ', '.join(
                f'{way} ({run_name(row["method"], row["seed"])})' for way, row in ways.items()
            )
            raise UserError(
                f'{directory}: runs that were measured with different {field} do not compare: '
                f'{found_ways}; remove some of them'
            )
    order = list(spec.methods)
    return sorted(
        found.values(), key=lambda row: (order.index(row['method']), row['seed'], row['milestone'])
    )


def measured(
    spec: Spec, all_rows: Sequence[rows.Row], costs: rows.Row, failures: Mapping[str, str]
) -> Measured:
    """Returns a comparison and its measurements in the form of those of comparison files.

    Args:
      all_rows: from `collect`.
      costs: the row of step costs; {} without any.
      failures: reasons of failed runs, by folder of the run.
    """
    reference = next((row['reference'] for row in all_rows if row['reference']), '')
    # Rounded, so that a time is the same number whatever it is a part of.
    times = {
        method: tuple(round(seconds, 6) for seconds in spec.milestones(method))
        for method in spec.methods
    }
    comparison = Comparison(
        title='Methods at equal training wall-clock',
        baseline=spec.baseline,
        rounds=tuple(
            Round(tuple(name for name in spec.methods if seed < spec.seeds[name]), (seed,))
            for seed in range(max(spec.seeds.values()))
        ),
        seconds=times[spec.baseline],
        own_seconds=times,
        references=(Reference('', reference, tuple(spec.metrics)),),
    )
    found: dict[tuple[str, int, int], rows.Row] = {}
    for row in all_rows:
        key = row['method'], row['seed'], row['milestone']
        one = found.setdefault(
            key,
            {
                'case': row['method'],
                'seed': row['seed'],
                'seconds': times[row['method']][row['milestone']],
                'batch_size': spec.config['data']['batch_size'],
                'values': {reference: {}},
                **{name: row[name] for name in SHARED},
            },
        )
        one['values'][reference][row['name']] = row['value']
    runs = {run_name(*cell): cell for cell in comparison.cells}
    failed = {runs[name]: reason for name, reason in failures.items() if name in runs}
    return Measured(
        comparison, list(found.values()), step_costs=costs.get('costs', {}), failures=failed
    )


def about(
    spec: Spec, all_rows: Sequence[rows.Row], costs: rows.Row, failures: Mapping[str, str]
) -> list[str]:
    """Returns the paragraphs that say how the runs are made; arguments as `measured`."""
    parts = [f'`{spec.command}`', _differences(spec)]
    if spec.processes > 1 and any(row['device'] == 'cpu' for row in all_rows):
        parts.append(f'Note: {divided_cores(spec.processes)}.')
    if costs:
        parts.append(
            f'Turns: {costs["rounds"]} of {costs["steps"]} steps each, batch {costs["batch"]}, '
            f'one {costs["device"]}.'
        )
    if 'step_cost' in failures:
        parts.append(f'Failed: step_cost: {failures["step_cost"]}')
    return [*parts, protocol(spec, all_rows)]


def _differences(spec: Spec) -> str:
    """Returns a sentence with the fields in which each method differs from the baseline."""
    base = spec.methods[spec.baseline]
    different = []
    for name, fields in spec.methods.items():
        own = {path: value for path, value in fields.items() if value != base.get(path)}
        if own:
            different.append(f'{name}: ' + ', '.join(f'{k}={v}' for k, v in own.items()))
    return f'Methods beside the baseline: {"; ".join(different) or "none"}.'


def protocol(spec: Spec, all_rows: Sequence[rows.Row]) -> str:
    """Returns the paragraph that says how the runs were trained and measured."""
    config = spec.config
    text = (
        f'Each run trains for {_each(spec.seconds)} s of wall-clock (training steps alone: not '
        f'compiling, not measuring), batch {config["data"]["batch_size"]}, {config["precision"]}, '
        f'{config["data"]["path"]}, learning rate constant after '
        f'{config["optimizer"]["warmup_steps"]:,} steps of warm-up; runs of a seed share their '
        f'start and order of the images. At {_each(spec.evaluations)} equally spaced times the '
        f'average of the weights (EMA {config["ema"]["rates"][0]}) draws '
    )
    if not all_rows:
        return text + f'{config["evaluation"]["samples"]} samples.'
    row = next((row for row in all_rows if row['reference']), all_rows[0])
    compared = f', compared with {row["reference"]}' if row['reference'] else ''
    return text + (
        f'{row["num_samples"]} samples by {row["sampler"]} with {row["evaluations"]} evaluations '
        f'of the network{compared}{_details(row, all_rows)}; features {row["features"]} '
        f'({row["resize"]}).'
    )


def _details(compared: rows.Row, all_rows: Sequence[rows.Row]) -> str:
    """Returns the size of the reference, the settings of the metrics and the seed.

    Returns '' for rows of older versions, which lack these fields.
    """
    count = compared.get('num_reference')
    if not count:
        return ''
    settings = {row['name']: row['settings'] for row in all_rows if row.get('settings')}
    return (
        f' ({count} images)'
        + ''.join(f'; {name}: {text}' for name, text in settings.items())
        + "; by the run's seed"
    )


def _each(numbers: Mapping[str, float]) -> str:
    """Returns the most frequent number, and the methods that have others."""
    counts = list(numbers.values())
    usual = max(counts, key=counts.count)
    others = ', '.join(f'{name} {number:g}' for name, number in numbers.items() if number != usual)
    return f'{usual:g}' + (f' ({others})' if others else '')


def write(
    spec: Spec, directory: pathlib.Path, failures: Mapping[str, str], *, plot: bool
) -> tuple[str, list[pathlib.Path]]:
    """Writes compare.csv, report.md and quality.png; returns the text and all paths.

    Args:
      spec: the comparison.
      directory: its folder, with the rows of the runs.
      failures: reasons of failed runs, by folder of the run.
      plot: draw quality.png if there are rows.

    Raises:
      UserError: the runs were measured in different ways, or matplotlib is missing.
    """
    all_rows, costs = collect(spec, directory), latest_row(directory / COSTS)
    table = directory / 'compare.csv'
    table.write_text(_csv(all_rows, failures), encoding='utf-8')
    text, paths = report.write(
        measured(spec, all_rows, costs, failures),
        directory,
        about(spec, all_rows, costs, failures),
        plot=plot,
    )
    return text, [table, *paths]


def _csv(all_rows: Sequence[rows.Row], failures: Mapping[str, str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction='ignore')
    writer.writeheader()
    writer.writerows({'status': 'ok', **row} for row in all_rows)
    for folder, reason in failures.items():
        method, _, seed = folder.rpartition('_seed')
        writer.writerow(
            {
                'method': method or folder,
                'seed': seed if method else '',
                'status': 'failed',
                'reason': reason,
            }
        )
    return text.getvalue()
