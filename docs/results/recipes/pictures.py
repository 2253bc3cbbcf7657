"""Adds output folders of `jaxunet.compare.queue` to this folder, and draws its pictures.

    PYTHONPATH=. python docs/results/recipes/pictures.py runs/recipes/1 runs/recipes/2
    PYTHONPATH=. python docs/results/recipes/pictures.py endings runs/endings/1 runs/endings/2

A folder may also be what `tools/gpu/recipes.sh pack` wrote, whose logs and pictures are in
pictures.tar. Added are rows (rows.jsonl), grids of unpicked samples (grids/) and logs of held-out
losses (logs/). Each replaces an earlier one of the same job and time, and the others stay; rows of
other features than the newest are dropped. pictures.jsonl says of each grid and log which run it is
of. images.jpg has all samples of configs/images.py after `SHOWN` seconds. From rows and logs are
drawn quality.png (Fréchet distance against seconds) and overfitting.png (held-out loss and copies
against seconds); without folders they are drawn again. docs/results.md shows the grids that are
here side by side, with their runs; delete those that it need not show:
`python tools/docs/write.py`. A run that was cut off has no log, but
rows of the times that it reached, with their losses.

With `endings`, the folders are those of the jobs of that name: their rows go to endings.jsonl, and
endings.jpg has the samples of `ENDINGS` side by side.
"""

from __future__ import annotations

import contextlib
import csv
import pathlib
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from PIL import Image

from jaxunet.compare import collected
from jaxunet.runtime import rows
from jaxunet.runtime.rows import Row

HERE = pathlib.Path(__file__).parent
LIMIT = 50  # evaluations of the network a sample
TICKS = (20, 50, 100, 150, 200, 300, 500, 700, 1000, 2000)  # Fréchet distances
RECIPE, SHOWN = 'images', 180  # case and seconds of images.jpg
HALVES = ('objects64',)  # data whose grids keep their upper half
ENDINGS = ('objects64_constant-1-180s_seed0_180s', 'objects64_linear-4-180s_seed0_180s')
GAP, SHOWN_WIDTH = 16, 800  # pixels between them, and of both
QUALITY, SMALLER = 80, 70  # of the JPEGs, and of endings.jpg
# What pictures.jsonl says of the run of a grid or a log.
ORIGIN = ('data', 'case', 'seed', 'seconds', 'sampler', 'step', 'git', 'device', 'versions')
HELD_OUT, SEEN = 'held_out_loss', 'seen_loss'
COLUMNS = ('step', 'training_seconds', HELD_OUT, SEEN)  # columns of the logs


def main(folders: Sequence[pathlib.Path]) -> None:
    """Adds the folders' results, and draws all pictures whose inputs are there."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(unpacked(folder)) for folder in folders]
        found = add_rows(opened, HERE / 'rows.jsonl')
        for folder in opened:
            keep_pictures(folder)
    quality(found, HERE / 'quality.png')
    overfitting(found, HERE / 'overfitting.png')


def endings(folders: Sequence[pathlib.Path]) -> None:
    """Adds the folders' rows to endings.jsonl, and joins the samples of `ENDINGS`."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(unpacked(folder)) for folder in folders]
        add_rows(opened, HERE / 'endings.jsonl')
        grids = []
        for name in ENDINGS:
            for path in [p for folder in opened for p in folder.glob(f'pictures/{name}.png')][-1:]:
                with Image.open(path) as image:
                    grids.append(image.convert('RGB'))
    if len(grids) == len(ENDINGS):
        width, height = grids[0].size
        picture = Image.new('RGB', (2 * width + GAP, height), 'white')
        for i, grid in enumerate(grids):
            picture.paste(grid, (i * (width + GAP), 0))
        picture = picture.resize((SHOWN_WIDTH, round(height * SHOWN_WIDTH / picture.width)))
        picture.save(HERE / 'endings.jpg', quality=SMALLER)


@contextlib.contextmanager
def unpacked(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives the folder, or for a packed one a temporary folder with its rows and pictures.tar."""
    packed = folder / 'pictures.tar'
    if not packed.exists():
        yield folder
        return
    with tempfile.TemporaryDirectory() as name, tarfile.open(packed) as archive:
        archive.extractall(name, filter='data')
        shutil.copy(folder / 'rows.jsonl', name)
        yield pathlib.Path(name)


def read_rows(path: pathlib.Path) -> list[Row]:
    """Returns the rows of a file; none without a file."""
    return rows.read(path) if path.exists() else []


def add_rows(folders: Sequence[pathlib.Path], path: pathlib.Path) -> list[Row]:
    """Adds the folders' rows to a file; returns all, in the order of their cases."""
    files = [path, *(folder / 'rows.jsonl' for folder in folders)]
    every = [row for file in files for row in read_rows(file)]
    compared = [row['features'] for row in every if 'features' in row]
    found = {
        collected.key_of(row): row
        for row in every
        if 'features' not in row or row['features'] == compared[-1]
    }
    ordered = [found[key] for key in sorted(found)]
    collected.write(path, ordered)
    return ordered


def keep_pictures(folder: pathlib.Path) -> None:
    """Adds the grids and logs of a folder, and the runs that they are of to pictures.jsonl."""
    known = {row['file']: row for row in read_rows(HERE / 'pictures.jsonl')}
    measured = read_rows(folder / 'rows.jsonl')

    def keep(file: str, run: Row) -> None:
        known[file] = {'file': file} | {key: run[key] for key in ORIGIN}

    for picture in sorted(folder.glob('pictures/*.png')):
        job, _, seconds = picture.stem.rpartition('_')
        # A grid shows samples by the first sampler of a job, which also has the first row.
        run = next(r for r in measured if job_of(r) == job and f'{r["seconds"]:g}s' == seconds)
        with Image.open(picture) as image:
            grid = image.convert('RGB')
        if (run['case'], run['seconds']) == (RECIPE, SHOWN):
            grid.save(HERE / 'images.jpg', quality=QUALITY)
            keep('images.jpg', run)
        if run['data'] in HALVES:
            grid = grid.crop((0, 0, grid.width, grid.height // 2))
        (HERE / 'grids').mkdir(exist_ok=True)
        grid.save(HERE / 'grids' / f'{picture.stem}.jpg', quality=QUALITY)
        keep(f'grids/{picture.stem}.jpg', run)
    for log in sorted(folder.glob('logs/*.csv')):
        runs = [row for row in measured if job_of(row) == log.stem]
        if runs and keep_log(log, HERE / 'logs' / log.name):
            keep(f'logs/{log.name}', runs[-1])
    collected.write(HERE / 'pictures.jsonl', [known[file] for file in sorted(known)])


def job_of(row: Row) -> str:
    """Returns the name of a row's job, which its files carry."""
    return f'{row["data"]}_{row["case"]}_seed{row["seed"]}'


def keep_log(log: pathlib.Path, target: pathlib.Path) -> bool:
    """Copies the columns of held-out losses; returns False if the run had none."""
    lines = [line for line in csv.DictReader(log.read_text().splitlines()) if line.get(HELD_OUT)]
    if not lines:
        return False
    target.parent.mkdir(exist_ok=True)
    with target.open('w', newline='') as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction='ignore', lineterminator='\n')
        writer.writeheader()
        writer.writerows(lines)
    return True


def curve(found: Sequence[Row], find: Callable[[Row], float]) -> dict[float, list[float]]:
    """A number of each seed, with its best sampler, by seconds."""
    by_time: dict[float, dict[int, list[float]]] = {}
    for row in found:
        if row['evaluations'] <= LIMIT:
            seeds = by_time.setdefault(row['seconds'], {})
            seeds.setdefault(row['seed'], []).append(find(row))
    return {time: [*map(min, by_time[time].values())] for time in sorted(by_time)}


def band(panel: Axes, values: Mapping[float, Sequence[float]], label: str) -> None:
    """Draws the mean of the values of each time, and a band from the lowest to the highest."""
    mean, low, high = ([find(each) for each in values.values()] for find in (np.mean, min, max))
    (line,) = panel.plot([*values], mean, marker='o', markersize=4, label=label)
    panel.fill_between([*values], low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def quality(found: Sequence[Row], path: pathlib.Path) -> None:
    """Fréchet distance of the best sampler against seconds of training; bands: range of seeds."""
    mine = [row for row in found if row['data'] == 'objects64']
    if not mine:
        return
    figure = Figure(figsize=(6.5, 4.4), layout='constrained')
    panel = figure.subplots()
    for case in dict.fromkeys(row['case'] for row in mine):
        own = [row for row in mine if row['case'] == case]
        band(panel, curve(own, lambda row: row['values']['train']['fid']), case)
    panel.set_xscale('log')
    panel.set_yscale('log')
    low, high = panel.get_ylim()
    panel.set_yticks([tick for tick in TICKS if low <= tick <= high])
    panel.set_xticks(sorted({row['seconds'] for row in mine}))
    panel.minorticks_off()
    for axis in (panel.xaxis, panel.yaxis):  # 200, not 2 · 10²
        axis.set_major_formatter(ScalarFormatter())
    panel.set_xlabel('training, s')
    panel.set_ylabel(f'Fréchet distance, at most {LIMIT} evaluations a sample')
    panel.grid(alpha=0.3, which='both')
    panel.legend(fontsize='small')
    figure.savefig(path, dpi=110)


def held_out(own: Sequence[Row], case: str) -> list[tuple[float, float]]:
    """Seconds, and loss on held-out images divided by that on training images.

    They are those of the log of a case, else of its rows.
    """
    log = HERE / f'logs/elephants64_{case}_seed0.csv'
    if log.exists():
        points = [
            (row['training_seconds'], row[HELD_OUT], row[SEEN])
            for row in csv.DictReader(log.read_text().splitlines())
            if row[HELD_OUT]
        ]
    else:
        points = sorted(
            {
                (row['training_seconds'], row['losses'][HELD_OUT], row['losses'][SEEN])
                for row in own
                if 'losses' in row
            }
        )
    return [(float(time), float(loss) / float(seen)) for time, loss, seen in points]


def overfitting(found: Sequence[Row], path: pathlib.Path) -> None:
    """Held-out loss and copies of the elephants against seconds; bands: range of samplers."""
    mine = [r for r in found if r['data'] == 'elephants64' and 'copies' in r['values']['train']]
    by_case = {r['case']: [o for o in mine if o['case'] == r['case']] for r in mine}
    ratios = {case: held_out(own, case) for case, own in by_case.items()}
    if not any(ratios.values()):
        return
    figure = Figure(figsize=(9, 4), layout='constrained')
    losses, shares = figure.subplots(1, 2)
    for i, (case, own) in enumerate(by_case.items()):
        if ratios[case]:
            losses.plot(*zip(*ratios[case], strict=True), f'C{i}', marker='o', markersize=4)
        times = sorted({row['seconds'] for row in own})
        copies = {
            t: [r['values']['train']['copies'] for r in own if r['seconds'] == t] for t in times
        }
        band(shares, copies, case)
    losses.set_yscale('log')
    losses.yaxis.set_major_formatter(ScalarFormatter())
    losses.yaxis.set_minor_formatter(ScalarFormatter())
    losses.set_ylabel('loss on held-out images / on training images')
    shares.set_ylabel('share of samples that are copies')
    for panel in (losses, shares):
        panel.set_xlabel('training, s')
        panel.set_ylim(bottom=1 if panel is losses else 0)
        panel.grid(alpha=0.3)
    shares.legend(fontsize='small')
    figure.savefig(path, dpi=110)


if __name__ == '__main__':
    ended = sys.argv[1:2] == ['endings']
    (endings if ended else main)([pathlib.Path(folder) for folder in sys.argv[1 + ended :]])
