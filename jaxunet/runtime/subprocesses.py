"""Processes of measurements: each in a session of its own, its failure a sentence, beside others on GPUs of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

TIMEOUT, CRASH, OUT_OF_MEMORY = 'timeout', 'crash', 'out of memory'  # how a process fails
LAST_WORDS = 300  # characters of a crashed process's log that are told
Row = dict[str, Any]


@dataclass
class Answer:
    """What a process said, or why it said nothing."""

    row: Row | None
    failure: tuple[str, str] = ('', '')  # status and reason


class Stopped(Exception):
    """The processes of `pool` were ended: what this one would have said is nobody's result."""


_starting = threading.Lock()  # held from before a process starts until it is among the running ones
_running: set[subprocess.Popen[str]] = set()
_stopped = False


def answer(
    command: list[str],
    env: dict[str, str],
    timeout: float,
    log: pathlib.Path | None,
    *,
    json_output: bool = True,
) -> Answer:
    """Runs a command whose last line of output is a JSON object (or which need not say anything)."""
    with _log_file(log, command) as stderr, _started(command, env, stderr) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return Answer(None, (TIMEOUT, f'not done after {timeout:g} s (--timeout)'))
    if _stopped:
        raise Stopped
    if process.returncode == 0 and not json_output:
        return Answer(None)
    with contextlib.suppress(IndexError, ValueError):
        row = json.loads(out.splitlines()[-1])
        if isinstance(row, dict) and process.returncode == 0:
            return Answer(row)
    said = log.read_text(errors='replace').partition('\n')[2] if log else err  # after the command
    return Answer(None, _failure(process.returncode, said))


@contextlib.contextmanager
def _started(
    command: list[str], env: dict[str, str], stderr: Any
) -> Iterator[subprocess.Popen[str]]:
    """The process, which does not outlive the block."""
    with contextlib.ExitStack() as ends:
        with _signals_later(), _starting:
            if _stopped:
                raise Stopped
            # A session of its own, so that its worker processes can be ended with it.
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
            ends.enter_context(process)
            _running.add(process)
            ends.callback(_end, process)
        yield process


def _end(process: subprocess.Popen[str]) -> None:
    _running.discard(process)
    _kill(process)


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block is over, as a Popen that is interrupted while it starts forgets its process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {
        which: signal.signal(which, lambda number, _: came.append(number))
        for which in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for which, handler in handlers.items():
            signal.signal(which, handler)
        for number in came:
            signal.raise_signal(number)


@contextlib.contextmanager
def _log_file(log: pathlib.Path | None, command: list[str]) -> Iterator[Any]:
    if log is None:
        yield subprocess.PIPE
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open('w') as file:
        print(shlex.join(command), file=file, flush=True)
        yield file


def _failure(code: int, log: str) -> tuple[str, str]:
    """Status and reason of a process that ended without an answer."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    words = lines[-1][-LAST_WORDS:] if lines else 'no output'
    if code == -signal.SIGKILL:
        return (
            OUT_OF_MEMORY,
            'killed by the system (SIGKILL), as it does when the memory of this machine is full',
        )
    if code < 0:
        return CRASH, f'ended by {signal.Signals(-code).name}: {words}'
    return CRASH, f'exit code {code}: {words}'


def _kill(process: subprocess.Popen[str]) -> None:
    """The process and all that it started, if it still runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _cores(parts: int) -> list[set[int]]:
    """The cores that this process may use in equal parts; empty ones if there are too few, or where Linux's affinity is not known."""
    found = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []
    size = len(found) // parts
    return [set(found[i * size : (i + 1) * size]) for i in range(parts)]


def share(
    todo: Sequence[tuple[int, int]], gpus: Sequence[str], work: Callable[[int, Sequence[str]], None]
) -> None:
    """Runs `work(i, its GPUs)` for every (i, how many it needs), the first that fits into the free ones, until all are done.

    Processes that `work` starts run on their GPUs' share of the CPU cores: each would make threads for all of them otherwise, which take
    each other's time, and what is measured beside others would depend on them.
    """
    cores = _cores(len(gpus))

    def pinned(i: int, mine: Sequence[str]) -> None:
        own = set[int]().union(*(cores[gpus.index(gpu)] for gpu in mine))
        if own:
            os.sched_setaffinity(0, own)  # of this thread, which its processes inherit
        work(i, mine)

    waiting, free, running = list(todo), list(gpus), set[concurrent.futures.Future[None]]()
    held: dict[concurrent.futures.Future[None], list[str]] = {}
    with pool(len(gpus)) as threads:
        while waiting or running:
            fits = next((task for task in waiting if task[1] <= len(free)), None)
            if fits is not None:
                waiting.remove(fits)
                mine, free = free[: fits[1]], free[fits[1] :]
                future = threads.submit(pinned, fits[0], mine)
                held[future] = mine
                running.add(future)
                continue
            done, running = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                future.result()
                free = sorted([*free, *held.pop(future)], key=list(gpus).index)


class _Threads(concurrent.futures.ThreadPoolExecutor):
    """Signals wait until a thread has started, as an executor that is interrupted then does not wait for it."""

    def submit(self, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        with _signals_later():
            return super().submit(*args, **kwargs)


@contextlib.contextmanager
def pool(size: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Threads that wait for processes. An exception, such as Ctrl-C's, ends the processes, and no other starts."""
    global _stopped  # noqa: PLW0603
    try:
        with _Threads(size) as threads:
            try:
                yield threads
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                with _starting:
                    _stopped = True
                    for process in list(_running):
                        _kill(process)
                raise
    finally:
        _stopped = False
