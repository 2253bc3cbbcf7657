"""Runs a piece under compute-sanitizer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from support import sanitizer_output
from support.sanitizer import FLAGS, PYTEST_FLAGS, ROOT, SANITIZER, XLA_FLAGS, Piece
from support.sanitizer_output import Found

TOLD_LINES = 80  # of a tool's reports that are printed


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
    found = sanitizer_output.parse(output, timed_out=timed_out)
    if found.status in ('failed', 'crashed'):
        print(output[-4000:], flush=True)
    if found.status == 'errors':
        print(*sanitizer_output.lines(output)[:TOLD_LINES], sep='\n', flush=True)
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
