"""Runs a piece under compute-sanitizer, stops it if it hangs, and finds the test that crashed.

A process that hangs would waste GPU time, so the piece must report each test that ends.
`pytest_progress` does that. Environment variables load it, because pytest's flags are part of
`sanitizer.code`: if they changed, earlier rows would no longer count.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from support import processes

from tools.sanitizer import pytest_progress, sanitizer_output, sanitizer_ports
from tools.sanitizer.sanitizer import FLAGS, PYTEST_FLAGS, ROOT, SANITIZER, XLA_FLAGS, Piece
from tools.sanitizer.sanitizer_output import RunResult

TESTS = pathlib.Path(__file__).resolve().parents[2] / 'tests'
TOLD_LINES = 80  # most printed lines of a tool's reports
TOLD_CHARACTERS = 4000  # most printed characters from the end of the output
POLL = 0.2  # seconds
BEFORE = 'before the first test'
PYTEST_FRAMES = ('/_pytest/', '/pluggy/')  # frames that printed stacks leave out


class Limits(NamedTuple):
    """Time limits of a piece, in seconds.

    Fields:
      all: for the whole piece.
      stall: for one test, and from the end of the last test to the end of the process.
      start: until the first test begins.
    """

    all: float
    stall: float
    start: float


def run(piece: Piece, limits: Limits) -> tuple[RunResult, float]:
    """Runs a piece; returns what was found, and the seconds that it took.

    If a piece reaches a limit, its Python stacks and its busiest threads are printed, and it is
    stopped with all processes that it started. If a piece crashes, the end of its output is
    printed.
    """
    began = time.monotonic()
    with (
        sanitizer_ports.reserved() as port,
        tempfile.TemporaryDirectory(prefix='sanitizer-', ignore_cleanup_errors=True) as name,
    ):
        folder = pathlib.Path(name)
        command = [SANITIZER, '--tool', piece.tool, *FLAGS, *sanitizer_ports.flags(port)]
        # A file, because a process that outlives the others could keep a pipe open.
        with (folder / 'output').open('wb') as file:
            process = subprocess.Popen(
                [*command, sys.executable, '-m', 'pytest', *PYTEST_FLAGS, *piece.tests],
                cwd=ROOT,
                env=environment(piece.kernels, folder),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        stacks, threads = '', []
        try:
            stopped = _watch(process, folder, limits, began)
            where = _where(_events(folder))
            if stopped:
                threads = processes.busiest_threads(process.pid)
                stacks = _stacks(folder)
        finally:
            _end(process)
        output = (folder / 'output').read_text(encoding='utf-8', errors='replace')
    report = sanitizer_output.parse(
        output, stopped=stopped, where=where, exit_status=process.returncode
    )
    if stopped:
        report = report._replace(reports=_innermost(stacks))
        tell_end(piece, f'stopped, {where}', output, stacks, threads)
    elif report.status == 'crashed':
        tell_end(piece, report.ending(), output)
    elif report.status == 'failed':
        print(output[-TOLD_CHARACTERS:], flush=True)
    elif report.status == 'errors':
        print(*sanitizer_output.lines(output)[:TOLD_LINES], sep='\n', flush=True)
    return report, round(time.monotonic() - began, 1)


def divide(piece: Piece, report: RunResult) -> tuple[Piece, Piece | None, Piece | None]:
    """Returns the piece that a result is about, and pieces of the tests before and after it.

    If a test stalled or crashed, the result is about this test alone: the tool reports nothing on
    the tests before, because their process did not reach its end. Otherwise it is about the whole
    piece.
    """
    if report.status not in sanitizer_output.IN_A_TEST or report.where not in piece.tests:
        return piece, None, None
    at, end = piece.tests.index(report.where), len(piece.tests)
    before = piece.part(0, at) if at else None
    after = piece.part(at + 1, end) if at + 1 < end else None
    return piece.part(at, at + 1), before, after


def tell_end(
    piece: Piece, how: str, output: str, stacks: str = '', threads: Sequence[str] = ()
) -> None:
    """Prints how and where a piece ended early; in one call, because others print too."""
    parts = [f'{piece.title()}: {how}', output[-TOLD_CHARACTERS:].strip(), stacks]
    parts += ['Threads that used most of the CPU:\n' + '\n'.join(threads)] if threads else []
    print('\n\n'.join(filter(None, parts)), flush=True)


def environment(kernels: str, folder: pathlib.Path) -> dict[str, str]:
    """Returns the environment of a run that reports its tests to files in `folder`.

    XLA's autotuner is off, because its own candidates make racecheck fail before any kernel of ours
    has run. JAX does not preallocate memory, because the tools need most of the GPU's.
    """
    path = ['.', os.environ.get('PYTHONPATH'), str(TESTS)]
    plugins = [os.environ.get('PYTEST_PLUGINS'), pytest_progress.__name__]
    return (
        {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.03'}
        | os.environ
        | {
            'PYTHONPATH': os.pathsep.join(filter(None, path)),
            'JAXUNET_KERNELS': kernels,
            'JAXUNET_REQUIRE_EXTENSION': '1',
            'XLA_FLAGS': f'{XLA_FLAGS} {os.environ.get("XLA_FLAGS", "")}',
            'PYTEST_PLUGINS': ','.join(filter(None, plugins)),
            pytest_progress.VARIABLE: str(folder),
        }
    )


def _watch(
    process: subprocess.Popen[bytes], folder: pathlib.Path, limits: Limits, began: float
) -> str:
    """Waits for the end of a process; returns the limit that stopped it, or ''."""
    events: list[str] = []
    changed = began
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL)
            return ''
        now = time.monotonic()
        if (newer := _events(folder)) != events:
            events, changed = newer, now
        if now - changed > (limits.stall if events else limits.start):
            return 'stalled'
        if now - began > limits.all:
            return 'timeout'


def _events(folder: pathlib.Path) -> list[str]:
    """Returns the lines of `pytest_progress`."""
    path = folder / pytest_progress.TESTS
    return path.read_text(encoding='utf-8').splitlines() if path.exists() else []


def _where(events: list[str]) -> str:
    """Returns the test that has begun and not ended, or 'after' and the last test that ended."""
    if not events:
        return BEFORE
    event, _, test = events[-1].partition(' ')
    return test if event == 'begin' else f'after {test}'


def _stacks(folder: pathlib.Path) -> str:
    """Returns the Python stacks of the process that runs the tests, without frames of pytest."""
    number, stacks = folder / pytest_progress.PROCESS, folder / pytest_progress.STACKS
    if not number.exists():
        return 'No Python stacks: pytest has not begun.'
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(number.read_text(encoding='utf-8')), signal.SIGUSR1)
    text, stop = '', time.monotonic() + 10
    while time.monotonic() < stop:
        time.sleep(POLL)
        earlier, text = text, stacks.read_text(encoding='utf-8', errors='replace')
        if text and text == earlier:
            break
    kept = [line for line in text.splitlines() if not any(part in line for part in PYTEST_FRAMES)]
    return '\n'.join(kept) or 'No Python stacks: the process did not react to the signal.'


def _innermost(stacks: str) -> list[str]:
    """Returns the innermost lines of the main thread's stack, which comes last."""
    lines = [line.strip() for line in stacks.rsplit('\n\n', maxsplit=1)[-1].splitlines()]
    return [line for line in lines if line.startswith('File')][: sanitizer_output.KEPT]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started, because pytest goes on if only the tool crashes."""
    if process.poll() is None:
        for pid in processes.family(process.pid):  # some may have left the group
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:  # it may hang in a driver, perhaps for ever
        print(f'process {process.pid} does not end', flush=True)
