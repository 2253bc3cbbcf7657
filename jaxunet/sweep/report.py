"""Writes the report of a sweep: a CSV of all points, plots, and a Markdown page.

The page shows the best point, the effect of each option, all points and the failures.
"""

from __future__ import annotations

import csv
import functools
import pathlib
import shlex
import statistics
from collections.abc import Sequence

from jaxunet.profile.report import read_csv, side_by_side
from jaxunet.runtime.errors import plural
from jaxunet.runtime.markdown import table as table_of
from jaxunet.runtime.rows import Row
from jaxunet.runtime.whole_files import written
from jaxunet.sweep import plots
from jaxunet.sweep.points import JIT, OWN_AXES, named, show
from jaxunet.sweep.results import Effect, Sweep, effects
from jaxunet.sweep.row import IMPOSSIBLE, OK

COLUMNS = (
    'status',
    'images_per_s',
    'speed_of_best',
    'step_ms',
    'step_ms_q1',
    'step_ms_q3',
    'lower_s',
    'compile_s',
    'compile_cached',
    'peak_gib',
    'peak_source',
    'batch',
    'loss',
    'steps',
    'seconds',
    'reason',
    'key',
)
table = functools.partial(table_of, rule='---')  # as in the reports of earlier versions


def write(sweep: Sweep, directory: pathlib.Path, *, plot: bool) -> list[pathlib.Path]:
    """Writes results.csv, the plots and report.md, and returns their paths.

    Args:
      sweep: the results.
      directory: folder of the sweep.
      plot: draw AXIS.png for every axis, or operations.png for profiles.

    Raises:
      UserError: matplotlib is missing, or a file cannot be written.
    """
    _write_csv(sweep, directory / 'results.csv')
    pictures = plots.plot(sweep, directory) if plot and sweep.done else []
    text = markdown(sweep, [p.name for p in pictures], directory)
    with written(directory / 'report.md', '--output') as partial:
        partial.write_text(text, encoding='utf-8')
    return [directory / 'results.csv', *pictures, directory / 'report.md']


def flat(row: Row, best: Row | None) -> Row:
    """Returns a row as the `COLUMNS` of the CSV; numbers that were not measured are None."""
    step = row.get('step_ms', {})
    low, high = step.get('quartiles', (None, None))
    peak, rate = row.get('peak_bytes'), row.get('images_per_s')
    values = {name: row.get(name) for name in COLUMNS}
    values |= {
        'step_ms': step.get('median'),
        'step_ms_q1': low,
        'step_ms_q3': high,
        'peak_gib': peak / 2**30 if peak else None,
    }
    return values | {'speed_of_best': rate / best['images_per_s'] if rate and best else None}


def _write_csv(sweep: Sweep, path: pathlib.Path) -> None:
    with (
        written(path, '--output') as partial,
        partial.open('w', newline='', encoding='utf-8') as file,
    ):
        writer = csv.DictWriter(file, [*(axis.name for axis in sweep.axes), *COLUMNS])
        writer.writeheader()
        for row in sweep.rows:
            values = flat(row, sweep.best)
            cells = {k: f'{v:.6g}' if isinstance(v, float) else v for k, v in values.items()}
            writer.writerow(
                {axis.name: show(row['point'][axis.name]) for axis in sweep.axes} | cells
            )


def markdown(sweep: Sweep, pictures: Sequence[str], directory: pathlib.Path) -> str:
    """Returns the report as Markdown.

    Args:
      sweep: the results.
      pictures: file names of the plots.
      directory: folder of the sweep, for the files of profiles.
    """
    parts = [
        f'# {sweep.title}',
        *_origin(sweep),
        *_best(sweep),
        *_effects(sweep),
        *_points(sweep),
        *_failures(sweep),
        *(f'![{name.removesuffix(".png")}]({name})' for name in pictures),
        *_profiles(sweep, directory),
    ]
    return '\n\n'.join(parts) + '\n'


def _origin(sweep: Sweep) -> list[str]:
    machines = dict.fromkeys(
        f'{_device(row)}, '
        + ', '.join(f'{name} {version}' for name, version in row['versions'].items())
        + f', commit {row.get("git") or "unknown"}'
        for row in sweep.rows
    )
    parts = [
        f'`{sweep.command}`',
        f'{plural(len(sweep.done), "point")} measured. ' + '; '.join(machines),
    ]
    if sweep.missing:
        have = 'has' if sweep.missing == 1 else 'have'
        parts.append(
            f'**{plural(sweep.missing, "point")} {have} not run yet;** the same command goes on.'
        )
    return parts + [f'Note: {note}.' for note in sweep.notes]


def _device(row: Row) -> str:
    """Returns the name of the device and, unless it is a CPU, how many the machine has.

    Each point of a CPU emulates as many devices as its config asks for.
    """
    return row['device'] if row['device'] == 'cpu' else f'{row["devices"]} x {row["device"]}'


def _best(sweep: Sweep) -> list[str]:
    best = sweep.best
    if best is None:
        return ['## Best', 'No point ran to its end.']
    rate, slowest = best['images_per_s'], min(row['images_per_s'] for row in sweep.done)
    text = f'**{named(best["point"])}**: {rate:,.1f} images/s'
    text += f', {best["step_ms"]["median"]:.2f} ms per step'
    text += f', {rate / slowest:.2f}× the slowest.' if len(sweep.done) > 1 else '.'
    parts = ['## Best', text]
    fields = {name: value for name, value in best['point'].items() if name not in OWN_AXES}
    if 'batch_per_device' in best['point']:
        fields['data.batch_size'] = best['batch']
    overrides = shlex.join(f'--config.{name}={show(value)}' for name, value in fields.items())
    if best['point'].get(JIT) != 'off':  # training always compiles
        given = [
            a
            for a in shlex.split(sweep.command)
            if not a.startswith(tuple(f'--config.{name}=' for name in fields))
        ]
        parts.append(f'    python -m jaxunet.train {f"{shlex.join(given)} {overrides}".strip()}')
    return parts


def _effects(sweep: Sweep) -> list[str]:
    every = effects(sweep)
    if not every:
        return []
    memory = any(w.memory for w in every)
    scaling = any(w.efficiency is not None for w in every)
    heads = ['option', 'against', 'images/s', 'range', 'pairs']
    heads += ['peak memory'] if memory else []
    heads += ['efficiency'] if scaling else []
    parts = [
        '## What each option is worth',
        'Ratio of images/s to the first value, all else equal; geometric mean over the other axes.',
        table(heads, [_cells(e, memory=memory, scaling=scaling) for e in every]),
    ]
    if scaling and any(row['device'] == 'cpu' for row in sweep.done):
        parts.append(
            'These devices share the cores of one CPU, so their numbers do not show how a run '
            'grows on several GPUs.'
        )
    return parts


def _cells(effect: Effect, *, memory: bool, scaling: bool) -> list[str]:
    cells = [f'{effect.axis.name}={show(effect.value)}', show(effect.axis.values[0])]
    if effect.ratios:
        spread = f'×{min(effect.ratios):.3g} to ×{max(effect.ratios):.3g}'
        cells += [f'×{effect.ratio:.3g}', spread, str(len(effect.ratios))]
    else:
        cells += ['not comparable', '', '0']
    if memory:
        cells += [f'×{statistics.geometric_mean(effect.memory):.3g}' if effect.memory else '']
    if scaling:
        cells += [
            f'{effect.efficiency:.1%}' if effect.efficiency is not None and effect.ratios else ''
        ]
    return cells


def _points(sweep: Sweep) -> list[str]:
    titles = [axis.name for axis in sweep.axes]
    heads = [
        *titles,
        'images/s',
        'of best',
        'step ms, median (quartiles)',
        'lower + compile s',
        'peak GiB',
    ]
    body = []
    for row in sweep.rows:
        cells = [show(row['point'][name]) for name in titles]
        if row['status'] == OK:
            cells += _number_cells(flat(row, sweep.best))
        else:
            cells += [row['status'], '', '', '', '']
        body.append(cells)
    parts = ['## Points', table(heads, body)]
    if any(row.get('peak_source') == 'process' for row in sweep.done):
        parts.append(
            'This backend does not count its memory: the peak is that of the whole process, with '
            'the compiler unless the step was cached, so peaks are not compared.'
        )
    return parts


def _number_cells(values: Row) -> list[str]:
    """Returns the cells of a `flat` row from images/s to peak memory."""
    low, high = values['step_ms_q1'], values['step_ms_q3']
    spread = f' ({low:.2f} to {high:.2f})' if low is not None else ''
    lower = f'{values["lower_s"]:.1f} + ' if values['lower_s'] is not None else ''
    cached = ' (cached)' if values['compile_cached'] else ''
    return [
        f'{values["images_per_s"]:,.1f}',
        f'{values["speed_of_best"]:.0%}',
        f'{values["step_ms"]:.2f}{spread}',
        f'{lower}{values["compile_s"]:.1f}{cached}',
        f'{values["peak_gib"]:.2f}' if values['peak_gib'] else '',
    ]


def _failures(sweep: Sweep) -> list[str]:
    failed = [row for row in sweep.rows if row['status'] != OK]
    if not failed:
        return []
    lines = []
    for row in failed:
        status = '' if row['status'] == IMPOSSIBLE else f'{row["status"]}: '
        log = f' ([log]({row["log"]}))' if 'log' in row else ''
        lines.append(f'- {named(row["point"])}: {status}{" ".join(row["reason"].split())}{log}')
    return ['## Points without a result', '\n'.join(lines)]


def _profiles(sweep: Sweep, directory: pathlib.Path) -> list[str]:
    """Returns the phases and top operations of every traced point."""
    traced = [(named(row['point']), row) for row in sweep.done if 'profile' in row]
    if not traced:
        return []
    on_cpu = any(row['device'] == 'cpu' for _, row in traced)
    phases = list(dict.fromkeys(phase for _, row in traced for phase in row['phase_ms']))
    phase_table = table(
        ('point', *phases, 'idle', 'launches'),
        (
            (
                label,
                *(f'{row["phase_ms"].get(phase, 0.0):.2f}' for phase in phases),
                f'{row["idle_share"]:.1%}',
                f'{row["launches"]:.0f}',
            )
            for label, row in traced
        ),
    )
    tables = [(label, read_csv(directory / row['profile'])) for label, row in traced]
    links = ', '.join(f'[{label}]({row["profile"]})' for label, row in traced)
    return [
        '## Phases',
        'Device milliseconds per step.'
        + (' On a CPU, those of its threads add up to more than the step.' if on_cpu else ''),
        phase_table,
        f'## Top {plots.TOP} device operations',
        f'```\n{side_by_side(tables, plots.TOP)}\n```',
        f'Whole tables, beside their traces: {links}.',
    ]
