"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[object], body: Iterable[Sequence[object]], rule: str = ' --- ') -> str:
    """Returns a table in Markdown; `rule` stands below the head in each column."""
    first, *rows = (f'| {" | ".join(map(str, cells))} |' for cells in (head, *body))
    return '\n'.join([first, f'|{f"{rule}|" * len(head)}', *rows])
