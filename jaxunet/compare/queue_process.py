"""A process that runs a queue of a comparison, and is started again if its devices stall."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.interrupt import handled
from jaxunet.runtime.subprocesses import start
from jaxunet.training.stalls import STALLED

RESTARTS = 3  # of one process


class QueueProcess:
    """A process that runs a queue.

    Args:
      number: begins the lines of the process.
      command: returns program and arguments. It is called at every start, as less of the time limit
        is left then.
      env: the environment variables.
      cores: CPU cores of the process; an empty set pins nothing.
      log: gets the command line, and what the process writes to stderr.
      again: takes an exit code, and returns why the process starts again after it, to go on with
        the jobs that are left; '' = it does not.

    Attributes:
      asked: the process was asked to stop.
    """

    def __init__(
        self,
        number: int,
        command: Callable[[], list[str]],
        env: Mapping[str, str],
        cores: set[int],
        log: IO[str],
        again: Callable[[int], str] = lambda code: '',
    ) -> None:
        self._number, self._command, self._env = number, command, env
        self._cores, self._log, self._again = cores, log, again
        self._process: subprocess.Popen[str] | None = None
        self.asked = False

    def start(self) -> bool:
        """Starts the process; returns False if it was asked to stop, and so did not start.

        Raises:
          OSError: the system cannot start it.
        """
        if self.asked:
            return False
        command = self._command()
        print(shlex.join(command), file=self._log, flush=True)
        self._process = start(command, self._env, self._log, self._cores)
        if self.asked:  # a signal came before the process was known
            self._process.terminate()
        return True

    def follow(self) -> int:
        """Prints the lines of the process until it ends; returns its exit code.

        It is started again, if the system can start it, to go on from the last checkpoint of its
        run if its devices stalled, and with other jobs if `again` says so.
        """
        code, stalls = self._wait(), 0
        while not self.asked:
            if code == STALLED and stalls < RESTARTS:
                stalls += 1
                reason = f'the devices finished no step; it starts again, {stalls} of {RESTARTS}'
            elif not (reason := self._again(code)):
                break
            try:
                if not self.start():
                    break
            except OSError as error:
                self._say(f'it cannot start again: {error}\n')
                break
            self._say(f'{reason}\n')
            code = self._wait()
        return code

    def stop(self) -> None:
        """Asks the process to save and end; the second time, ends it at once."""
        number = signal.SIGKILL if self.asked else signal.SIGTERM
        self.asked = True
        if self._process is not None:
            self._process.send_signal(number)

    def _wait(self) -> int:
        if self._process is None:
            return 0
        with self._process as process:
            assert process.stdout is not None
            for line in process.stdout:
                self._say(line)
        return process.returncode

    def _say(self, line: str) -> None:
        print(f'{self._number}: {line}', end='', flush=True)


def run_all(processes: Sequence[QueueProcess]) -> list[int]:
    """Runs all processes at once, until they have ended; returns their exit codes.

    Raises:
      UserError: the system cannot start one; the others were asked to stop, and have ended.
    """
    codes = [0] * len(processes)

    def follow(index: int) -> None:
        codes[index] = processes[index].follow()

    threads: list[threading.Thread] = []
    failure = ''
    for index, process in enumerate(processes):
        thread = threading.Thread(target=follow, args=(index,), daemon=True)
        try:
            process.start()
            thread.start()
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no further thread
            failure = f'process {index + 1} of {len(processes)} cannot be started: {error}'
            for other in processes:
                if not other.asked:  # asked again, it would not save
                    other.stop()
            process.follow()
            break
        threads.append(thread)
    for thread in threads:
        thread.join()
    if failure:
        raise UserError(f'{failure}; the others were stopped. The same command goes on from here')
    return codes


@contextlib.contextmanager
def signals_passed_on(processes: Sequence[QueueProcess]) -> Iterator[list[int]]:
    """Has the signals of `handled` stop the processes; yields a list of those that have come."""
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if number == signal.SIGHUP and len(asked) > 1:
            return  # a terminal that closes may send two
        for process in processes:
            process.stop()

    with handled(handle):
        yield asked
