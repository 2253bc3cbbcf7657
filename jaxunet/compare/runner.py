"""Runs a comparison file: in this process, or in several that divide the runs among themselves.

Each of several processes is `jaxunet.compare.queue`, and is started again if its devices stall; if
this process makes the runs, a stall ends it. The folder of the results has

    1/, 2/, ...        what each process writes: rows, stretches, pictures, logs of the runs
    work/              runs that are not done
    rows.jsonl, stretches.jsonl, report.md, quality.png      of all processes together
"""

from __future__ import annotations

import concurrent.futures
import math
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jaxunet.compare import collected, tables
from jaxunet.compare.collected import ROWS, STRETCHES
from jaxunet.compare.comparison import Comparison
from jaxunet.compare.comparison_file import read_jobs
from jaxunet.compare.job_runner import DONE, TIMED_OUT, Queue
from jaxunet.compare.jobs import Job
from jaxunet.compare.measure import Measurements
from jaxunet.compare.step_times import step_times
from jaxunet.compare.stopwatch import Limit
from jaxunet.metrics.features import INCEPTION
from jaxunet.runtime import rows, subprocesses
from jaxunet.runtime.errors import UserError
from jaxunet.sweep.runner import probe
from jaxunet.training.evaluation import evaluation_network
from jaxunet.training.stalls import STALLED

QUEUE = 'jaxunet.compare.queue'
MEMORY = 0.9  # of a GPU, for all processes together
RESTARTS = 3  # of a process whose devices stall
ENDED = (0, 1, 130)  # exit codes of a queue that has itself reported what it did not do
LOG, CLAIMS = 'log.txt', 'claims'


@dataclass(frozen=True)
class Options:
    """Options of a command that runs a comparison file.

    Fields:
      part: methods to run, joined by commas; '' = all.
      data: folder of the images.
      output: folder of the results.
      devices: the GPUs of each process, as CUDA_VISIBLE_DEVICES names them. A process with several,
        joined by +, trains data-parallel on them; a GPU that is named twice is shared by two
        processes; '' = all that JAX finds. () = this process, which trains on the first device
        that JAX finds.
      limit, reserve, resume, timeout: as those of `jaxunet.compare.queue`.
      began: `time.perf_counter()` at the start of the command.
      by_flags: flags state the comparison, and have been checked: its runs train on the devices
        that their config says, and may divide the cores of a CPU.
    """

    part: str
    data: str
    output: Path
    devices: tuple[str, ...]
    limit: float
    reserve: float
    resume: bool
    began: float
    timeout: float = math.inf
    by_flags: bool = False

    def folder(self, number: int) -> Path:
        """Returns the folder of a process; the first has the number 1."""
        return self.output / str(number)


def run(comparison: Comparison, options: Options, command: str) -> list[str]:
    """Does the missing runs; returns what was not done, and why.

    Args:
      command: the command line, for the rows.

    Raises:
      UserError: a file of the comparison is missing, a value does not fit, or a process cannot be
        started.
      KeyboardInterrupt: a signal stopped the runs.
    """
    path, output = comparison.path, options.output
    begun = options.by_flags or options.folder(1).exists()
    jobs = read_jobs(f'{path}:{options.part}', options.data, begun=begun)
    step_ms = step_times(comparison.step_ms, [job.case for job in jobs], f'{path}: step_ms')
    if str(comparison.features) not in INCEPTION and not comparison.features.is_file():
        raise UserError(
            f'{path}: features: no file {comparison.features}; make it by python -m '
            'jaxunet.metrics.train_features'
        )
    if not options.by_flags:
        _check_devices(options.devices, f'{path}: step_ms', bool(step_ms))
    if options.devices:
        jax.config.update('jax_platforms', 'cpu')  # the devices belong to the processes
    known = str(output / ROWS) if collect(comparison, output, ()).rows else ''
    _check_measured(comparison, jobs, output)
    if options.devices:
        return _Processes(comparison, jobs, options, known).run()
    return Queue(
        output=options.folder(1),
        measurements=Measurements(str(comparison.features), options.folder(1) / 'pictures'),
        limit=Limit(options.limit, options.reserve, began=options.began),
        command=command,
        step_ms=step_ms,
        known=known,
        work=output / 'work',
        resume=options.resume,
    ).run(jobs)


def _check_measured(comparison: Comparison, jobs: Sequence[Job], output: Path) -> None:
    """Checks, before anything runs, that checkpoints can be measured as those of earlier rows.

    Raises:
      UserError: the features or a reference cannot be opened, do not fit the images or a metric, or
        are not those of the rows in the output.
    """
    names, checked = set(), []
    for job in jobs:
        config = job.load_config()
        for path, (_, metrics) in job.references.items():
            if (config.image_shape, path) in checked:
                continue
            checked.append((config.image_shape, path))
            evaluation = {
                'samples': job.samples,
                'metrics': metrics,
                'features': str(comparison.features),
                'reference': path,
            }
            try:
                names.add(evaluation_network(config.replace(evaluation=evaluation)).name)
            except UserError as error:
                raise UserError(f'{comparison.path}: {error}') from None
    for row in collected.read_rows([output / ROWS]):
        if 'features' in row and row['features'] not in names:
            raise UserError(
                f'{output}: was measured with features {row["features"]}, while '
                f'{comparison.features} has {", ".join(names)} now; choose another --output, or '
                'remove it'
            )


def _check_devices(devices: Sequence[str], where: str, has_step_ms: bool) -> None:
    """Checks that runs on these devices can be timed.

    Args:
      devices: `Options.devices`.
      where: the field of the step times, for messages.
      has_step_ms: True if the clock counts steps instead of measuring training time.

    Raises:
      UserError: a group of GPUs overlaps another, there is no GPU for it, or the training time
        would not be that of a run alone on one GPU.
    """
    groups = [device for device in devices if '+' in device]
    if groups and probe().platform == 'cpu':
        raise UserError(f'--devices: {groups[0]}: expected one device, as this machine has no GPU')
    names = [name for device in devices for name in device.split('+')]
    for group in groups:
        if any(not name or names.count(name) > 1 for name in group.split('+')):
            raise UserError(
                f'--devices: {group}: expected GPUs that are named once, as in 0+1,2+3, found '
                f'{",".join(devices)}'
            )
    if has_step_ms:
        return
    if groups:
        reason = f'a step on several GPUs ({groups[0]}) takes another time than on one'
    elif len(devices) > len({*devices}):
        reason = 'processes that share a GPU (--devices) slow each other down'
    elif len(devices) > 1 and probe().platform == 'cpu':
        reason = (
            'this machine has no GPU, and processes that share a CPU (--devices) slow each other '
            'down'
        )
    else:
        return
    raise UserError(f'{where}: expected milliseconds of a step, as {reason}, found none')


def collect(comparison: Comparison, output: Path, others: Sequence[Path]) -> tables.Results:
    """Gathers rows and stretches in the output, and returns them.

    Args:
      output: folder of results, with those of processes in it.
      others: folders of more rows and stretches, as of other machines.

    Raises:
      UserError: a file is damaged, rows do not compare, or a file cannot be written.
    """
    folders = [part for folder in (output, *others) for part in _parts(folder)]
    home = [comparison.rows.parent] if comparison.rows else []
    first = [comparison.rows] if comparison.rows else []
    results = tables.measured(
        comparison,
        [*first, *(folder / ROWS for folder in folders)],
        [folder / STRETCHES for folder in [*home, *folders]],
    )
    for name, every in ((ROWS, results.rows), (STRETCHES, results.stretches)):
        if every:
            collected.write(output / name, every)
    return results


def _parts(folder: Path) -> list[Path]:
    """Returns a folder of results with those of its processes."""
    return [folder, *sorted(path for path in folder.glob('[0-9]*') if path.name.isdigit())]


@dataclass(frozen=True)
class _Processes:
    """The processes of a comparison: a queue for each entry of `Options.devices`.

    Fields:
      jobs: the runs to make, which the processes divide among themselves.
      known: rows.jsonl of what is measured; '' = nothing is.
      problems: what went wrong with single runs so far.
    """

    comparison: Comparison
    jobs: Sequence[Job]
    options: Options
    known: str
    problems: list[str] = field(default_factory=list)

    def run(self) -> list[str]:
        """Runs all processes; returns what went wrong.

        Raises:
          UserError: a process cannot be started; the others have saved, and ended.
        """
        shutil.rmtree(self.options.output / CLAIMS, ignore_errors=True)
        count = len(self.options.devices)
        try:
            with subprocesses.pool(count, signal.SIGTERM) as threads:
                cores = subprocesses.cores(count)
                queues = [threads.submit(self._queue, i + 1, cores[i]) for i in range(count)]
                for queue in concurrent.futures.as_completed(queues):
                    queue.result()  # raises at once what any of them raises
                codes = [queue.result() for queue in queues]
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no further thread
            raise UserError(
                f'a process of {count} cannot be started: {error}; the others were stopped. The '
                'same command goes on from here'
            ) from None
        failed = [(number, code) for number, code in enumerate(codes, 1) if code]
        return self.problems + [
            f'process {number}: {self._reason(number, code)}' for number, code in failed
        ]

    def _queue(self, number: int, cores: set[int]) -> int:
        """Runs a process until it ends for good; returns its exit code.

        A run that crashes it, or takes longer than `timeout`, fails alone: the process starts again
        with the others. If its devices stall, it starts again from the last checkpoint.

        Raises:
          OSError: it cannot be started for the first time.
        """

        def say(line: str) -> None:
            print(f'{number}: {line}', end='', flush=True)

        subprocesses.pin(cores)
        folder, stalls, code = self.options.folder(number), 0, None
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOG).open('w') as log:
            while True:
                command, env = self._command(number), self._environment(number)
                try:
                    code = subprocesses.follow(command, env, log, say)
                except OSError as error:
                    if code is None:
                        raise
                    say(f'it cannot start again: {error}\n')
                    return code
                if code == STALLED and stalls < RESTARTS:
                    stalls += 1
                    say(f'the devices finished no step; it starts again, {stalls} of {RESTARTS}\n')
                elif code in ENDED or not (problem := self._failed_run(number, code)):
                    return code
                else:
                    say(f'{problem}; it goes on without this run\n')

    def _failed_run(self, number: int, code: int) -> str:
        """Writes a stretch for the run in which a process ended; returns why it did.

        Returns '' if the process had no run.
        """
        folder = self.options.folder(number)
        for job in self.jobs:
            claim = self.options.output / CLAIMS / job.name
            if claim.exists() and claim.read_text(encoding='utf-8') == str(folder):
                claim.write_text(DONE, encoding='utf-8')
                reason = self._reason(number, code)
                stretch = collected.stretch(job, collected.FAILED, reason, {}, 1)
                rows.append(folder / STRETCHES, stretch | {'devices': 1})
                self.problems.append(f'{job.name}: {reason}')
                return self.problems[-1]
        return ''

    def _command(self, number: int) -> list[str]:
        """Returns the command of a process, with the time limit that is left now."""
        options, device = self.options, self.options.devices[number - 1]
        path, limit = self.comparison.path, options.limit - (time.perf_counter() - options.began)
        values = {
            'jobs': f'{path}:{options.part}' if options.part else path,
            'data': options.data,
            'features': self.comparison.features,
            'known': self.known,
            'claims': options.output / CLAIMS,
            'step_ms': self.comparison.step_ms,
            'devices': 0 if options.by_flags else device.count('+') + 1,
            'shared_by': options.devices.count(device),
            'limit': f'{max(limit, 1):.0f}',
            'reserve': f'{options.reserve:g}',
            'resume': str(options.resume).lower(),
            'timeout': f'{options.timeout:g}',
            'work': options.output / 'work',
            'output': options.folder(number),
        }
        flags = [f'--{name}={value}' for name, value in values.items()]
        return [sys.executable, '-u', '-m', QUEUE, *flags]

    def _environment(self, number: int) -> dict[str, str]:
        """Returns the environment variables of a process."""
        device = self.options.devices[number - 1]
        env = subprocesses.environment(device.split('+') if device else ())
        if (shared_by := self.options.devices.count(device)) > 1:
            env.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', f'{MEMORY / shared_by:.2f}')
        return env

    def _reason(self, number: int, code: int) -> str:
        """Returns the reason for which a process did not do all of its work."""
        log = self.options.folder(number) / LOG
        if code in ENDED:
            return f'did not do all of its runs (see {log})'
        _, _, text = log.read_text(errors='replace').partition('\n')  # drops the command line
        status, last = subprocesses.failure(code, text)
        if code == TIMED_OUT:
            status, last = subprocesses.TIMEOUT, last.partition(': error: ')[2]
        return f'{status}: {last} (see {log})'
