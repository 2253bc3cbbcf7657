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


_running: set[subprocess.Popen[str]] = set()


def answer(command: list[str], env: dict[str, str], timeout: float, log: pathlib.Path | None, *, json_output: bool = True) -> Answer:
    """Runs a command whose last line of output is a JSON object (or which need not say anything)."""
    with (
        _log_file(log, command) as stderr,
        # A session of its own, so that its worker processes can be ended with it.
        subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        ) as process,
    ):
        _running.add(process)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return Answer(None, (TIMEOUT, f'not done after {timeout:g} s (--timeout)'))
        finally:
            _running.discard(process)
            _kill(process)
    if process.returncode == 0 and not json_output:
        return Answer(None)
    with contextlib.suppress(IndexError, ValueError):
        row = json.loads(out.splitlines()[-1])
        if isinstance(row, dict) and process.returncode == 0:
            return Answer(row)
    said = log.read_text(errors='replace').partition('\n')[2] if log else err  # after the command
    return Answer(None, _failure(process.returncode, said))


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
        return OUT_OF_MEMORY, 'killed by the system (SIGKILL), as it does when the memory of this machine is full'
    if code < 0:
        return CRASH, f'ended by {signal.Signals(-code).name}: {words}'
    return CRASH, f'exit code {code}: {words}'


def _kill(process: subprocess.Popen[str]) -> None:
    """The process and all that it started, if it still runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def share(todo: Sequence[tuple[int, int]], gpus: Sequence[str], work: Callable[[int, Sequence[str]], None]) -> None:
    """Runs `work(i, its GPUs)` for every (i, how many it needs), the first that fits into the free ones, until all are done."""
    waiting, free, running = list(todo), list(gpus), set[concurrent.futures.Future[None]]()
    with concurrent.futures.ThreadPoolExecutor(len(gpus)) as pool:
        held: dict[concurrent.futures.Future[None], list[str]] = {}
        try:
            while waiting or running:
                fits = next((task for task in waiting if task[1] <= len(free)), None)
                if fits is not None:
                    waiting.remove(fits)
                    mine, free = free[: fits[1]], free[fits[1] :]
                    future = pool.submit(work, fits[0], mine)
                    held[future] = mine
                    running.add(future)
                    continue
                done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    future.result()
                    free = sorted([*free, *held.pop(future)], key=list(gpus).index)
        except BaseException:
            end_all(pool)
            raise


def end_all(pool: concurrent.futures.ThreadPoolExecutor) -> None:
    """Ends the processes that the pool's threads wait for, and starts no other."""
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list(_running):
        _kill(process)
