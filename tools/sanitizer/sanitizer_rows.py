"""Reads the rows of sanitizer runs: finds pieces to run and their order, gaps, and the table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from support import markdown

from jaxunet.runtime.rows import Row
from tools.sanitizer import sanitizer
from tools.sanitizer.sanitizer import KERNELS, TOOLS, Piece
from tools.sanitizer.sanitizer_output import IN_A_TEST

DONE = ('clean', 'errors', 'failed')  # cases with these statuses do not run again
LAST = ('timeout', *IN_A_TEST)  # cases with these statuses run again last, in this order


def left(
    pieces: Iterable[Piece],
    rows: Sequence[Row],
    codes: dict[str, str],
    times: Sequence[Row] = (),
) -> list[Piece]:
    """Returns the pieces of the cases that still have to run.

    A case is done if a row with the code of its op says so. A case that stalled or crashed before
    is a piece by itself, so that it does not stop others.

    Args:
      pieces: all pieces.
      rows: the rows so far.
      codes: code of each op (`sanitizer.code`); rows with another code, or without one, do not
        count. With no codes at all, no case is done.
      times: older rows, which only show what stalled or crashed.
    """
    newest = _newest([*times, *rows])

    def together(piece: Piece, case: int, done: set[int]) -> int | None:
        """Returns None for a case that is done, its number if it runs alone, -1 for others."""
        row = newest.get(_key(piece, case))
        alone = row is not None and row['status'] in IN_A_TEST and row['tests'] == 1
        return None if case in done else case if alone else -1

    waiting: list[Piece] = []
    for piece in pieces:
        done: set[int] = set()
        for row in rows:
            if row['status'] in DONE and row.get('code') == codes.get(piece.op, ''):
                done.update(_cases(row) if _same(row, piece) else ())
        at = 0
        for value, group in itertools.groupby(
            together(piece, case, done) for case in piece.cases()
        ):
            end = at + len(list(group))
            if value is not None:
                waiting.append(piece.part(at, end))
            at = end
    return waiting


def in_order(pieces: Iterable[Piece], rows: Sequence[Row]) -> list[Piece]:
    """Returns the pieces in the order in which they run.

    No long piece is left for the end, and no piece that hangs delays the start of others. Pieces
    without a row for their cases come first, then those that took longest in any row, of any
    sources. If the newest row of a case says that it took too long, crashed or stalled, its piece
    comes after all others: in the order of these statuses, then the shortest first.
    """
    seconds: dict[tuple[object, ...], float] = {}
    for row in rows:
        if row['status'] in DONE:
            key = (row['tool'], row['op'], row['kernels'], row['first'], row['tests'])
            seconds[key] = max(row['seconds'], seconds.get(key, 0))
    newest = _newest(rows)

    def place(p: Piece) -> tuple[int, float]:
        rows = [newest.get(_key(p, case)) for case in p.cases()]
        stopped = [
            (LAST.index(row['status']) + 1, row['seconds'])
            for row in rows
            if row is not None and row['status'] in LAST
        ]
        if stopped:
            return max(stopped)
        return 0, -seconds.get((p.tool, p.op, p.kernels, p.first, len(p.tests)), math.inf)

    return sorted(pieces, key=place)


def gaps(pieces: Iterable[Piece], rows: Sequence[Row]) -> list[str]:
    """Returns a line for each piece that is not clean by the rows of the current sources.

    Rows of any device and versions count. Among rows with the same device and versions, the newest
    row of a case counts; rows of pieces that ended early, stalled or crashed prove nothing.
    """
    lines = []
    for piece in pieces:
        newest: dict[tuple[str, int], str] = {}
        ended: dict[int, str] = {}  # status of cases whose rows prove nothing
        for row in rows:
            if row['status'] in (*DONE, *IN_A_TEST) and _same(row, piece) and _is_current(row):
                if row['status'] in DONE:
                    newest |= {(row['code'], case): row['status'] for case in _cases(row)}
                else:
                    ended |= {case: row['status'] for case in _cases(row)}
        wanted = set(piece.cases())
        missing = wanted - {case for _, case in newest}
        bad = {case for (_, case), state in newest.items() if state != 'clean'} & wanted
        told = []
        if missing:
            told.append(f'{len(missing)} of {len(wanted)} cases not run for these sources')
        for state in IN_A_TEST:
            if cases := [case for case in missing if ended.get(case) == state]:
                told.append(f'{len(cases)} of these in pieces that {state}')
        if bad:
            told.append(f'{len(bad)} cases in pieces with errors or failed tests')
        if told:
            lines.append(f'{piece.tool}, {piece.op}, {piece.kernels}: {"; ".join(told)}')
    return lines


def _is_current(row: Row) -> bool:
    return 'code' in row and row['code'] == sanitizer.code(row['op'], row)


def _cases(row: Row) -> range:
    return range(row['first'], row['first'] + row['tests'])


def _same(row: Row, piece: Piece) -> bool:
    return all(row[name] == getattr(piece, name) for name in ('tool', 'op', 'kernels', 'digest'))


def _key(piece: Piece, case: int) -> tuple[object, ...]:
    return piece.tool, piece.op, piece.kernels, case


def _newest(rows: Sequence[Row]) -> dict[tuple[object, ...], Row]:
    """Returns for each case the newest row, of any sources, that says how long it takes."""
    return {
        (row['tool'], row['op'], row['kernels'], case): row
        for row in rows
        if row['status'] in (*DONE, *LAST)
        for case in _cases(row)
    }


def table(rows: Sequence[Row]) -> str:
    """Returns Markdown: a line for each op and set of kernels, a column for each tool.

    A cell counts the tests of the newest code that has a row for it; for a row without a code, the
    commit takes its place.
    """
    body = []
    used: list[Row] = []
    for kernels in KERNELS:
        for op in sanitizer.ops_of(kernels):
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
            body.append([op, kernels, *cells])
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
    if not rows:
        return 'not run'
    newest = {case: row for row in rows for case in _cases(row)}
    used = list({id(row): row for row in newest.values()}.values())
    states = [row['status'] for row in used]
    tests = sum(row['status'] in DONE for row in newest.values())
    errors = sum(row['errors'] or 0 for row in used if row['status'] in DONE)
    skipped = sum(row['skipped'] for row in used if row['status'] in DONE)
    of = max(row['of'] for row in used)
    parts = [f'{tests} of {of} cases' if tests < of else f'{tests} cases', f'{errors} errors']
    parts += [f'{skipped} skipped'] if skipped else []
    if failed := sum(row['failed'] for row in used):
        parts.append(f'{failed} failed')
    for state in (*LAST, 'no memory'):
        if state in states:
            parts.append(f'{states.count(state)} × {state}')
    return ', '.join(parts)
