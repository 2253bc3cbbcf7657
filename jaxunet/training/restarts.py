"""Restarts a training run whose process died: `--restarts` of `jaxunet.train`.

The supervisor trains nothing and holds no device. It starts the same command as another process,
which resumes from the last checkpoint, on the devices that JAX then finds (`--fewer_devices`).
`WORKDIR/restarts.csv` gets a row for every restart.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from jaxunet.checkpoint.newest import saved_steps
from jaxunet.runtime.distributed import PEERS_MISSING
from jaxunet.runtime.errors import USER_ERROR, UserError
from jaxunet.runtime.interrupt import INTERRUPTED, handled
from jaxunet.runtime.no_device import NO_DEVICE
from jaxunet.runtime.out_of_memory import OUT_OF_MEMORY
from jaxunet.training.logs import MAX_DIGITS, StepTable
from jaxunet.training.stalls import STALLED

FILE = 'restarts.csv'
COLUMNS = ('step', 'restart', 'reason', 'wait_seconds', 'time', 'job')
EARLIER_COLUMNS = ('processes',)  # of tables that an older version began
TEXTS = ('reason', 'time', 'job')
# Exit codes after which a restart would not help.
BY_ITSELF = (0, USER_ERROR, INTERRUPTED, PEERS_MISSING)
REASONS = {
    NO_DEVICE: ': no device',
    OUT_OF_MEMORY: ': no memory left',
    STALLED: ': the devices finished no step',
}
FEWER_DEVICES = '--fewer_devices'  # flag of jaxunet.train
LOOK_SECONDS = 0.1  # between two looks for a signal
FIRST_WAIT, LONGEST_WAIT = 5.0, 300.0  # seconds before a restart; each takes twice the last
REQUEUE_SECONDS = 120.0  # for process 0 to requeue the job; srun may end all when one exits
PR_SET_PDEATHSIG = 1  # of prctl, in linux/prctl.h


class Supervisor:
    """Runs a command, and restarts it if it dies.

    SIGTERM, SIGHUP and SIGINT are passed on to the command, which is then not started again. In a
    SLURM job the supervisor requeues the job instead of starting the command again.

    Args:
      command: program and arguments.
      workdir: of the run.
      restarts: number of restarts without a new checkpoint in between.
      main: this process requeues the job and keeps the table; of several, only process 0 does.
      first_wait: seconds before the first restart.
    """

    def __init__(
        self,
        command: Sequence[str],
        workdir: pathlib.Path,
        restarts: int,
        *,
        main: bool = True,
        first_wait: float = FIRST_WAIT,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.command, self.workdir, self.restarts = list(command), workdir, restarts
        self.main, self.first_wait = main, first_wait
        self.slurm_job = environ.get('SLURM_JOB_ID', '')
        self.job = self.slurm_job or f'process {os.getpid()} since {int(time.time())}'
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: signal.Signals | None = None  # the last signal that asked to stop
        self._deaths: list[int] = []  # the last checkpoint at each death
        self._changes: list[str] = []  # flags of the command when it is started again

    def run(self) -> int:
        """Returns the exit code of the command's last process; 128 + N after signal N.

        It is 0 if the supervisor was asked to stop while it waited to restart.
        """
        with self._signals_passed_on():
            while True:
                code = self._once()
                if code in BY_ITSELF:
                    break
                if self._asked:
                    self._say_stopped(describe(code))
                    break
                goes_on = self._goes_on(code)
                if self._asked and not self.slurm_job:
                    self._say_stopped('stopped before the restart')
                    code = 0
                    break
                if not goes_on:
                    break
        return code if code >= 0 else 128 - code

    def _once(self) -> int:
        # In its own session, it gets the terminal's Ctrl-C once, through this process.
        self._process = subprocess.Popen(
            [*self.command, *self._changes],
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 (there are no threads here)
        )
        _say(f'process {self._process.pid} trains; it is started again if it dies (--restarts)')
        if self._asked:  # between the check and the start
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait()

    def _goes_on(self, code: int) -> bool:
        """Prepares a restart after the process died; returns False if there is to be none."""
        step = max(saved_steps(self.workdir), default=0)
        reason = describe(code)
        if not self.main:
            self._pause(REQUEUE_SECONDS)
            return False
        table = self._table()
        spent = self._deaths.count(step)
        if self.slurm_job and table:  # an earlier supervisor of this job may have written rows
            rows = [row for row in table.earlier if row['job'] == self.job]
            spent = sum(int(row['step']) == step for row in rows)
        where = f'{reason}; the last checkpoint is step {step}'
        if spent >= self.restarts:
            _say(f'error: {where}, after {spent} restarts without a new one: giving up')
            return False
        self._deaths.append(step)
        wait = 0.0 if self.slurm_job else min(self.first_wait * 2**spent, LONGEST_WAIT)
        if table:
            now = time.strftime('%Y-%m-%dT%H:%M:%S')
            values = (step, spent + 1, reason, wait, now, self.job)
            table.add([dict(zip(COLUMNS, values, strict=True))])
        if self.slurm_job:
            _say(f'{where}; requeueing job {self.slurm_job}, {spent + 1} of {self.restarts}')
            requeue(self.slurm_job)
            return False
        _say(f'{where}; starting again in {wait:g} s, {spent + 1} of {self.restarts}')
        self._pause(wait)
        self._changes = [FEWER_DEVICES]
        return True

    def _table(self) -> StepTable | None:
        """Opens the table of restarts; None if that fails, which is told.

        Raises the error in a SLURM job, whose restarts only the table counts.
        """
        try:
            self.workdir.mkdir(parents=True, exist_ok=True)
            return StepTable(
                self.workdir / FILE,
                COLUMNS,
                10**MAX_DIGITS,
                texts=TEXTS,
                optional=EARLIER_COLUMNS,
            )
        except (OSError, UserError) as error:
            if self.slurm_job:
                raise
            _say(f'{FILE} gets no row: {error}')
            return None

    def _pause(self, seconds: float) -> None:
        """Waits, until the supervisor is asked to stop."""
        end = time.monotonic() + seconds
        while not self._asked and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))

    def _say_stopped(self, what: str) -> None:
        name = self._asked.name if self._asked else ''
        step = max(saved_steps(self.workdir), default=0)
        _say(
            f'{name}: {what}; the last checkpoint is step {step}. '
            'The same command goes on from there.'
        )

    def _signals_passed_on(self) -> contextlib.AbstractContextManager[None]:
        def pass_on(number: int, frame: FrameType | None) -> None:
            self._asked = signal.Signals(number)
            if self._process is not None and self._process.returncode is None:
                self._process.send_signal(number)

        return handled(pass_on)


def requeue(job: str) -> None:
    """Has SLURM put the job back into its queue, which ends this process, too."""
    program = shutil.which('scontrol')
    if program is None:
        _say('error: scontrol is not in PATH, so that the job cannot be requeued')
        return
    done = subprocess.run(
        [program, 'requeue', job], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        told = ' '.join((done.stdout + done.stderr).split())[:200]
        _say(f'error: scontrol requeue {job}: {told}; submit the job with sbatch --requeue')


def describe(code: int) -> str:
    """Returns a description of how a process with this exit code ended."""
    if code >= 0:
        return f'the process ended with exit code {code}{REASONS.get(code, "")}'
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f'signal {-code}'
    hint = ', as where memory runs out' if code == -signal.SIGKILL else ''
    return f'the process was ended by {name}{hint}'


def _end_with_parent() -> None:
    """Has Linux send SIGTERM to this process when its parent ends for any reason."""
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
