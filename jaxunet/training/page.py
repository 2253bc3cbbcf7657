"""Writes `WORKDIR/index.html`: what a run looks like so far, for a browser, without a server.

The page shows the grids of samples along a slider, the curves of metrics.csv, what the run said
when it began, and the commands that go on from it. It loads nothing but the pictures in `samples/`.
"""

from __future__ import annotations

import json
import math
import pathlib
import shlex
import time
from collections.abc import Mapping, Sequence

from jaxunet.config import Config, by_path
from jaxunet.runtime import program
from jaxunet.runtime.whole_files import replacing
from jaxunet.training.held_out import Losses, Turn
from jaxunet.training.log_file import last_start
from jaxunet.training.logs import FILE as METRICS
from jaxunet.training.logs import read_metrics

FILE = 'index.html'
TEMPLATE = pathlib.Path(__file__).with_name('page.html')
POINTS = 1000  # of a curve
CURVES = (
    'loss', 'held_out_loss', 'seen_loss', 'images_per_second', 'learning_rate', 'training_seconds',
)  # fmt: skip


def write_page(config: Config, workdir: pathlib.Path) -> None:
    """Writes the page of a run from the files in its workdir.

    Raises:
      OSError: a file cannot be read or written.
    """
    text = TEMPLATE.read_text(encoding='utf-8')
    # Inside a script element, only a slash after < could end it.
    data = json.dumps(contents(config, workdir)).replace('</', '<\\/')
    with replacing(workdir / FILE) as path:
        path.write_text(text.replace('"DATA"', data, 1), encoding='utf-8')


def contents(config: Config, workdir: pathlib.Path) -> dict[str, object]:
    """Returns everything that the page of a run shows, for JSON."""
    rows = read_metrics(workdir / METRICS) if (workdir / METRICS).exists() else []
    every = max(math.ceil(len(rows) / POINTS), 1)
    shown = [row for i, row in enumerate(rows) if i % every == 0 or row.get('held_out_loss')]
    said, defaults = last_start(workdir), by_path(Config())
    return {
        'name': workdir.resolve().name,
        'written': time.strftime('%Y-%m-%d %H:%M'),
        'steps': config.train.steps,
        'step': int(rows[-1]['step']) if rows else 0,
        'batch': config.data.batch_size,
        'objective': config.diffusion.objective,
        'image': 'x'.join(map(str, config.image_shape)),
        'data': config.data.path,
        'pictures': pictures(workdir),
        'curves': {
            name: [[int(row['step']), float(row[name])] for row in shown if _finite(row.get(name))]
            for name in CURVES
        },
        'turns': turns(rows),
        'said': said,
        'commands': commands(config, workdir, said[0] if said else ''),
        'fields': {
            path: str(value) for path, value in by_path(config).items() if value != defaults[path]
        },
    }


def pictures(workdir: pathlib.Path) -> list[tuple[int, str]]:
    """Returns the step and the path in the workdir of each grid of samples, in order."""
    files = sorted((workdir / 'samples').glob('step_*.png'))
    return [
        (int(path.stem.removeprefix('step_')), f'samples/{path.name}')
        for path in files
        if path.stem.removeprefix('step_').isdecimal()
    ]


def turns(rows: Sequence[Mapping[str, str]]) -> list[tuple[int, str]]:
    """Returns each step at which the held-out loss had turned, and what the log said there."""
    turn, places = Turn(), []
    for row in rows:
        losses = Losses.of_row(row)
        if losses and (said := turn.add(losses)):
            places.append((int(row['step']), said))
    return places


def commands(config: Config, workdir: pathlib.Path, begun: str) -> dict[str, str]:
    """Returns the commands that go on from a run, by what they do.

    Args:
      begun: the first line of the log: date, time and command; '' without a log.
    """
    folder = shlex.quote(str(workdir))
    resume = begun.split(' ', 2)[2:]
    lines = {
        'export the weights': f'export --checkpoint {folder} --output model.safetensors',
        'see all runs': f'view {shlex.quote(str(workdir.parent))}',
    }
    shown = {does: program.shown(f'python -m jaxunet.{it}') for does, it in lines.items()}
    draw = f'{sample_command(config, workdir)} --num_samples 64 --output samples.png'
    further = f'resume, or go on with a larger train.{config.train.length}'
    first = {further: resume[0]} if resume else {}
    return first | {'draw 64 samples': draw} | shown


def sample_command(config: Config, folder: pathlib.Path) -> str:
    """Returns the command that draws samples of the run in a folder.

    A network that enlarges or colours pictures needs some; PICTURES stands for their path.
    """
    flag = 'condition' if config.picture_path else 'low_res'
    pictures = f' --{flag} PICTURES' if config.low_res_shape else ''
    sample = program.shown('python -m jaxunet.sample')
    return f'{sample} --checkpoint {shlex.quote(str(folder))}{pictures}'


def _finite(text: str | None) -> bool:
    return bool(text) and math.isfinite(float(text or 0))
