"""Markdown of the tables in the docs."""

from __future__ import annotations

import math

from jaxunet.runtime.markdown import table

__all__ = ['cells', 'number', 'table']


def number(value: float, digits: int) -> str:
    """Returns a number with `digits` significant digits (all before the point) and no exponent."""
    if not value or not math.isfinite(value):
        return f'{value:g}'
    after = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    shown = f'{value:,.{after}f}'
    return shown.rstrip('0').rstrip('.') if after else shown


def cells(text: str) -> list[list[str]]:
    """Returns the cells of the tables in a text, by row, without the first two lines (the head)."""
    return [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in text.splitlines()
        if line.startswith('|')
    ][2:]
