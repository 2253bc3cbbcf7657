"""Processes and their threads from Linux's /proc; on other systems, only the process itself."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import time
from typing import NamedTuple

PROC = pathlib.Path('/proc')


class Stat(NamedTuple):
    """A process or thread: its name, its state as a letter, its parent, and seconds of the CPU."""

    name: str
    state: str
    parent: int
    seconds: float


def family(pid: int) -> list[int]:
    """Returns the ids of a process and of all its descendants."""
    children: dict[int, list[int]] = {}
    for path in PROC.glob('[0-9]*'):
        with contextlib.suppress(OSError):  # it has ended
            children.setdefault(_stat(path).parent, []).append(int(path.name))
    found = [pid]
    for parent in found:  # grows during the loop
        found += children.get(parent, [])
    return found


def busiest_threads(pid: int, most: int = 8) -> list[str]:
    """Returns a line for each of the `most` threads of a family that used most CPU time."""
    found: list[tuple[float, str]] = []
    for process in family(pid):
        for path in (PROC / str(process) / 'task').glob('[0-9]*'):
            with contextlib.suppress(OSError):
                stat = _stat(path)
                line = f'{stat.name}, thread {path.name} of process {process}, {stat.state}'
                found.append((stat.seconds, f'{line}, {stat.seconds:.1f} s'))
    return [line for _, line in sorted(found, reverse=True)[:most]]


def assert_ended(pid: int, seconds: float = 30) -> None:
    """Waits for the end of a process, which need not be a child of this one.

    Raises:
      AssertionError: it still runs after `seconds`; it is then killed.
    """
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        states = subprocess.run(
            ['ps', '-o', 'stat=', '-p', str(pid)], capture_output=True, text=True, check=False
        )
        if states.stdout.strip()[:1] in ('', 'Z'):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError(f'process {pid} goes on')


def _stat(path: pathlib.Path) -> Stat:
    """Reads the file `stat` of a process or thread (proc_pid_stat(5))."""
    text = (path / 'stat').read_text(encoding='utf-8', errors='replace')
    name, _, rest = text.partition('(')[2].rpartition(')')  # a name may have parentheses
    fields = rest.split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')
    return Stat(name, fields[0], int(fields[1]), seconds)
