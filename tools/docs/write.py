"""Writes the tables of README and docs, and the picture of the layers, from what they show.

    python tools/docs/write.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; its rows are in docs/results. The
layers are those of pyproject.toml. tests/docs/test_docs.py checks that both are up to date.
"""

from __future__ import annotations

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

from tools.docs.doc_tables import TABLES  # noqa: E402
from tools.docs.layers_picture import PICTURE, layers_picture  # noqa: E402

COMMAND = 'python tools/docs/write.py'
RESULTS = ('docs/results/README.md', 'docs/results/step/tried.md')
PAGES = sorted([*ROOT.glob('*.md'), *(ROOT / 'docs').glob('*.md'), *map(ROOT.joinpath, RESULTS)])
MARKED = re.compile(r'(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)', re.DOTALL)


def main() -> None:
    """Puts the tables into the pages, and writes the picture."""
    PICTURE.write_text(layers_picture())
    for page in PAGES:
        text = page.read_text()
        new = MARKED.sub(lambda match: f'{match[1]}{TABLES[match[2]]()}\n{match[4]}', text)
        if new != text:
            page.write_text(new)
            print(f'{page.relative_to(ROOT)}: tables rewritten')


if __name__ == '__main__':
    main()
