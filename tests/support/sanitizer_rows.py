"""Reads the rows of `sanitizer_run`: which pieces they leave, in which order these run, what is
missing or bad, and the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from jaxunet.runtime.rows import Row
from support import markdown, sanitizer
from support.sanitizer import KERNELS, TOOLS, Piece

DONE = ('clean', 'errors', 'failed')  # states that are not tried again


def is_done(piece: Piece, rows: Sequence[Row], code: str) -> bool:
    """Returns True if rows of this code have all tests of the piece, and did not end early.

    Rows without a code, of earlier versions of this program, do not count.
    """
    covered: set[int] = set()
    for row in rows:
        if row.get('code') == code and row['status'] in DONE and _same(row, piece):
            covered.update(_cases(row))
    return covered >= set(range(piece.first, piece.first + len(piece.tests)))


def longest_first(pieces: Iterable[Piece], rows: Sequence[Row]) -> list[Piece]:
    """Returns the pieces in the order in which they run, so that no long one is left for the end.

    Those without a row of their cases come first, then those that took longest in any row, of
    whatever sources.
    """
    seconds: dict[tuple[object, ...], float] = {}
    for row in rows:
        if row['status'] in (*DONE, 'timeout'):
            key = (row['tool'], row['op'], row['kernels'], row['first'], row['tests'])
            seconds[key] = max(row['seconds'], seconds.get(key, 0))

    def expected(p: Piece) -> float:
        return seconds.get((p.tool, p.op, p.kernels, p.first, len(p.tests)), math.inf)

    return sorted(pieces, key=expected, reverse=True)


def gaps(pieces: Iterable[Piece], rows: Sequence[Row]) -> list[str]:
    """Returns a line for each piece that rows of the sources as they are now do not show clean.

    A row counts whatever device and versions it names. Of rows with the same ones, the newest of
    a case counts; those of pieces that ended early do not.
    """
    lines = []
    for piece in pieces:
        newest: dict[tuple[str, int], str] = {}
        for row in rows:
            if row['status'] in DONE and _same(row, piece) and _is_current(row):
                newest |= {(row['code'], case): row['status'] for case in _cases(row)}
        wanted = range(piece.first, piece.first + len(piece.tests))
        missing = len(set(wanted) - {case for _, case in newest})
        bad = len({case for (_, case), state in newest.items() if state != 'clean'} & set(wanted))
        told = [f'{missing} of {len(wanted)} cases not run for these sources'] if missing else []
        told += [f'{bad} cases in pieces with errors or failed tests'] if bad else []
        if told:
            lines.append(f'{piece.tool}, {piece.op}, {piece.kernels}: {"; ".join(told)}')
    return lines


def _is_current(row: Row) -> bool:
    return 'code' in row and row['code'] == sanitizer.code(row['op'], row)


def _cases(row: Row) -> range:
    return range(row['first'], row['first'] + row['tests'])


def _same(row: Row, piece: Piece) -> bool:
    return all(row[name] == getattr(piece, name) for name in ('tool', 'op', 'kernels', 'digest'))


def table(rows: Sequence[Row]) -> str:
    """Returns Markdown: a line for each op and set of kernels, a column for each tool.

    A cell counts the tests of the newest code with a row there; a row without a code stands for
    its commit.
    """
    body = []
    used: list[Row] = []
    for kernels, shown in KERNELS.items():
        for op in sanitizer.OPS:
            cells = []
            for tool in TOOLS:
                here = [
                    row
                    for row in rows
                    if (row['tool'], row['op'], row['kernels']) == (tool, op, kernels)
                ]
                newest = [row for row in here if _origin(row) == _origin(here[-1])]
                used += newest
                cells.append(_cell(newest))
            body.append([op, shown, *cells])
    text = markdown.table(('op', 'kernels', *TOOLS), body)
    if not used:
        return text
    devices = ', '.join(dict.fromkeys(row['device'] for row in used))
    commits = ', '.join(dict.fromkeys(str(row['git']) for row in used))
    several = f's {commits}: the cells are of several commits' if ', ' in commits else f' {commits}'
    versions = ', '.join(dict.fromkeys(row['sanitizer'] for row in used))
    return f'{text}\n\n{devices}, driver {used[-1]["driver"]}, {versions}, commit{several}.'


def _origin(row: Row) -> tuple[str | None, str]:
    return row.get('code', row['git']), row['digest']


def _cell(rows: Sequence[Row]) -> str:
    """Returns the cell of one op, set of kernels and tool."""
    newest = {row['first']: row for row in rows}
    if not newest:
        return 'not run'
    states = [row['status'] for row in newest.values()]
    tests = sum(row['tests'] for row in newest.values() if row['status'] in DONE)
    errors = sum(row['errors'] or 0 for row in newest.values() if row['status'] in DONE)
    skipped = sum(row['skipped'] for row in newest.values() if row['status'] in DONE)
    of = max(row['of'] for row in newest.values())
    parts = [f'{tests} of {of} cases' if tests < of else f'{tests} cases', f'{errors} errors']
    parts += [f'{skipped} skipped'] if skipped else []
    if failed := sum(row['failed'] for row in newest.values()):
        parts.append(f'{failed} failed')
    for state in ('timeout', 'no memory', 'crashed'):
        if state in states:
            parts.append(f'{states.count(state)} × {state}')
    return ', '.join(parts)
