"""Adds rows of `jaxunet.compare.queue` to this folder, and draws seeds.png.

    PYTHONPATH=tests python docs/results/methods/collect.py runs/methods runs/more

Each folder has a rows.jsonl (`tests/gpu/recipes.sh pack`, or an --output of the queue). A row
replaces an earlier one of the same measurement; rows of other features, or with another time of a
step, are refused. Without folders it draws again. seeds.png shows the distances of each method
against seconds of training: means over seeds, and bars of one standard error. The tables come from
rows.jsonl: `PYTHONPATH=tests python tests/docs/test_docs.py --write`.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence

from matplotlib.figure import Figure
from support.method_tables import DISTANCES, PICTURE, methods_of
from support.seed_statistics import KEYS, Cells, cells, mean_over, read

from jaxunet.runtime.whole_files import written

HERE = pathlib.Path(__file__).parent


def main(folders: Sequence[pathlib.Path]) -> None:
    """Adds the folders' rows, and draws the plot if there are any."""
    path = HERE / 'rows.jsonl'
    rows = read([path, *(folder / 'rows.jsonl' for folder in folders)])
    rows.sort(key=lambda row: tuple(row[key] for key in KEYS))
    with written(path) as file:
        file.write_text(''.join(f'{json.dumps(row, ensure_ascii=False)}\n' for row in rows))
    if rows:
        draw(cells(rows), HERE / PICTURE)
    print(f'{path}: {len(rows)} rows')


def draw(found: Cells, path: pathlib.Path) -> None:
    """Draws a panel for each distance."""
    figure = Figure(figsize=(12, 5.2), layout='constrained')
    panels = figure.subplots(1, len(DISTANCES))
    styles = ('-', '--', ':')
    for panel, (metric, find) in zip(panels, DISTANCES.items(), strict=True):
        for number, name in enumerate(methods_of(found)):
            times = sorted(time for case, time in found if case == name)
            means = [mean_over([find(row) for row in found[name, time]]) for time in times]
            panel.errorbar(
                times,
                [mean.value for mean in means],
                # With one seed there is no error to show.
                yerr=[mean.error if mean.count > 1 else 0.0 for mean in means],
                label=f'{name} ({max(mean.count for mean in means)})',
                linestyle=styles[number // 10 % len(styles)],
                marker='o',
                markersize=3,
                capsize=3,
            )
        panel.set_xscale('log')
        panel.set_yscale('log')
        panel.set_xlabel('training, s')
        panel.set_ylabel(metric)
        panel.grid(alpha=0.3, which='both')
    panels[-1].legend(
        fontsize='small', title='method (seeds)', loc='center left', bbox_to_anchor=(1, 0.5)
    )
    figure.savefig(path, dpi=110)


if __name__ == '__main__':
    main([pathlib.Path(argument) for argument in sys.argv[1:]])
