"""Measures averages of several widths after training, and how exactly snapshots give them.

    python docs/results/widths/measure.py runs/widths docs/results/digits/features.npz

For each seed and schedule of the learning rate, the digits are trained twice with the same steps:
once with two widths and their snapshots, and once with other widths, averaged at every step. Each
of these widths is then computed from the snapshots of the first run and compared with the average
of the second (`relative_error`, of all weights together); and samples are drawn and compared with
each average of the first run.

The work is done by the commands of jaxunet, in this checkout. A command whose output is there is
not repeated. The rows go to rows.jsonl beside this file, and the plot to widths.png;
docs/results.md shows both: `python tools/docs/write.py`.
"""

from __future__ import annotations

import json
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence

import jax
import numpy as np
from matplotlib.figure import Figure

from jaxunet.model.unet import Params
from jaxunet.runtime import rows
from jaxunet.weights.files import read_weights

HERE = pathlib.Path(__file__).parent
SEEDS = (0, 1)
SCHEDULES = {'cosine': '', 'constant': 'constant_'}  # prefixes of their folders; the config's first
KEPT = ('0.05', '0.10')  # widths of the first run
OTHERS = ('0.03', '0.075', '0.15', '0.20', '0.25')  # of the second
RATE = '0.995'  # the run's exponential average
SAMPLES = 5000
METRICS = ('fid', 'kid', 'precision', 'recall')
# Those of configs/digits.py, written out.
FIELDS = (
    '--config.diffusion.objective=edm',
    '--config.diffusion.schedule=linear',
    '--config.evaluation.sampler=dpmpp_2m',
    '--config.evaluation.steps=20',
    '--config.train.sample_every=0',
)
# Label of a panel by the beginning of the metric's name.
PLOTTED = {
    'frechet_distance': 'Fréchet distance',
    'precision': 'precision',
    'recall': 'recall',
}


def main(output: pathlib.Path, features: str) -> None:
    """Trains, measures, writes the rows and draws the plot."""
    found = [
        row
        for schedule in SCHEDULES
        for seed in SEEDS
        for row in measure(output, features, schedule, seed)
    ]
    text = ''.join(f'{json.dumps(row, ensure_ascii=False)}\n' for row in found)
    (HERE / 'rows.jsonl').write_text(text)
    plot(found, HERE / 'widths.png')


def measure(output: pathlib.Path, features: str, schedule: str, seed: int) -> list[rows.Row]:
    """Returns a row for each other width, and for each average and metric."""
    prefix = SCHEDULES[schedule]
    run, direct = output / f'{prefix}run_{seed}', output / f'{prefix}direct_{seed}'
    trained = [train(run, KEPT, schedule, seed), train(direct, OTHERS, schedule, seed)]
    np.testing.assert_array_equal(flat(export(run, 'none')[0]), flat(export(direct, 'none')[0]))
    about = {'schedule': schedule, 'seed': seed, **rows.provenance()}
    found = []
    for width in OTHERS:
        reconstructed, command = export(run, width)
        wanted = flat(export(direct, width)[0])
        error = np.linalg.norm(flat(reconstructed) - wanted) / np.linalg.norm(wanted)
        found.append(
            {'width': float(width), 'relative_error': float(error)}
            | {'trained_by': trained, 'command': command}
            | about
        )
    results = output / f'{prefix}results_{seed}.jsonl'
    averages = sorted((*KEPT, *OTHERS), key=float)
    command = call(
        results,
        'evaluate',
        *('--checkpoint', str(run), '--ema', ','.join((*averages, RATE, 'none'))),
        *('--metrics', ','.join(METRICS), '--features', features),
        *('--num_samples', str(SAMPLES), '--seed', str(seed), '--output', str(results)),
    )
    origin = {'command': command, **about}
    return found + [json.loads(line) | origin for line in results.read_text().splitlines()]


def train(workdir: pathlib.Path, widths: Sequence[str], schedule: str, seed: int) -> str:
    """Trains the digits with averages of these widths; returns the command."""
    changed = (f'--config.optimizer.schedule={schedule}',) if SCHEDULES[schedule] else ()
    return call(
        workdir / 'checkpoints' / '1500',
        'train',
        *('--config', 'configs/digits.py', f'--config.ema.widths={",".join(widths)}'),
        *(f'--config.seed={seed}', *FIELDS, *changed, '--workdir', str(workdir)),
    )


def export(workdir: pathlib.Path, ema: str) -> tuple[Params, str]:
    """Returns an average of a run, and the command that exports it."""
    path = workdir.parent / f'{workdir.name}_{ema}.safetensors'
    flags = ('--checkpoint', str(workdir), '--ema', ema, '--output', str(path))
    command = call(path, 'export', *flags)
    return read_weights(path).params, command


def call(made: pathlib.Path, *words: str) -> str:
    """Runs a command of jaxunet unless what it makes is there; returns its line."""
    command, *flags = words
    line = ['python', '-m', f'jaxunet.{command}', *flags]
    if not made.exists():
        print(shlex.join(line), flush=True)
        subprocess.run([sys.executable, *line[1:]], check=True)
    return shlex.join(line)


def flat(params: Params) -> np.ndarray:
    """Returns all weights in float64."""
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(params)]
    return np.concatenate(leaves).astype(np.float64)


def plot(found: Sequence[rows.Row], path: pathlib.Path) -> None:
    """Draws the metrics against the width: means of the seeds, with their range."""
    figure = Figure(figsize=(11, 3.6), layout='constrained')
    panels = figure.subplots(1, len(PLOTTED))
    for panel, (metric, label) in zip(panels, PLOTTED.items(), strict=True):
        for schedule in SCHEDULES:
            mine = [
                row
                for row in found
                if row['schedule'] == schedule and row.get('metric', '').startswith(metric)
            ]
            widths = sorted({row['width'] for row in mine if row['width'] is not None})
            values = np.array([[r['value'] for r in mine if r['width'] == w] for w in widths])
            (line,) = panel.plot(widths, values.mean(1), marker='o', label=schedule)
            colour = line.get_color()
            panel.fill_between(widths, values.min(1), values.max(1), color=colour, alpha=0.2)
            rate = np.mean([row['value'] for row in mine if row['ema'] == RATE])
            panel.axhline(rate, color=colour, linestyle='--', linewidth=1)
        panel.set_xlabel('width of the average')
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    panels[0].plot([], [], color='grey', linestyle='--', label=f'rate {RATE}')
    panels[0].legend(fontsize='small', title='learning rate')
    figure.savefig(path, dpi=90)


if __name__ == '__main__':
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
