"""Adds output folders of `jaxunet.compare.queue` to this folder, and draws its pictures.

    python docs/results/recipes/pictures.py runs/recipes/1 runs/recipes/2

Added are rows (rows.jsonl: a row replaces an earlier one of the same measurement; rows of other
features are dropped), grids of unpicked samples (grids/) and logs of held-out losses (logs/). From
them are drawn quality.png (Fréchet distance against seconds), objects.jpg and elephants.jpg
(samples by objective and seconds), images.jpg (64 samples of the objective of configs/images.py)
and overfitting.png (held-out loss and copies against seconds). Without folders it draws them again.
The tables come from rows.jsonl: `PYTHONPATH=tests python tests/docs/test_docs.py --write`.
"""

from __future__ import annotations

import csv
import json
import pathlib
import sys
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from PIL import Image, ImageDraw, ImageFont

HERE = pathlib.Path(__file__).parent
LIMIT = 50  # evaluations of the network a sample
TICKS = (20, 50, 100, 150, 200, 300, 500, 700, 1000, 2000)  # Fréchet distances
LABEL = 34  # pixels of a label's line
RECIPE = 'flow'  # the objective of configs/images.py
CASES = ('epsilon-linear', 'epsilon-cosine', 'v-cosine', 'edm', 'flow')
KEYS = ('data', 'case', 'seed', 'seconds', 'sampler')  # of a measurement
HELD_OUT, SEEN = 'held_out_loss', 'seen_loss'
COLUMNS = ('step', 'training_seconds', HELD_OUT, SEEN)  # of the logs

Row = dict  # a JSON object of rows.jsonl


def main(folders: Sequence[pathlib.Path]) -> None:
    """Adds the folders' results, and draws all pictures whose inputs are there."""
    found = add_rows(folders)
    for folder in folders:
        for picture in sorted(folder.glob('pictures/*.png')):
            (HERE / 'grids').mkdir(exist_ok=True)
            with Image.open(picture) as image:
                image.convert('RGB').save(HERE / 'grids' / f'{picture.stem}.jpg', quality=80)
        for log in sorted(folder.glob('logs/*.csv')):
            keep_log(log, HERE / 'logs' / log.name)
    quality(found, HERE / 'quality.png')
    objects = grids('objects64')
    # Half of each grid: all five objectives stand on one page.
    halves = {
        key: image.crop((0, 0, image.width, image.height // 2)) for key, image in objects.items()
    }
    samples(halves, HERE / 'objects.jpg')
    samples(grids('elephants64'), HERE / 'elephants.jpg')
    last = max((seconds for case, seconds in objects if case == RECIPE), default=None)
    if last is not None:
        objects[RECIPE, last].save(HERE / 'images.jpg', quality=85)
    overfitting(found, HERE / 'overfitting.png')


def add_rows(folders: Sequence[pathlib.Path]) -> list[Row]:
    """Adds the folders' rows to rows.jsonl; returns all, in the order of their cases."""
    path = HERE / 'rows.jsonl'
    files = [path, *(folder / 'rows.jsonl' for folder in folders)]
    rows = [
        json.loads(line)
        for file in files
        if file.exists()
        for line in file.read_text().splitlines()
    ]
    found = {
        tuple(row[key] for key in KEYS): row
        for row in rows
        if row.get('features') == rows[-1].get('features')
    }
    ordered = sorted(found.values(), key=lambda row: tuple(row[key] for key in KEYS))
    path.write_text(''.join(f'{json.dumps(row, ensure_ascii=False)}\n' for row in ordered))
    return ordered


def keep_log(log: pathlib.Path, target: pathlib.Path) -> None:
    """Copies the columns of held-out losses, if the run had any."""
    rows = [row for row in csv.DictReader(log.read_text().splitlines()) if row.get(HELD_OUT)]
    if not rows:
        return
    target.parent.mkdir(exist_ok=True)
    with target.open('w', newline='') as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction='ignore', lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)


def curve(
    found: Sequence[Row], find: Callable[[Row], float]
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds, and the mean, lowest and highest of seeds, each seed with its best sampler."""
    times = sorted({row['seconds'] for row in found})
    mean, low, high = [], [], []
    for time in times:
        rows = [r for r in found if r['seconds'] == time and r['evaluations'] <= LIMIT]
        seeds = {row['seed'] for row in rows}
        values = [min(find(r) for r in rows if r['seed'] == seed) for seed in seeds]
        mean.append(float(np.mean(values)))
        low.append(min(values))
        high.append(max(values))
    return times, mean, low, high


def quality(found: Sequence[Row], path: pathlib.Path) -> None:
    """Fréchet distance of the best sampler against seconds of training; bands: range of seeds."""
    mine = [row for row in found if row['data'] == 'objects64']
    if not mine:
        return
    figure = Figure(figsize=(6.5, 4.4), layout='constrained')
    panel = figure.subplots()
    for case in dict.fromkeys(row['case'] for row in mine):
        rows = [row for row in mine if row['case'] == case]
        times, mean, low, high = curve(rows, lambda row: row['values']['train']['fid'])
        (line,) = panel.plot(times, mean, marker='o', markersize=4, label=case)
        panel.fill_between(times, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
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


def grids(data: str, *, seed: int = 0) -> dict[tuple[str, float], Image.Image]:
    """Grids of unpicked samples by (objective, seconds), in the order of CASES and of time."""
    images: dict[tuple[str, float], Image.Image] = {}
    for case in CASES:
        for file in HERE.glob(f'grids/{data}_{case}_seed{seed}_*s.jpg'):
            with Image.open(file) as image:
                images[case, float(file.stem.rsplit('_', 1)[1][:-1])] = image.convert('RGB')
    return dict(sorted(images.items(), key=lambda item: (CASES.index(item[0][0]), item[0][1])))


def samples(grids: dict[tuple[str, float], Image.Image], path: pathlib.Path) -> None:
    """Grids on one page: a row an objective, a column a time."""
    if not grids:
        return
    cases = list(dict.fromkeys(case for case, _ in grids))
    times = sorted({seconds for _, seconds in grids})
    width, height = next(iter(grids.values())).size
    canvas = Image.new('RGB', (width * len(times), (height + LABEL) * len(cases)), 'white')
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(24)
    for (case, seconds), image in grids.items():
        left, top = times.index(seconds) * width, cases.index(case) * (height + LABEL)
        draw.text((left + 6, top + 2), f'{case}, {seconds:g} s', fill='black', font=font)
        canvas.paste(image, (left, top + LABEL))
    canvas.save(path, quality=82)


def overfitting(found: Sequence[Row], path: pathlib.Path) -> None:
    """Held-out loss and share of copies of the elephants against seconds of training."""
    logs = {
        log.name.split('_')[1]: list(csv.DictReader(log.read_text().splitlines()))
        for log in sorted(HERE.glob('logs/elephants64_*_seed0.csv'))
    }
    copies = [r for r in found if r['data'] == 'elephants64' and 'copies' in r['values']['train']]
    if not copies or not any(HELD_OUT in row for log in logs.values() for row in log):
        return
    figure = Figure(figsize=(9, 4), layout='constrained')
    losses, shares = figure.subplots(1, 2)
    for case, log in logs.items():
        points = [
            (float(row['training_seconds']), float(row[HELD_OUT]) / float(row[SEEN]))
            for row in log
            if row[HELD_OUT]
        ]
        if points:
            losses.plot(*zip(*points, strict=True), label=case)
        rows = [row for row in copies if row['case'] == case]
        if rows:
            times, mean, *_ = curve(rows, lambda row: row['values']['train']['copies'])
            shares.plot(times, mean, marker='o', markersize=4, label=case)
    losses.set_ylabel('loss on held-out images / on training images')
    shares.set_ylabel('share of samples that are copies')
    for panel in (losses, shares):
        panel.set_xlabel('training, s')
        panel.grid(alpha=0.3)
    shares.legend(fontsize='small')
    figure.savefig(path, dpi=110)


if __name__ == '__main__':
    main([pathlib.Path(argument) for argument in sys.argv[1:]])
