"""Runs a comparison file: in this process, or in several that divide the runs among themselves.

Each of several processes is `jaxunet.compare.queue`, and is started again if its devices stall; if
this process makes the runs, a stall ends it. The folder of the results has

    1/, 2/, ...        what each process writes: rows, stretches, pictures, logs of the runs
    work/              runs that are not done
    rows.jsonl, stretches.jsonl, report.md, quality.png      of all processes together
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxunet.compare import collected, tables
from jaxunet.compare.collected import ROWS, STRETCHES
from jaxunet.compare.job_runner import DONE, TIMED_OUT, Queue
from jaxunet.compare.jobs import Job
from jaxunet.compare.measure import Measurements
from jaxunet.compare.queue_process import QueueProcess, run_all, signals_passed_on
from jaxunet.compare.step_times import step_times
from jaxunet.compare.stopwatch import Limit
from jaxunet.compare.study import Study
from jaxunet.compare.study_file import check_configs_used, load_configs
from jaxunet.metrics.features import INCEPTION
from jaxunet.runtime import rows, subprocesses
from jaxunet.runtime.errors import UserError
from jaxunet.sweep.runner import probe
from jaxunet.training.evaluation import evaluation_network

QUEUE = 'jaxunet.compare.queue'
MEMORY = 0.9  # of a GPU, for all processes together
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


def run(study: Study, options: Options, command: str) -> list[str]:
    """Does the missing runs; returns what was not done, and why.

    Args:
      command: the command line, for the rows.

    Raises:
      UserError: a file that the study needs is missing, a value does not fit, or a process cannot
        be started.
      KeyboardInterrupt: a signal stopped this process or those that it started.
    """
    jobs = study.jobs(options.part, options.data)
    every = load_configs(study.jobs('', options.data))
    check_configs_used(str(study.path), every, begun=options.by_flags or options.folder(1).exists())
    cases = [job.case for job in jobs]
    step_ms = step_times(study.step_ms, cases, f'{study.path}: step_ms')
    if str(study.features) not in INCEPTION and not study.features.is_file():
        raise UserError(
            f'{study.path}: features: no file {study.features}; make it by python -m '
            'jaxunet.metrics.train_features'
        )
    if not options.by_flags:
        _check_devices(options.devices, f'{study.path}: step_ms', bool(step_ms))
    if options.devices:
        jax.config.update('jax_platforms', 'cpu')  # the devices belong to the processes
    known = known_rows(study, options.output)
    _check_measured(study, jobs, options.output)
    if options.devices:
        return _run_processes(study, jobs, options, known)
    folder = options.folder(1)
    measurements = Measurements(str(study.features), folder / 'pictures')
    limit = Limit(options.limit, options.reserve, began=options.began)
    queue = Queue(
        folder,
        measurements,
        limit=limit,
        command=command,
        step_ms=step_ms,
        known=known,
        work=options.output / 'work',
        resume=options.resume,
    )
    return queue.run(jobs)


def _check_measured(study: Study, jobs: Sequence[Job], output: Path) -> None:
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
                'features': str(study.features),
                'reference': path,
            }
            try:
                names.add(evaluation_network(config.replace(evaluation=evaluation)).name)
            except UserError as error:
                raise UserError(f'{study.path}: {error}') from None
    for row in collected.read_rows([output / ROWS]):
        if 'features' in row and row['features'] not in names:
            raise UserError(
                f'{output}: was measured with features {row["features"]}, while {study.features} '
                f'has {", ".join(names)} now; choose another --output, or remove it'
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


def known_rows(study: Study, output: Path) -> str:
    """Writes all rows so far to rows.jsonl of the output; returns its path, '' if there are none.

    Raises:
      UserError: rows that do not compare, or the file cannot be written.
    """
    found = collect(study, output, ())
    return str(output / ROWS) if found.rows else ''


def collect(study: Study, output: Path, others: Sequence[Path]) -> tables.Measured:
    """Gathers rows and stretches in the output, and returns them.

    Args:
      output: folder of results, with those of processes in it.
      others: folders of more rows and stretches, as of other machines.

    Raises:
      UserError: a file is damaged, rows do not compare, or a file cannot be written.
    """
    folders = [part for folder in (output, *others) for part in _parts(folder)]
    home = [study.rows.parent] if study.rows else []
    first = [study.rows] if study.rows else []
    found = tables.measured(
        study,
        [*first, *(folder / ROWS for folder in folders)],
        [folder / STRETCHES for folder in [*home, *folders]],
    )
    for name, every in ((ROWS, found.rows), (STRETCHES, found.stretches)):
        if every:
            collected.write(output / name, every)
    return found


def _parts(folder: Path) -> list[Path]:
    """Returns a folder of results with those of its processes."""
    return [folder, *sorted(path for path in folder.glob('[0-9]*') if path.name.isdigit())]


def _run_processes(study: Study, jobs: Sequence[Job], options: Options, known: str) -> list[str]:
    """Runs a queue on each of the devices; returns what went wrong.

    A job that crashes its process, or takes longer than `timeout`, fails alone: the process starts
    again with the others.
    """
    problems: list[str] = []

    def again(number: int, code: int) -> str:
        job = _claimed(jobs, options, number)
        if code in ENDED or job is None:
            return ''
        reason = _reason(code, options.folder(number) / LOG)
        _record_failure(job, options, number, reason)
        problems.append(f'{job.name}: {reason}')
        return f'{problems[-1]}; it goes on without this run'

    shutil.rmtree(options.output / CLAIMS, ignore_errors=True)
    cores = subprocesses.cores(len(options.devices))
    processes: list[QueueProcess] = []
    with contextlib.ExitStack() as stack:
        asked = stack.enter_context(signals_passed_on(processes))
        for number, own in enumerate(cores, 1):
            options.folder(number).mkdir(parents=True, exist_ok=True)
            log = stack.enter_context((options.folder(number) / LOG).open('w'))
            command = functools.partial(_command, study, options, known, number)
            env = _environment(options.devices, number)
            retry = functools.partial(again, number)
            processes.append(QueueProcess(number, command, env, own, log, retry))
        codes = run_all(processes)
    if asked:
        raise KeyboardInterrupt
    return problems + [
        f'process {number}: {_reason(code, options.folder(number) / LOG)}'
        for number, code in enumerate(codes, 1)
        if code
    ]


def _claimed(jobs: Sequence[Job], options: Options, number: int) -> Job | None:
    """Returns the job that a process has begun and not ended."""
    for job in jobs:
        claim = options.output / CLAIMS / job.name
        if claim.exists() and claim.read_text(encoding='utf-8') == str(options.folder(number)):
            return job
    return None


def _record_failure(job: Job, options: Options, number: int, reason: str) -> None:
    """Writes a stretch for a job whose process could not, and ends its claim."""
    (options.output / CLAIMS / job.name).write_text(DONE, encoding='utf-8')
    row = {'data': job.data, 'case': job.case, 'seed': job.seed}
    row |= {'outcome': collected.FAILED, 'reason': reason, 'wall': {}, 'shared_by': 1, 'devices': 1}
    row['ended'] = datetime.datetime.now(datetime.UTC).isoformat()
    rows.append(options.folder(number) / STRETCHES, row)


def _command(study: Study, options: Options, known: str, number: int) -> list[str]:
    """Returns the command of a process, with the time limit that is left now."""
    device = options.devices[number - 1]
    flags = {
        'jobs': f'{study.path}:{options.part}' if options.part else study.path,
        'data': options.data,
        'features': study.features,
        'known': known,
        'claims': options.output / CLAIMS,
        'step_ms': study.step_ms,
        'devices': 0 if options.by_flags else device.count('+') + 1,
        'shared_by': options.devices.count(device),
        'limit': f'{max(options.limit - (time.perf_counter() - options.began), 1):.0f}',
        'reserve': f'{options.reserve:g}',
        'resume': str(options.resume).lower(),
        'timeout': f'{options.timeout:g}',
        'work': options.output / 'work',
        'output': options.folder(number),
    }
    arguments = [f'--{name}={value}' for name, value in flags.items()]
    return [sys.executable, '-u', '-m', QUEUE, *arguments]


def _environment(devices: Sequence[str], number: int) -> dict[str, str]:
    """Returns the environment variables of a process."""
    device = devices[number - 1]
    env = dict(os.environ)
    if device:
        env['CUDA_VISIBLE_DEVICES'] = device.replace('+', ',')
    if (shared_by := devices.count(device)) > 1:
        env.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', f'{MEMORY / shared_by:.2f}')
    return env


def _reason(code: int, log: Path) -> str:
    """Returns the reason for which a queue did not do all of its work."""
    if code in ENDED:
        return f'did not do all of its runs (see {log})'
    _, _, text = log.read_text(errors='replace').partition('\n')  # drops the command line
    status, last = subprocesses.failure(code, text)
    if code == TIMED_OUT:
        status, last = subprocesses.TIMEOUT, last.partition(': error: ')[2]
    return f'{status}: {last} (see {log})'
