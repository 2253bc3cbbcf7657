"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[object], body: Iterable[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ['---'] * len(head), *body]
    return '\n'.join(f'| {" | ".join(map(str, cells))} |' for cells in lines)
