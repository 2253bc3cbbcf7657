"""Processes that were started by hand meet again after one of them died.

Their supervisors (`jaxunet.training.restarts`) share the workdir, and meet in its folder
`restarts/`: process 0 calls (call.json), the others answer (ROUND.PROCESS), and process 0 writes
who goes on (ROUND.json). Process 0 is always one of them: the others connect to its address, and it
alone writes the run's files.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxunet.runtime.errors import UserError, listed
from jaxunet.runtime.untrusted import check_fields, read_json
from jaxunet.runtime.whole_files import written

FOLDER = 'restarts'
CALL = 'call.json'
POLL_SECONDS = 0.2  # between two looks at the folder
ADVICE = f'remove the folder {FOLDER} of the workdir, and start all processes again'


class Place(NamedTuple):
    """The place of a process in the run that goes on.

    Fields:
      process: its index.
      processes: their number.
    """

    process: int
    processes: int


class Meeting:
    """The meetings of one process, one after each death.

    Args:
      process, processes: index and number as in the command.
      wait_seconds: seconds that process 0 waits for the others.
      patience: seconds that the others wait for process 0.
      pause: waits for so many seconds; returns True if the run was asked to stop.
      say: shows a line to the user.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        process: int,
        processes: int,
        *,
        wait_seconds: float,
        patience: float,
        pause: Callable[[float], bool],
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._process = workdir / FOLDER, process
        self._expected = list(range(processes))  # of the command, or of the last meeting
        self._processes = processes
        self._wait_seconds, self._patience = wait_seconds, patience
        self._pause, self._say = pause, say
        if process == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._round = self._call().get('round', '')  # of an earlier run; nobody meets in it again

    def meet(self) -> Place | None:
        """Returns the place of this process; None if the run is over or was asked to stop.

        Raises:
          UserError: process 0 does not call, this process is not needed any more, or the folder
            cannot be read or written.
        """
        going = self._gather() if self._process == 0 else self._join()
        if going is None:
            return None
        if self._process not in going:
            raise UserError(
                f'process {self._process}: the run goes on without it, with the processes '
                f'{_numbers(going)} of {self._processes}; to use it again, stop the run and start '
                'all processes'
            )
        self._expected = going
        return Place(going.index(self._process), len(going))

    def is_called(self) -> bool:
        """Returns True if process 0 has called, because its part of the run died."""
        try:
            call = self._call()
        except UserError:
            return False  # `meet` reports it
        return call.get('round', self._round) != self._round and not call.get('over')

    def end(self) -> None:
        """Tells the waiting processes that the run is over. Only process 0 does anything."""
        if self._process == 0 and self._processes > 1:
            self._write(CALL, {'round': uuid.uuid4().hex, 'over': True})

    def _gather(self) -> list[int] | None:
        """Returns the processes that go on, once all have answered or the time is over."""
        number = uuid.uuid4().hex
        # The call is replaced, never absent, and the files that others are writing stay (.NAME).
        for path in self._folder.glob('[!.]*'):
            if path.name != CALL:
                with contextlib.suppress(OSError):
                    path.unlink()
        self._write(CALL, {'round': number})
        self._round = number
        end = time.monotonic() + self._wait_seconds
        while len(there := self._answered(number)) < len(self._expected):
            if time.monotonic() > end:
                missing = sorted({*self._expected} - {*there})
                self._say(
                    f'no answer from process {_numbers(missing)} in {self._wait_seconds:g} s '
                    '(--wait_seconds)'
                )
                break
            if self._pause(POLL_SECONDS):
                return None
        going = chosen(there, self._processes)
        if len(going) < self._processes:
            self._say(
                f'the run goes on with {len(going)} of {self._processes} processes: '
                f'{_numbers(going)}'
            )
        self._write(f'{number}.json', {'processes': going})
        return going

    def _answered(self, number: str) -> list[int]:
        return [
            process
            for process in self._expected
            if process == 0 or (self._folder / f'{number}.{process}').exists()
        ]

    def _join(self) -> list[int] | None:
        """Answers the next call of process 0, and returns the processes that go on."""
        end = time.monotonic() + self._patience
        while (call := self._call()).get('round', self._round) == self._round:
            if time.monotonic() > end:
                raise UserError(
                    f'process {self._process}: process 0 has not called for {self._patience:g} s; '
                    'the run cannot go on without it. Start all processes again'
                )
            if self._pause(POLL_SECONDS):
                return None
        self._round = call['round']
        if call.get('over'):
            self._say('process 0 does not go on')
            return None
        answer = self._folder / f'{self._round}.{self._process}'
        with written(answer) as partial:
            partial.touch()
        decision = self._folder / f'{self._round}.json'
        while not decision.exists():
            if self._call().get('round') != self._round:  # too late: that meeting is over
                return self._join()
            if time.monotonic() > end + self._wait_seconds:
                raise UserError(
                    f'process {self._process}: process 0 called, but did not say who goes on; '
                    'start all processes again'
                )
            if self._pause(POLL_SECONDS):
                return None
        found = read_json(decision, advice=ADVICE)
        check_fields(found, {'processes': list}, str(decision), advice=ADVICE)
        return list(found['processes'])

    def _call(self) -> dict[str, Any]:
        """Returns the last call, which has a `round`; empty if there is none."""
        path = self._folder / CALL
        if not path.exists():
            return {}
        try:
            call = read_json(path, advice=ADVICE)
        except UserError:
            if not path.exists():  # process 0 starts, and has just removed it
                return {}
            raise
        check_fields(call, {'round': str}, str(path), advice=ADVICE)
        return call

    def _write(self, name: str, value: object) -> None:
        with written(self._folder / name) as partial:
            partial.write_text(json.dumps(value), encoding='utf-8')


def chosen(there: Sequence[int], processes: int) -> list[int]:
    """Returns which of the processes that are there go on: the most that divide `processes`.

    The batch divides evenly among all processes, so it also does among these.
    """
    count = max(n for n in range(1, len(there) + 1) if processes % n == 0)
    return sorted(there)[:count]


def _numbers(processes: Sequence[int]) -> str:
    return listed([str(process) for process in processes])
