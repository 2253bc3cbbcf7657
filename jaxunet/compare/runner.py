"""Runs a comparison: each run in its own process, several at the same time on separate devices.

Finished runs are not repeated.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxunet.compare.methods import Method
from jaxunet.compare.worker import (
    ROW_FIELDS,
    TASK,
    Task,
    finished,
    missing,
    read_task,
    run_folder,
    save_task,
)
from jaxunet.config import Config, identity, to_dict
from jaxunet.config.samplers import DEFAULT_STEPS
from jaxunet.config.schema import SUITS
from jaxunet.runtime import rows
from jaxunet.runtime import subprocesses as processes
from jaxunet.runtime.errors import UserError, listed
from jaxunet.runtime.untrusted import NUMBER, check_fields, read_json, shown

WORKER, STEP_COST = 'jaxunet.compare.worker', 'jaxunet.compare.step_cost'
SPEC, COSTS, FAILURES = 'compare.json', 'step_cost.jsonl', 'failures.json'
FOREVER = 10**9  # steps
LARGEST = 10**9  # seconds, seeds and milestones in a compare.json
SPEC_FIELDS = {
    'command': str,
    'config': {
        'precision': str,
        'data': {'batch_size': int, 'path': str},
        'optimizer': {'warmup_steps': int},
        'ema': {'rates': list},
        'evaluation': {'samples': int, 'metrics': list},
    },
    'methods': dict,
}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Spec:
    """A comparison, as its folder keeps it for the report (compare.json).

    Fields:
      command: the command line.
      config: the config of all runs, before the fields of the methods are set.
      methods: name -> fields; the first method is the baseline.
      seconds: method -> seconds of training of each run.
      seeds: method -> number of runs, with the seeds 0, 1, ...
      evaluations: method -> number of milestones, equally spaced up to `seconds`.
      processes: the largest number of simultaneous runs in any command so far.
    """

    command: str
    config: dict[str, Any]
    methods: Mapping[str, Mapping[str, object]]
    seconds: dict[str, float]
    seeds: dict[str, int]
    evaluations: dict[str, int]
    processes: int = 1

    @property
    def baseline(self) -> str:
        """Name of the first method."""
        return next(iter(self.methods))

    @property
    def metrics(self) -> Sequence[str]:
        """Names of the metrics; the first decides how fast a method is."""
        return self.config['evaluation']['metrics']

    def milestones(self, method: str) -> list[float]:
        """Returns the seconds of training at which the runs of a method are measured."""
        count = self.evaluations[method]
        return [self.seconds[method] * (i + 1) / count for i in range(count)]


def divided_cores(processes: int) -> str:
    """Returns the note on simultaneous runs on a machine without a GPU."""
    return (
        f'{processes} runs at a time divided the cores of one CPU, so each did fewer steps in its '
        'seconds than it would do alone'
    )


def base_config(config: Config) -> Config:
    """Returns the config that all runs share.

    Time ends a run, so nothing depends on the number of steps: the learning rate is constant.
    Sampling, evaluation and checkpoints during training are off. All methods are measured by one
    sampler, whatever their objectives: DDIM in 50 steps where the config leaves it open.

    Raises:
      UserError: the config has `init_from`; a run starts from the random weights of its seed.
    """
    if config.init_from:
        raise UserError(
            f'init_from: expected no weights, since every run of a comparison starts from random '
            f'ones, found {config.init_from}'
        )
    together = max(config.train.steps_per_call, 1)
    forever = FOREVER // together * together
    quiet = {'steps': forever, 'checkpoint_every': forever, 'sample_every': 0, 'evaluate_every': 0}
    evaluation = config.evaluation
    measured = {
        'sampler': evaluation.sampler or 'ddim',
        'steps': DEFAULT_STEPS['ddim'] if evaluation.steps == SUITS else evaluation.steps,
    }
    return config.replace(train=quiet, optimizer={'schedule': 'constant'}, evaluation=measured)


def tasks(spec: Spec, config: Config) -> list[Task]:
    """Returns all runs, the longest first, so that short ones fill up the devices at the end.

    Among equally long runs, the first seed of every method comes first.

    Raises:
      UserError: the fields of a method do not fit the config.
    """
    found = []
    for seed in range(max(spec.seeds.values())):
        for name, fields in spec.methods.items():
            if seed < spec.seeds[name]:
                one = Method(name, fields).apply(config.replace(seed=seed))
                found.append(Task(name, seed, to_dict(one), spec.milestones(name)))
    return sorted(found, key=lambda task: -task.seconds[-1])


def check_runs(todo: Sequence[Task], directory: pathlib.Path) -> None:
    """Checks that the folder of a comparison holds no other runs of the same names.

    Args:
      todo: all runs.
      directory: folder of the comparison.

    Raises:
      UserError: it does, or the file of a run is damaged.
    """
    for task in todo:
        folder = run_folder(directory, task.folder)
        if (folder / TASK).exists() and _identity(read_task(folder)) != _identity(task):
            raise UserError(
                f'{folder}: holds a run with another config or other times; choose another '
                '--output, or remove it'
            )


def check_features(todo: Sequence[Task], directory: pathlib.Path, features: str) -> None:
    """Checks that finished runs were measured with the same features.

    Args:
      todo: all runs.
      directory: folder of the comparison.
      features: name of the features network, with a digest of its weights.

    Raises:
      UserError: a run was measured with other features, so the runs would not compare.
    """
    for task in todo:
        folder = run_folder(directory, task.folder)
        for row in finished(folder, {'features': str}):
            if row['features'] != features:
                raise UserError(
                    f'{folder}: was measured with features {row["features"]}, while '
                    f'--config.evaluation.features has {features} now; choose another --output, '
                    'or remove it'
                )


def run(
    todo: Sequence[Task], directory: pathlib.Path, devices: Sequence[str], timeout: float, say: Say
) -> dict[str, str]:
    """Runs what is not done yet; returns the reasons of failed runs, by folder of the run.

    Args:
      todo: all runs (`tasks`), which passed `check_runs`.
      directory: folder of the comparison.
      devices: GPUs as CUDA_VISIBLE_DEVICES names them, for one run at a time each; ('',): one run
        after the other on the devices that JAX finds.
      timeout: seconds after which the process of a run is killed.
      say: prints one line of progress.
    """
    failures: dict[str, str] = {}
    left = []
    for task in todo:
        folder = run_folder(directory, task.folder)
        if not (folder / TASK).exists():
            save_task(task, folder)
        if missing(task, folder):
            left.append(task)
    if len(left) < len(todo):
        say(f'{len(todo) - len(left)} of {len(todo)} runs are done already')

    def work(i: int, mine: Sequence[str]) -> None:
        task = left[i]
        folder = run_folder(directory, task.folder)
        env = dict(os.environ) | ({'CUDA_VISIBLE_DEVICES': mine[0]} if mine[0] else {})
        say(f'{task.label} ...')
        began = time.perf_counter()
        answer = processes.answer(
            [sys.executable, '-m', WORKER, str(folder)],
            env,
            timeout,
            folder / 'log.txt',
            json_output=False,
        )
        if answer.failure[0]:
            failures[task.folder] = ': '.join(answer.failure)
            say(f'{task.label}: {failures[task.folder]} (see {folder / "log.txt"})')
        else:
            say(
                f'{task.label}: {summary(task, folder)}; {time.perf_counter() - began:.0f} s in all'
            )

    processes.share([(i, 1) for i in range(len(left))], devices, work)
    return failures


def _identity(task: Task) -> Any:
    """Returns the fields that distinguish a task from others, as JSON stores them."""
    return json.loads(json.dumps(asdict(task) | {'config': identity(task.config)}))


def summary(task: Task, folder: pathlib.Path) -> str:
    """Returns the results of a run's last milestone in one line."""
    last = [
        row for row in finished(folder, ROW_FIELDS) if row['milestone'] == len(task.seconds) - 1
    ]
    return f'step {last[-1]["step"]}, ' + ', '.join(
        f'{row["metric"]} {row["value"]:.5g}' for row in last
    )


def measure_step_costs(
    spec: Spec, config: Config, directory: pathlib.Path, device: str, timeout: float, say: Say
) -> str:
    """Times the steps of all methods in one process and appends a row to step_cost.jsonl.

    Args:
      spec: the comparison.
      config: from `base_config`.
      directory: folder of the comparison.
      device: GPU as CUDA_VISIBLE_DEVICES names it; '': the first that JAX finds.
      timeout: seconds after which the process is killed.
      say: prints one line of progress.

    Returns:
      The reason of a failure, or ''.

    Raises:
      UserError: the fields of a method do not fit the config.
    """
    configs = {
        name: to_dict(Method(name, fields).apply(config.replace(parallel={'devices': 1})))
        for name, fields in spec.methods.items()
    }
    path = directory / 'step_cost.json'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(configs), encoding='utf-8')
    env = dict(os.environ) | ({'CUDA_VISIBLE_DEVICES': device} if device else {})
    say(f'timing the steps of {", ".join(configs)} ...')
    # --begun, because the caller has already checked that fields have an effect.
    command = [sys.executable, '-m', STEP_COST, '--begun', str(path)]
    answer = processes.answer(command, env, timeout, directory / 'step_cost.log')
    if answer.row is None:
        say(f'step cost: {": ".join(answer.failure)} (see {directory / "step_cost.log"})')
        return ': '.join(answer.failure)
    rows.append(directory / COSTS, answer.row)
    return ''


def save(spec: Spec, directory: pathlib.Path) -> None:
    """Writes the comparison to compare.json in its folder, which is created if needed."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SPEC).write_text(json.dumps(asdict(spec), indent=1), encoding='utf-8')


def save_failures(failures: dict[str, str], directory: pathlib.Path) -> None:
    """Writes the reasons of failed runs to failures.json."""
    (directory / FAILURES).write_text(json.dumps(failures, indent=1), encoding='utf-8')


def load_failures(directory: pathlib.Path) -> dict[str, str]:
    """Returns the failures of the last command that ran, by folder of the run."""
    path = directory / FAILURES
    if not path.exists():
        return {}
    found = read_json(path, advice='remove it')
    check_fields(found, dict.fromkeys(found, str), str(path), advice='remove it')
    return found


def load(directory: pathlib.Path) -> Spec:
    """Reads the comparison of a folder.

    Raises:
      UserError: the folder holds none.
    """
    path, advice = directory / SPEC, '--output names the folder of a comparison'
    values = read_json(path, advice=advice)
    check_fields(values, SPEC_FIELDS, str(path), advice=advice)
    methods = values['methods']
    check_fields(methods, dict.fromkeys(methods, dict), f'{path}: methods', advice=advice)
    for field, kind in (('seconds', NUMBER), ('seeds', int), ('evaluations', int)):
        if field not in values:
            raise UserError(f'{path}: expected a field {field}, found none; {advice}')
        if not isinstance(values[field], dict):  # older files have one number for all methods
            values[field] = dict.fromkeys(methods, values[field])
        check_fields(values[field], dict.fromkeys(methods, kind), f'{path}: {field}', advice=advice)
        if not all(0 < values[field][method] <= LARGEST for method in methods):
            raise UserError(f'{path}: {field}: expected 1 to {LARGEST} for each method; {advice}')
    if 'processes' in values:  # files of earlier versions lack it
        check_fields(values, {'processes': int}, str(path), advice=advice)
    config = values['config']
    if not (methods and config['ema']['rates']) or not all(
        isinstance(name, str) for name in config['evaluation']['metrics'] or [None]
    ):
        raise UserError(
            f'{path}: expected methods, evaluation.metrics and ema.rates, found one empty; {advice}'
        )
    if unknown := values.keys() - Spec.__dataclass_fields__.keys():
        raise UserError(f'{path}: {listed(sorted(map(shown, unknown)))}: unknown field; {advice}')
    return Spec(**values)
