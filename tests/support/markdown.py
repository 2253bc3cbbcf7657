"""Markdown of the tables in the docs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ['---'] * len(head), *body]
    return '\n'.join(f'| {" | ".join(cells)} |' for cells in lines)
