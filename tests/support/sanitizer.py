"""Runs the small cases of every kernel under compute-sanitizer, in pieces that fit into a limited
time, and keeps a row for each piece; `tests/gpu/sanitize.py` is its command.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxunet.runtime.rows import Row
from support import markdown, tested_sources

ROOT = pathlib.Path(__file__).resolve().parents[2]
SANITIZER = 'compute-sanitizer'
TOOLS = ('memcheck', 'racecheck', 'synccheck', 'initcheck')
KERNELS = {'fastest': 'fastest', 'portable': 'portable'}  # JAXUNET_KERNELS, its name in the table
FLAGS = (
    *('--print-limit', '20', '--target-processes', 'all'),
    *('--kernel-name-exclude', 'kernel_substring=xla'),
)
PYTEST_FLAGS = ('-q', '-n', '0', '-m', '', '-p', 'no:benchmark', '-p', 'no:cacheprovider')
XLA_FLAGS = '--xla_gpu_autotune_level=0'
TOLD_LINES = 80  # of a tool's reports that are printed
DONE = ('clean', 'errors', 'failed')  # states that are not tried again


class Op(NamedTuple):
    """The tests of an op: a file, and the expression that selects its small cases (pytest -k)."""

    path: str
    select: str


OPS = {
    'cuda attention': Op(
        'xla_ffi/attention/parity_test.py',
        'awkward or (hopper_shapes and (b1- or b2- or b3- or b5-)) or (every_case and 16_tokens)',
    ),
    'cuda conv3x3': Op(
        'xla_ffi/conv3x3/parity_test.py',
        'awkward or activation_inside or other_readers or of_their_own or without_pixels '
        'or side_by_side or (every_case and (64x64_64to3 or 64x64_3to64)) '
        'or (through_the_norm and not identical and (not every_tile or 33x35))',
    ),
    'cuda group_norm': Op(
        'xla_ffi/group_norm/parity_test.py',
        'awkward or (other_readers and not every_kernel) or statistics or in_registers '
        'or activation_again or from_sums or (large_images and (57x57 or 31x33))',
    ),
    'cuda linear': Op('xla_ffi/linear/parity_test.py', 'awkward or gradients_have'),
    'cuda adamw': Op(
        'xla_ffi/adamw/parity_test.py',
        'awkward or identical or (every_case and many) or not_taken or are_kept '
        'or sum_of_squares or narrow_as_astype',
    ),
    'pallas attention': Op('pallas_kernels/attention/parity_test.py', 'awkward'),
    'pallas conv3x3': Op(
        'pallas_kernels/conv3x3/parity_test.py', 'awkward or (every_case and 4x4_256)'
    ),
    'pallas group_norm': Op('pallas_kernels/group_norm/parity_test.py', 'awkward'),
}


class Piece(NamedTuple):
    """Tests that run in one process.

    Fields:
      first: the number of its first test among all of the op.
      of: tests of the op.
      digest: of the names of all tests of the op, so that rows of other tests do not count.
    """

    tool: str
    op: str
    kernels: str
    first: int
    tests: tuple[str, ...]
    of: int
    digest: str

    def row(self) -> Row:
        """Returns the fields of a row that name the piece."""
        return self._asdict() | {'tests': len(self.tests)}


class Found(NamedTuple):
    """The result of a run.

    Fields:
      errors: those that the tool counted; None if it ended without its summary.
      status: clean; errors: the tool found some; failed: a test failed, or none passed; timeout;
        no memory: the GPU had too little for the test or the tool; crashed: no summary.
      reports: the first lines of the tool's reports.
    """

    passed: int
    failed: int
    skipped: int
    errors: int | None
    status: str
    reports: list[str]


SUMMARY = re.compile(
    r'^=+ (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed .*)$',
    re.MULTILINE,
)
# Every report begins with a line that is indented by one space; those of its details by more.
REPORT = re.compile(r'^========= (?! )(?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY)(.+)$')
NO_MEMORY = re.compile(
    r'Unable to allocate enough memory|CUDA_ERROR_OUT_OF_MEMORY|RESOURCE_EXHAUSTED: Out of memory'
    r'|no supported devices found'
)
COUNT = re.compile(r'(\d+) (passed|failed|skipped|errors?)\b')


def parse(output: str, *, timed_out: bool = False) -> Found:
    """Returns what the output of compute-sanitizer around pytest says.

    Processes that the tool follows have a summary each; their errors are added.
    """
    summaries = [int(a or b) for a, b in SUMMARY.findall(output)]
    errors = sum(summaries) if summaries else None
    ends = [line for line in output.splitlines() if re.search(r'\bin [\d.:]+s\b', line)]
    counts = dict.fromkeys(('passed', 'failed', 'skipped', 'error', 'errors'), 0)
    counts |= {name: int(n) for n, name in COUNT.findall(ends[-1] if ends else '')}
    failed = counts['failed'] + counts['error'] + counts['errors']
    if timed_out:
        status = 'timeout'
    elif NO_MEMORY.search(output):
        status = 'no memory'
    elif errors is None:
        status = 'crashed'
    elif errors:
        status = 'errors'
    else:
        status = 'failed' if failed or not counts['passed'] else 'clean'
    reports = [m[1] for line in output.splitlines() if (m := REPORT.match(line))]
    return Found(counts['passed'], failed, counts['skipped'], errors, status, reports[:5])


def collect(op: Op) -> list[str]:
    """Returns the names of an op's small cases.

    Raises:
      RuntimeError: pytest selects none.
    """
    command = [sys.executable, '-m', 'pytest', '--collect-only', '-q', '-n', '0', '-m', '']
    done = subprocess.run(
        [*command, op.path, '-k', op.select],
        cwd=ROOT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
        check=False,
    )
    names = [line for line in done.stdout.splitlines() if '::' in line]
    if not names:
        raise RuntimeError(f'{op.path}: no test is selected by -k "{op.select}"\n{done.stdout}')
    return names


def pieces(
    tools: Sequence[str],
    ops: Sequence[str],
    kernels: Sequence[str],
    size: int,
    find: Callable[[Op], list[str]] = collect,
) -> Iterator[Piece]:
    """Yields the pieces of at most `size` tests."""
    tests = {op: find(OPS[op]) for op in ops}
    for kind in kernels:
        for tool in tools:
            for op, names in tests.items():
                digest = hashlib.sha256('\n'.join(names).encode()).hexdigest()[:12]
                for first in range(0, len(names), size):
                    part = tuple(names[first : first + size])
                    yield Piece(tool, op, kind, first, part, len(names), digest)


def code(op: str, origin: Row) -> str:
    """Returns a digest of all that decides what the tests of an op run.

    It covers the files that `tested_sources.files` finds by imports and #include lines, the flags
    of the tools, and the origin's device and versions of jax, nvcc and compute-sanitizer, where it
    has them.

    Args:
      origin: a row, or the fields of rows that say where they come from.
    """
    versions = [origin.get('versions', {}).get('jax')]
    versions += [origin.get(name) for name in ('device', 'nvcc', 'sanitizer')]
    told = [tested_sources.digest(OPS[op].path), FLAGS, PYTEST_FLAGS, XLA_FLAGS, versions]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]


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
    return 'code' in row and row['code'] == code(row['op'], row)


def _cases(row: Row) -> range:
    return range(row['first'], row['first'] + row['tests'])


def _same(row: Row, piece: Piece) -> bool:
    return all(row[name] == getattr(piece, name) for name in ('tool', 'op', 'kernels', 'digest'))


def run(piece: Piece, seconds: float) -> tuple[Found, float]:
    """Runs a piece; returns what was found, and the seconds that it took.

    A piece that takes longer than `seconds` is ended with all processes that it started.
    """
    command = [SANITIZER, '--tool', piece.tool, *FLAGS, sys.executable, '-m', 'pytest']
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, *PYTEST_FLAGS, *piece.tests],
        cwd=ROOT,
        env=environment(piece.kernels),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    timed_out = False
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    found = parse(output, timed_out=timed_out)
    if found.status in ('failed', 'crashed'):
        print(output[-4000:], flush=True)
    if found.status == 'errors':
        told = [line for line in output.splitlines() if line.startswith('=========')]
        print(*told[:TOLD_LINES], sep='\n', flush=True)
    return found, round(time.monotonic() - began, 1)


def environment(kernels: str) -> dict[str, str]:
    """Returns the environment of a run.

    XLA's autotuner is off: its own candidates make racecheck fail before a kernel of ours has run.
    The tools need most of the GPU's memory for themselves.
    """
    path = os.pathsep.join(filter(None, ['.', os.environ.get('PYTHONPATH')]))
    return (
        {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.03'}
        | os.environ
        | {
            'PYTHONPATH': path,
            'JAXUNET_KERNELS': kernels,
            'JAXUNET_REQUIRE_EXTENSION': '1',
            'XLA_FLAGS': f'{XLA_FLAGS} {os.environ.get("XLA_FLAGS", "")}',
        }
    )


def table(rows: Sequence[Row]) -> str:
    """Returns Markdown: a line for each op and set of kernels, a column for each tool.

    A cell counts the tests of the newest code with a row there; a row without a code stands for
    its commit.
    """
    body = []
    used: list[Row] = []
    for kernels, shown in KERNELS.items():
        for op in OPS:
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
