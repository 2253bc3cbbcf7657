"""The tables of docs/results/methods/PROTOCOL.md, from the rows in docs/results/methods."""

from __future__ import annotations

import math
import pathlib
import runpy
from collections.abc import Callable, Sequence

from jaxunet.compare.jobs import Job
from jaxunet.compare.methods import BASELINE
from jaxunet.compare.results import combined_costs
from jaxunet.runtime.rows import Row
from support import markdown
from support.seed_statistics import (
    Cells,
    Mean,
    Paired,
    cells,
    mean_over,
    paired,
    read,
    rival,
    times_to_final,
    value,
)

FOLDER = pathlib.Path(__file__).parents[2] / 'docs/results/methods'
NOTHING = 'Nothing is measured yet.'
DISTANCES = {
    'Fréchet distance': value('fid'),
    'kernel distance': value('kid'),
}
PICTURE = 'seeds.png'


def measured(folder: pathlib.Path = FOLDER) -> Cells:
    """The measured cells."""
    return cells(read([folder / 'rows.jsonl']))


def wanted() -> list[Job]:
    """Every run of the protocol, in its order."""
    return runpy.run_path(str(FOLDER / 'jobs.py'))['get_jobs']('all', '')


def methods_of(found: Cells) -> list[str]:
    """The measured methods, in the order of the protocol; others follow."""
    order = dict.fromkeys(job.case for job in wanted()) | dict.fromkeys(name for name, _ in found)
    return [name for name in order if any(name == case for case, _ in found)]


def times_of(found: Cells) -> list[float]:
    """The measured times."""
    return sorted({time for _, time in found})


def quality(found: Cells) -> str:
    """Both distances by method and time: mean over seeds ± standard error."""
    return _by_time(found, lambda name, time, find: _mean(found.get((name, time), []), find))


def against_baseline(found: Cells) -> str:
    """Differences to the baseline by method and time, with the p of the paired test."""

    def cell(name: str, time: float, find: Callable[[Row], float]) -> str:
        mine, base = found.get((name, time), []), found.get((BASELINE, time), [])
        return _difference(paired(mine, base, find))

    return _by_time(found, cell, skip=BASELINE)


def against_best(found: Cells) -> str:
    """Differences to the best other method by method and time, with the p of the paired test."""

    def cell(name: str, time: float, find: Callable[[Row], float]) -> str:
        other, mine = rival(found, name, time, find), found.get((name, time), [])
        if other is None or not mine:
            return ''
        shown = _difference(paired(mine, found[other, time], find))
        return f'{other}: {shown}' if shown else f'{other}: no seed of both'

    return _by_time(found, cell)


def at_the_end(found: Cells) -> str:
    """Everything else that is measured, at the last time."""
    if not found:
        return NOTHING
    last = times_of(found)[-1]
    body = []
    for name in methods_of(found):
        rows = found.get((name, last), [])
        if rows:
            body.append(
                (
                    name,
                    ', '.join(str(row['seed']) for row in rows),
                    rows[0]['sampler'].replace(':', ' '),
                    ', '.join(row['average'] for row in rows),
                    _mean(rows, value('precision')),
                    _mean(rows, value('recall')),
                    _mean(rows, value('kid', 'test')),
                    _mean(rows, lambda row: row['losses']['held_out_loss']),
                    f'{sum(row["step"] for row in rows) / len(rows):,.0f}',
                    f'{rows[0]["step_ms"]:.2f}',
                )
            )
    head = ('method', 'seeds', 'sampler', 'averages', 'precision', 'recall')
    more = ('kernel distance to test images', 'held-out loss', 'steps', 'ms per step')
    return f'{markdown.table((*head, *more), body)}\n\n{_origin(found)}'


def sooner(found: Cells) -> str:
    """Seconds until a method is as good as the baseline at its end, by seed."""
    if not any(name == BASELINE for name, _ in found):
        return NOTHING
    last = max(time for name, time in found if name == BASELINE)
    body = []
    for name in methods_of(found):
        for metric, find in DISTANCES.items():
            when = times_to_final(found, name, BASELINE, find)
            first = min(time for case, time in found if case == name)
            shown = ', '.join(_seconds(when[seed], first) for seed in sorted(when))
            mean = mean_over(list(when.values())) if when else None
            if mean is None or not math.isfinite(mean.value):
                share = ''
            else:
                early = '≤ ' if first in when.values() and name != BASELINE else ''
                share = early + _plus_minus(Mean(*(x / last for x in mean[:2]), mean.count))
            body.append((name, metric, shown, share))
    head = ('method', 'distance', 's by seed', f'mean, as a share of {last:g} s')
    return markdown.table(head, body)


def missing(found: Cells) -> str:
    """The cells of the protocol that have no row."""
    lines = []
    none, by_method = [], {}
    for job in wanted():
        by_method.setdefault(job.case, []).append(job)
    for name, jobs in by_method.items():
        gaps = []
        for job in sorted(jobs, key=lambda job: job.seed):
            times = [
                f'{time:g}'
                for time in job.seconds
                if job.seed not in [row['seed'] for row in found.get((name, time), [])]
            ]
            if times:
                every = len(times) == len(job.seconds)
                gaps.append(f'seed {job.seed}' + ('' if every else f' at {", ".join(times)} s'))
        if len(gaps) == len(jobs) and not any(name == case for case, _ in found):
            none.append(name)
        elif gaps:
            lines.append(f'- `{name}`: {"; ".join(gaps)}')
    if none:
        lines.append('- all of ' + ', '.join(f'`{name}`' for name in none))
    return '\n'.join(lines) or 'None.'


def step_times(
    folder: pathlib.Path = FOLDER, case: str = 'method', baseline: str = BASELINE
) -> str:
    """Milliseconds of a step by method, or by another kind of case, measured in turns."""
    path = folder / 'step_ms.jsonl'
    if not path.exists():
        return NOTHING
    body = (
        (
            name,
            f'{cost["ms"]:.2f}',
            '{:.3f} ({:.3f} to {:.3f})'.format(cost['ratio'], *cost['quartiles']),
        )
        for name, cost in combined_costs(path).items()
    )
    return markdown.table((case, 'ms per step', f'of {baseline} (quartiles)'), body)


def picture(folder: pathlib.Path = FOLDER) -> str:
    """Markdown of the plot, if it is there."""
    if not (folder / PICTURE).exists():
        return NOTHING
    return f'![distances against seconds of training](results/methods/{PICTURE})'


def _by_time(
    found: Cells, cell: Callable[[str, float, Callable[[Row], float]], str], skip: str = ''
) -> str:
    """A table with a row for each method and distance, and a column for each time."""
    names = [name for name in methods_of(found) if name != skip]
    times = times_of(found)
    if not names:
        return NOTHING
    body = [
        (name, metric, *(cell(name, time, find) for time in times))
        for metric, find in DISTANCES.items()
        for name in names
    ]
    return markdown.table(('method', 'distance', *(f'{time:g} s' for time in times)), body)


def _mean(rows: Sequence[Row], find: Callable[[Row], float]) -> str:
    return _plus_minus(mean_over([find(row) for row in rows])) if rows else ''


def _plus_minus(mean: Mean, sign: str = '') -> str:
    """A mean with its standard error, and the number of seeds where they are not three."""
    text = f'{mean.value:{sign}.4g}'
    if mean.count > 1:
        text += f' ± {mean.error:.2g}'
    return text if mean.count == 3 else f'{text} ({mean.count})'


def _difference(found: Paired | None) -> str:
    """A difference with its p; bold if the first is ahead by the rule of the protocol."""
    if found is None:
        return ''
    text = _plus_minus(found.difference, '+').replace('-', '−')
    if not math.isnan(found.p):
        text += f', p {found.p:.2g}'
    return f'**{text}**' if found.ahead else text


def _seconds(when: float, first: float) -> str:
    """A time; an upper bound if it is that of the first measurement."""
    if not math.isfinite(when):
        return 'not reached'
    return f'≤ {when:.0f}' if when == first else f'{when:.0f}'


def _origin(found: Cells) -> str:
    """Describes the rows: device, versions, samples, and the training that they took."""
    rows = [row for group in found.values() for row in group]

    def each(find: Callable[[Row], object]) -> str:
        return ', '.join(dict.fromkeys(str(find(row)) for row in rows))

    runs = {(row['case'], row['seed']): 0.0 for row in rows}
    for row in rows:
        key = row['case'], row['seed']
        runs[key] = max(runs[key], row['training_seconds'])
    return (
        f'{each(lambda r: r["device"])}, jax {each(lambda r: r["versions"]["jax"])}, commit '
        f'{each(lambda r: r["git"])}; {each(lambda r: r["num_samples"])} samples, batches of '
        f'{each(lambda r: r["batch_size"])};\nfeatures {each(lambda r: r["features"])}; '
        f'{len(runs)} runs, {sum(runs.values()) / 60:.0f} minutes of training.'
    )
