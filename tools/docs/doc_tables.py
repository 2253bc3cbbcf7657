"""The tables of README and docs, from docs/results; `python tools/docs/write.py` writes them."""

from __future__ import annotations

import operator
import pathlib
import re
import statistics
from collections.abc import Callable

from support import golden as trajectories
from support import markdown

from jaxunet.benchmark import table as benchmark_table
from jaxunet.benchmark.kernels import table as kernel_table
from jaxunet.runtime import rows
from jaxunet.runtime.rows import Row
from jaxunet.weights.presets import PRESETS
from tools.docs import (
    comparison_tables,
    fault_table,
    few_tables,
    peer_table,
    recipe_tables,
    sharing_table,
    step_table,
    width_tables,
)
from tools.docs.recipe_tables import all_of
from tools.sanitizer import sanitizer_rows

RESULTS = pathlib.Path(__file__).parents[2] / 'docs/results'
CACHES = ('empty', 'kept')  # state of the compilation cache before a start
WEIGHTS = {  # the files of tools/gpu/starts.py
    'model.bin': "unet.cu's `.bin`",
    'model.pt': "guided-diffusion's `.pt`",
    'model.safetensors': '`.safetensors`',
    'workdir': 'a run',
}
SLOW = 0.9
COMMIT = operator.itemgetter('git')


def read(path: str) -> list[Row]:
    """The rows of a file under docs/results."""
    return rows.read(RESULTS / path)


def steps() -> str:
    """Every side of every whole-step benchmark."""
    return benchmark_table.markdown(read('step/rows.jsonl'))


def portable_steps() -> str:
    """Steps on a Hopper GPU with both sets of portable kernels beside XLA's, by config.

    For each config and batch the newest row counts, with the last side of each kind in it.
    """
    newest = {
        (pathlib.Path(row['config']).stem, row['batch_size']): row
        for row in read('step/turns.jsonl')
        # The precision of the config, bfloat16.
        if {'portable', 'ada'} <= set(row['kernels']) and 'precision' not in row
    }
    body = []
    for (config, batch), row in sorted(newest.items()):
        sides = zip(row['backends'], row['kernels'], row['medians'], strict=True)
        ms = {side if kind == 'fastest' else kind: m for side, kind, m in sides}
        times = [f'{ms[side]:.2f}' for side in ('xla', 'portable', 'ada')]
        ratios = [f'{ms[side] / ms["xla"]:.2f}' for side in ('portable', 'ada')]
        body.append([config, str(batch), *times, *ratios, row['git']])
    head = ('xla, ms', 'portable, ms', 'ada, ms', 'portable / xla', 'ada / xla')
    table = markdown.table(('config', 'batch', *head, 'commit'), body)
    measured = dict.fromkeys(
        f'{row["device"]}, bfloat16, jax {row["versions"]["jax"]}, driver {row["driver"]}'
        for row in newest.values()
    )
    return f'{table}\n\n{"; ".join(measured)}.'


def kernels() -> str:
    """XLA's time over the kernels', by op, direction and batch."""
    return kernel_table.summary(read('kernels/rows.jsonl'))


def slow_kernels() -> str:
    """The cases where XLA needs less than `SLOW` of a kernel's time, the slowest first."""
    slow = [
        row for row in kernel_table.by_backend(read('kernels/rows.jsonl')) if row['ratio'] < SLOW
    ]
    head = ('op', 'direction', 'batch', 'case', 'backend', 'µs', "XLA's µs", 'ratio', 'commit')
    body = (
        (
            *(row[name] for name in ('op', 'direction', 'batch', 'case', 'backend')),
            f'{row["us"]:.1f}',
            f'{row["us_xla"]:.1f}',
            f'{row["ratio"]:.2f}',
            row['git'],
        )
        for row in sorted(slow, key=lambda row: row['ratio'])
    )
    return markdown.table(head, body)


def training_runs() -> str:
    """The complete training runs of elephants64."""
    step = 'step ms, median (quartiles)'
    head = ('commit', 'device', 'precision, batch', step, 'steps', 'training s', 'final loss')
    body = (
        (
            row['git'],
            row['device'],
            f'{row["precision"]}, {row["batch"]}',
            '{:.2f} ({:.2f} to {:.2f})'.format(row['median_ms'], *row['quartiles_ms']),
            f'{row["steps"]:,}',
            f'{row["training_seconds"]:.0f}',
            row['final_loss'],
        )
        for row in read('elephants64/rows.jsonl')
    )
    return markdown.table(head, body)


def starts() -> str:
    """Seconds from the command to the first step or picture, with an empty cache and a kept one."""
    seconds: dict[tuple[str, str], dict[str, str]] = {}
    for row in read('start/commands.jsonl'):
        did = {'train': 'training', 'sample': 'sampling from ' + WEIGHTS[row['checkpoint']]}
        key = did[row['task']], row['precision']
        seconds.setdefault(key, {})[row['cache']] = f'{row["first_s"]:.1f}'
    return markdown.table(
        ('command', 'precision', *(f'{cache} cache, s' for cache in CACHES)),
        ((*key, *(each[cache] for cache in CACHES)) for key, each in sorted(seconds.items())),
    )


def fuzz() -> str:
    """Cases that fuzzing runs by hand have tried, by part; the newest row of each reader counts."""
    newest = {row['case']: row for row in read('fuzz/rows.jsonl')}
    parts: dict[str, list[Row]] = {}
    for case, row in newest.items():
        own = case in ('configs', 'trained steps') or case.startswith('handlers')
        part = case if own else 'readers of files'
        parts.setdefault(part, []).append(row)
    body = [
        [
            f'{part} ({len(counts)})' if len(counts) > 1 else part,
            *(f'{sum(row[name] for row in counts):,}' for name in ('cases', 'refused', 'accepted')),
            str(sum(bool(row['finding']) for row in counts)),
            f'{max(row["slowest_s"] for row in counts):.2f}',
        ]
        for part, counts in parts.items()
    ]
    row = next(iter(newest.values()))
    gpus = dict.fromkeys(r['device'] for r in newest.values() if r['device'] != 'cpu')
    where = ' and '.join(['On a CPU', *gpus])
    head = ('part', 'cases', 'refused', 'accepted', 'faults', 'slowest, s')
    return (
        f'{markdown.table(head, body)}\n\n'
        f'{where}; Python {row["versions"]["python"]}, jax {row["versions"]["jax"]}, '
        f'hypothesis {row["libraries"]["hypothesis"]}; commit {all_of(newest.values(), COMMIT)}. '
        'Rows by reader: `docs/results/fuzz/rows.jsonl`.'
    )


def matrix() -> str:
    """Tests passed by version of JAX and part of the suite; the newest row of each counts."""
    newest: dict[tuple[str, str], dict[str, Row]] = {}
    for row in read('matrix/rows.jsonl'):
        by_part = newest.setdefault((row['versions']['jax'], row['versions']['python']), {})
        by_part[row['part']] = row
    parts = dict.fromkeys(part for by_part in newest.values() for part in by_part)

    def cell(row: Row | None) -> str:
        if row is None:
            return 'not run'
        counts = ((row[name], name) for name in ('passed', 'skipped', 'failed'))
        cell = ', '.join(f'{count:,} {name}' for count, name in counts if count)
        return cell if row.get('long_tests', True) else f'{cell} (short)'

    table = markdown.table(
        ('jax', 'Python', *parts, 'commit'),
        (
            (
                *versions,
                *(cell(by_part.get(part)) for part in parts),
                all_of(by_part.values(), COMMIT),
            )
            for versions, by_part in newest.items()
        ),
    )
    return (
        f'{table}\n\nOn a CPU, by `python tools/matrix/run.py VERSION@PYTHON ...`; short: without '
        'the tests marked `long`.'
    )


def golden() -> str:
    """Distances of the losses of 200 steps on each version of JAX from those on the first one."""
    by_case: dict[str, dict[str, Row]] = {}
    for (network, _, precision, jax), row in trajectories.recorded().items():
        by_case.setdefault(f'{network}, {precision}', {})[jax] = row
    versions = list(next(iter(by_case.values())))
    first, *others = versions
    lines = []
    for run, by_version in sorted(by_case.items()):
        base = by_version[first]
        mean = statistics.mean(base['losses'][-trajectories.SPAN :])
        far = (trajectories.distance(by_version[v]['losses'], base['losses']) for v in others)
        tolerance = min(row['tolerance'] for row in by_version.values())
        lines.append((run, f'{mean:.5f}', *(f'{value:.1e}' for value in far), f'{tolerance:.3f}'))
    head = ('run', f'loss on {first}, steps 181 to 200', *(f'distance on {v}' for v in others))
    every = [row for by_version in by_case.values() for row in by_version.values()]
    table = markdown.table((*head, 'tolerance'), lines)
    return f'{table}\n\nOn a CPU, commit {all_of(every, COMMIT)}.'


def where_the_time_goes() -> str:
    """GPU milliseconds of a step of elephants64 by class of kernel, beside their floors."""
    by_class = {
        (row['class'], row['batch_size']): row
        for row in read('budget/rows.jsonl')
        if row['level'] is None and row['config'] == 'elephants64'
    }
    small, large = step_table.BATCHES
    names = sorted(
        (name for name, batch in by_class if batch == large and name != 'step'),
        key=lambda name: -by_class[name, large]['ms'],
    )
    body = []
    for name in [*names, 'step']:
        cells = [f'{by_class[name, small]["launches"]:.0f}']
        for batch in step_table.BATCHES:
            row = by_class[name, batch]
            cells += [f'{row["floor_ms"]:.2f}', f'{row["ms"]:.2f}']
        body.append(['all kernels' if name == 'step' else name, *cells])
    head = ['kernels', f'launches, batch {small}']
    for batch in step_table.BATCHES:
        head += [f'floor ms, batch {batch}', f'ms, batch {batch}']
    row = by_class['step', large]
    return (
        f'{markdown.table(head, body)}\n\n'
        f'{row["device"]}, jax {row["versions"]["jax"]}, driver {row["driver"]}, commit '
        f'{row["git"]}; {row["ops"]}; matrix product {row["matmul_flops"] / 1e12:.0f} TFLOP/s, '
        f'copy {row["copy_bytes_per_s"] / 1e9:,.0f} GB/s.'
    )


def study(name: str) -> Callable[[], str]:
    """The table of all points of a sweep, from its report."""
    return lambda: _report(f'study/{name}', '## Points')


def _report(folder: str, start: str) -> str:
    """The first table of docs/results/FOLDER/report.md at or after the text `start`."""
    text = (RESULTS / folder / 'report.md').read_text()
    match = re.search(r'^\|.*(?:\n\|.*)+', text[text.index(start) :], re.MULTILINE)
    assert match is not None, f'docs/results/{folder}/report.md: no table after {start!r}'
    return match[0]


def presets() -> str:
    """The published models by preset, with their files."""
    head = ('`--preset`', 'file', 'images', 'schedule', 'timesteps')
    body = []
    for name, preset in PRESETS.items():
        d, classes = preset.config().diffusion, preset.model.get('num_classes', 0)
        images = f'{preset.size}×{preset.size}'
        if low_res := preset.config().low_res_shape:
            images += f' from {low_res[0]}×{low_res[1]}'
        images += f', {classes:,} classes' if classes else ''
        files = ', '.join(f'`{file}`' for file in preset.files)
        process = (d.schedule, f'{d.steps:,}' + ', rescaled' * d.rescale_timesteps)
        body.append((f'`{name}`', files, images, *(('none', 'none') if d.continuous else process)))
    return markdown.table(head, body)


TABLES: dict[str, Callable[[], str]] = {
    'step_summary': step_table.step_summary,
    'steps': steps,
    'portable_steps': portable_steps,
    'kernels': kernels,
    'slow_kernels': slow_kernels,
    'kernels_beside_libraries': peer_table.beside_libraries,
    'training_runs': training_runs,
    'starts': starts,
    'matrix': matrix,
    'golden': golden,
    'fuzz': fuzz,
    **fault_table.TABLES,
    'sanitizer': lambda: sanitizer_rows.table(read('sanitizer/rows.jsonl')),
    'where_the_time_goes': where_the_time_goes,
    **comparison_tables.TABLES,
    **few_tables.TABLES,
    **recipe_tables.TABLES,
    'recipes_sharing': sharing_table.sharing,
    **width_tables.TABLES,
    'devices_batch_merged': study('devices_batch_merged'),
    'amp': study('amp'),
    'compiled': study('compiled'),
    'presets': presets,
}
