"""Adds what tools/gpu/few_steps.sh packed to this folder, and draws a picture of each set.

    PYTHONPATH=. python docs/results/few_steps/pictures.py FOLDER ...

Rows go to rows.jsonl, where a later one replaces an earlier one of the same measurement. SET.jpg
has 64 unpicked samples of the teacher, and in 1, 2 and 4 evaluations of the tuned model whose
distance in two is the smallest. `python tools/docs/write.py` writes the tables.
"""

from __future__ import annotations

import io
import pathlib
import sys
import tarfile
from collections.abc import Sequence

from PIL import Image, ImageDraw

from jaxunet.compare import collected
from jaxunet.runtime import rows
from jaxunet.runtime.rows import Row

HERE = pathlib.Path(__file__).parent
SHOWN = ('heun:25', 'consistency:1', 'consistency:2', 'consistency:4')
QUALITY, MARGIN = 42, 22  # of the JPEG; pixels above a grid, for its caption


def main(folders: Sequence[pathlib.Path]) -> None:
    """Adds the folders' rows and draws the pictures."""
    path = HERE / 'rows.jsonl'
    files = [path, *(folder / 'rows.jsonl' for folder in folders)]
    found = rows.latest(files, collected.key_of, lambda *_: None)
    kept = [found[key] for key in sorted(found)]
    collected.write(path, kept)
    grids: dict[str, Image.Image] = {}
    for folder in folders:
        with tarfile.open(folder / 'pictures.tar') as archive:
            for member in archive.getmembers():
                if member.name.endswith('.jpg'):
                    data = archive.extractfile(member).read()
                    grids[pathlib.Path(member.name).stem] = Image.open(io.BytesIO(data))
    for data in dict.fromkeys(row['data'] for row in kept):
        panels = [panel for sampler in SHOWN if (panel := shown(data, sampler, kept, grids))]
        if len(panels) == len(SHOWN):
            joined(panels).save(HERE / f'{data}.jpg', quality=QUALITY)


def shown(
    data: str, sampler: str, kept: Sequence[Row], grids: dict[str, Image.Image]
) -> tuple[str, Image.Image] | None:
    """Returns the caption and the grid of the teacher, or of the best tuning of seed 0."""
    mine = [row for row in kept if (row['data'], row['seed']) == (data, 0)]
    drawn = [row for row in mine if row['sampler'] == sampler and name(row, sampler) in grids]
    two = {row['case']: row['values']['train']['fid'] for row in mine if row['evaluations'] == 2}
    if not drawn:
        return None
    row = min(drawn, key=lambda row: two.get(row['case'], 0.0))
    kind = 'teacher' if row['case'] == 'teacher' else f'tuned for {row["seconds"]:g} s'
    evaluations = row['evaluations']
    return f'{kind}, {evaluations} evaluation{"s" * (evaluations > 1)}', grids[name(row, sampler)]


def name(row: Row, sampler: str) -> str:
    """Returns the name of the grid of a row."""
    return f'{row["data"]}_{row["case"]}_seed0_{row["seconds"]:g}s_{sampler.replace(":", "")}'


def joined(panels: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Returns the grids in two rows, each below its caption."""
    width, height = panels[0][1].size
    picture = Image.new('RGB', (2 * width + MARGIN, 2 * (height + MARGIN)), 'white')
    draw = ImageDraw.Draw(picture)
    for place, (caption, grid) in enumerate(panels):
        x, y = place % 2 * (width + MARGIN), place // 2 * (height + MARGIN)
        draw.text((x + 4, y + 5), caption, fill='black')
        picture.paste(grid, (x, y + MARGIN))
    return picture


if __name__ == '__main__':
    main([pathlib.Path(folder) for folder in sys.argv[1:]])
