"""Runs the processes of `jaxunet.sweep` and `jaxunet.compare`, several at a time on several GPUs.

Each process has its own session, so that it can be killed together with its children. If it fails,
a status and a reason are reported.
"""

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
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, ParamSpec, TypeVar

from jaxunet.runtime.interrupt import handled
from jaxunet.runtime.rows import Row

TIMEOUT, CRASH, OUT_OF_MEMORY = 'timeout', 'crash', 'out of memory'  # statuses of a failure
LAST_WORDS = 300  # characters of a crashed process's last log line to report
Arguments = ParamSpec('Arguments')
Result = TypeVar('Result')


@dataclass
class Answer:
    """The result of a process.

    Fields:
      row: the JSON object that it printed; None if it failed or prints none.
      failure: status and reason; empty strings if it succeeded.
    """

    row: Row | None
    failure: tuple[str, str] = ('', '')


class Stopped(Exception):
    """Raised instead of a result after the processes of `pool` were killed."""


_starting = threading.Lock()  # held while a process starts, until it is in _running
_running: set[subprocess.Popen[str]] = set()
_stopped = False


def answer(
    command: list[str],
    env: Mapping[str, str],
    timeout: float,
    log: pathlib.Path | None,
    *,
    json_output: bool = True,
) -> Answer:
    """Runs a command and returns the JSON object in its last line of output.

    Args:
      command: program and arguments.
      env: the environment variables.
      timeout: seconds until the process is killed.
      log: file for the command line and stderr; with None, stderr only gives a failure's reason.
      json_output: False for a command that prints no row.

    Raises:
      Stopped: the processes of `pool` were killed.
    """
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
    # The first line of the log is the command.
    stderr_text = log.read_text(errors='replace').partition('\n')[2] if log else err
    return Answer(None, failure(process.returncode, stderr_text))


def follow(
    command: list[str], env: Mapping[str, str], log: IO[str], say: Callable[[str], object]
) -> int:
    """Runs a command whose output is for people; returns its exit code.

    Args:
      log: gets the command line and stderr.
      say: takes each line of output as soon as it is there.

    Raises:
      OSError: the system cannot start the process.
      Stopped: the processes of `pool` were stopped.
    """
    print(shlex.join(command), file=log, flush=True)
    with _started(command, env, log) as process:
        assert process.stdout is not None
        for line in process.stdout:
            say(line)
        process.wait()
    if _stopped:
        raise Stopped
    return process.returncode


@contextlib.contextmanager
def _started(
    command: list[str], env: Mapping[str, str], stderr: int | IO[str]
) -> Iterator[subprocess.Popen[str]]:
    """Starts the process in a session of its own, and kills what is left of it after the block.

    Signals of the terminal do not reach it, only those of this process.
    """
    with contextlib.ExitStack() as ends:
        with _signals_deferred(), _starting:
            if _stopped:
                raise Stopped
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
def _signals_deferred() -> Iterator[None]:
    """Defers the signals of `handled` to the end of the block.

    If Popen is interrupted while it starts a process, nobody can end that process any more.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    try:
        with handled(lambda number, _: received.append(number)):
            yield
    finally:
        for late in received:
            signal.raise_signal(late)


@contextlib.contextmanager
def _log_file(log: pathlib.Path | None, command: list[str]) -> Iterator[int | IO[str]]:
    """Yields the destination of stderr: a log file that begins with the command line, or a pipe."""
    if log is None:
        yield subprocess.PIPE
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open('w') as file:
        print(shlex.join(command), file=file, flush=True)
        yield file


def failure(code: int, log: str) -> tuple[str, str]:
    """Returns the status and reason of a process that ended without a result.

    Args:
      code: its exit code.
      log: what it has printed to stderr.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last_line = lines[-1][-LAST_WORDS:] if lines else 'no output'
    if code == -signal.SIGKILL:
        return (
            OUT_OF_MEMORY,
            "killed by the system (SIGKILL), probably because this machine's memory is full",
        )
    if code < 0:
        return CRASH, f'ended by {signal.Signals(-code).name}: {last_line}'
    return CRASH, f'exit code {code}: {last_line}'


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills the process and its children if it still runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def environment(gpus: Sequence[str]) -> dict[str, str]:
    """Returns the environment variables of a process on these GPUs; () = those of this process."""
    return dict(os.environ) | ({'CUDA_VISIBLE_DEVICES': ','.join(gpus)} if gpus else {})


def cores(parts: int) -> list[set[int]]:
    """Divides this process's CPU cores into equal parts.

    The parts are empty if there are fewer cores than parts, or on systems without CPU affinity.
    """
    every = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []
    size = len(every) // parts
    return [set(every[i * size : (i + 1) * size]) for i in range(parts)]


def pin(own: Collection[int]) -> None:
    """Binds this thread and the processes that it starts to CPU cores; () binds nothing.

    Otherwise each process would start threads for all cores, and measurements would depend on the
    processes beside them.
    """
    if own:
        os.sched_setaffinity(0, own)


def share(
    todo: Sequence[tuple[int, int]], gpus: Sequence[str], work: Callable[[int, Sequence[str]], None]
) -> None:
    """Runs `work(i, its GPUs)` for every task on free GPUs, until all are done.

    Whenever GPUs are free, the first waiting task that fits on them starts. Processes that `work`
    starts may use only their GPUs' share of the CPU cores.

    Args:
      todo: tasks as (i, number of GPUs).
      gpus: names of the GPUs.
      work: runs a task; each task has its own thread.
    """
    parts = cores(len(gpus))

    def pinned(i: int, mine: Sequence[str]) -> None:
        pin(set[int]().union(*(parts[gpus.index(gpu)] for gpu in mine)))
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
    """An executor that defers signals while it starts a thread.

    If it were interrupted then, it would not wait for the thread.
    """

    def submit(
        self,
        fn: Callable[Arguments, Result],
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> concurrent.futures.Future[Result]:
        with _signals_deferred():
            return super().submit(fn, *args, **kwargs)


@contextlib.contextmanager
def pool(
    size: int, ending: signal.Signals = signal.SIGKILL
) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Yields an executor of `size` threads that run processes with `answer` or `follow`.

    An exception in the block, such as KeyboardInterrupt, stops the processes, and no others start.

    Args:
      ending: stops them. After SIGTERM they may save and end, and Ctrl-C kills them meanwhile.
    """
    global _stopped  # noqa: PLW0603
    try:
        with _Threads(size) as threads:
            try:
                yield threads
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                try:
                    with _signals_deferred(), _starting:
                        _stopped = True
                        _stop_all(ending)
                    while _running:  # Python takes a thread for ended if its join is interrupted
                        time.sleep(0.05)
                except KeyboardInterrupt:
                    _stop_all(signal.SIGKILL)
                raise
    finally:
        _stopped = False


def _stop_all(ending: signal.Signals) -> None:
    for process in list(_running):
        if ending == signal.SIGKILL:
            _kill(process)
        else:
            process.send_signal(ending)
