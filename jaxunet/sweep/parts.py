"""The report of a study: several predefined sweeps of one config, each in its own folder."""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Sequence

from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.whole_files import written
from jaxunet.sweep import folder, report
from jaxunet.sweep.points import Axis, named, parse_axes
from jaxunet.sweep.presets import PRESETS
from jaxunet.sweep.results import Sweep

HEADING = re.compile('^#', re.MULTILINE)
LINK = re.compile(r'\]\((?!https?:)')
FENCE = '```\n'


def check_axes(given: Sequence[Axis], parts: Sequence[str]) -> None:
    """Checks that every axis of `--vary` belongs to a part of the study.

    Raises:
      UserError: an axis belongs to no part, so it would have no effect.
    """
    known = {axis.name for part in parts for axis in parse_axes(PRESETS[part].axes)}
    for axis in given:
        if axis.name not in known:
            raise UserError(
                f'--vary {axis.name}: no part of the study varies it'
                f'{near_misses(axis.name, sorted(known))}; expected some of '
                f'{", ".join(sorted(known))}, or a sweep of its own'
            )


def write(
    directory: pathlib.Path, parts: Sequence[str], *, plot: bool
) -> tuple[str, list[pathlib.Path]]:
    """Writes the reports of the parts and report.md of all; returns its text and all paths.

    Args:
      directory: holds one folder per part.
      parts: names of presets.
      plot: draw the plots.

    Raises:
      UserError: the folder of a part holds no sweep, matplotlib is missing, or a file cannot be
        written.
    """
    sweeps = {part: folder.load(directory / part) for part in parts}
    files = [report.write(sweep, directory / part, plot=plot) for part, sweep in sweeps.items()]
    chapters = [
        chapter((directory / part / 'report.md').read_text(encoding='utf-8'), part)
        for part in parts
    ]
    text = '\n'.join([f'# Study\n\n{_overview(sweeps)}\n', *chapters])
    path = directory / 'report.md'
    with written(path, '--output') as partial:
        partial.write_text(text, encoding='utf-8')
    return text, [*itertools.chain.from_iterable(files), path]


def _overview(sweeps: dict[str, Sweep]) -> str:
    """Returns a table of the best point of every part."""
    body = []
    for part, sweep in sweeps.items():
        best = sweep.best
        if best is None:
            body.append((part, 'no point ran to its end', '', ''))
            continue
        rate = best['images_per_s']
        slowest = min(row['images_per_s'] for row in sweep.done)
        body.append((part, named(best['point']), f'{rate:,.1f}', f'×{rate / slowest:.3g}'))
    return report.table(('part', 'best', 'images/s', 'of the slowest'), body)


def chapter(text: str, part: str) -> str:
    """Returns a part's report with headings one level lower, and links that lead to its folder."""
    # Every second piece is the inside of a code block.
    pieces = text.split(FENCE)
    pieces[::2] = [LINK.sub(f']({part}/', HEADING.sub('##', piece)) for piece in pieces[::2]]
    return FENCE.join(pieces)
