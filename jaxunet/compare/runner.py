"""Runs a comparison: a process a run, several beside each other on devices of their own, and what is done is not done again."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxunet.compare.methods import Method
from jaxunet.compare.worker import TASK, Task, finished, missing, read_task, save_task
from jaxunet.config import Config, to_dict
from jaxunet.runtime import rows
from jaxunet.runtime import subprocesses as processes
from jaxunet.runtime.errors import UserError

WORKER, STEP_COST = 'jaxunet.compare.worker', 'jaxunet.compare.step_cost'
SPEC, COSTS, FAILURES = 'compare.json', 'step_cost.jsonl', 'failures.json'
FOREVER = 10**9  # steps
Say = Callable[[str], None]


@dataclass(frozen=True)
class Spec:
    """What a comparison is: kept in its folder for the report.

    Fields:
      config: with the methods' fields as the baseline has them.
      methods: name -> fields; the first is the baseline.
      seconds, seeds, evaluations: by method: of training, each run; runs, of the seeds 0, 1, ...; milestones, at equal distances up to
        `seconds`.
    """

    command: str
    config: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    seconds: dict[str, float]
    seeds: dict[str, int]
    evaluations: dict[str, int]

    def milestones(self, method: str) -> list[float]:
        count = self.evaluations[method]
        return [self.seconds[method] * (i + 1) / count for i in range(count)]


def base_config(config: Config) -> Config:
    """What all runs share: time ends them, so nothing may depend on the number of steps, and nothing else takes time."""
    together = max(config.train.steps_per_call, 1)
    forever = FOREVER // together * together
    quiet = {'steps': forever, 'checkpoint_every': forever, 'sample_every': 0, 'evaluate_every': 0}
    return config.replace(train=quiet, optimizer={'schedule': 'constant'})


def tasks(spec: Spec, config: Config) -> list[Task]:
    """All runs, those of the most seconds first, so that what is short fills up the devices; of these the first seed of every method, ...

    Raises:
      UserError: fields that do not fit the config.
    """
    found = []
    for seed in range(max(spec.seeds.values())):
        for name, fields in spec.methods.items():
            if seed < spec.seeds[name]:
                one = Method(name, fields).apply(config.replace(seed=seed))
                found.append(Task(name, seed, to_dict(one), spec.milestones(name)))
    return sorted(found, key=lambda task: -task.seconds[-1])


def check_features(todo: Sequence[Task], directory: pathlib.Path, features: str) -> None:
    """Raises UserError: a run of the folder was measured with other features than the ones of this name, and would not compare."""
    for task in todo:
        folder = directory / 'runs' / task.folder
        for row in finished(folder):
            if row['features'] != features:
                raise UserError(
                    f'{folder}: was measured with features {row["features"]}, while --config.evaluation.features has {features} now; '
                    'choose another --output, or remove it'
                )


def run(
    todo: Sequence[Task], directory: pathlib.Path, devices: Sequence[str], timeout: float, say: Say
) -> dict[str, str]:
    """Runs what is not done; returns why runs failed, by their folder.

    Args:
      devices: one run at a time on each: GPUs as CUDA_VISIBLE_DEVICES names them; ('',) = one after the other on what JAX finds.

    Raises:
      UserError: the folder holds other runs of these names.
    """
    failures: dict[str, str] = {}
    left = []
    for task in todo:
        folder = directory / 'runs' / task.folder
        _prepare(task, folder)
        if missing(task, folder):
            left.append(task)
    if len(left) < len(todo):
        say(f'{len(todo) - len(left)} of {len(todo)} runs are done already')

    def work(i: int, mine: Sequence[str]) -> None:
        task = left[i]
        folder = directory / 'runs' / task.folder
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


def _prepare(task: Task, folder: pathlib.Path) -> None:
    if (folder / TASK).exists():
        if asdict(read_task(folder)) != json.loads(json.dumps(asdict(task))):
            raise UserError(
                f'{folder}: holds a run with another config or other times; choose another --output, or remove it'
            )
        return
    save_task(task, folder)


def summary(task: Task, folder: pathlib.Path) -> str:
    """The last milestone of a run in a line."""
    last = [row for row in finished(folder) if row['milestone'] == len(task.seconds) - 1]
    return f'step {last[-1]["step"]}, ' + ', '.join(
        f'{row["metric"]} {row["value"]:.5g}' for row in last
    )


def measure_step_costs(
    spec: Spec, config: Config, directory: pathlib.Path, device: str, timeout: float, say: Say
) -> str:
    """Times the steps of all methods in one process; returns why that failed, or ''."""
    configs = {
        name: to_dict(Method(name, fields).apply(config.replace(parallel={'devices': 1})))
        for name, fields in spec.methods.items()
    }
    path = directory / 'step_cost.json'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(configs), encoding='utf-8')
    env = dict(os.environ) | ({'CUDA_VISIBLE_DEVICES': device} if device else {})
    say(f'timing the steps of {", ".join(configs)} ...')
    answer = processes.answer(
        [sys.executable, '-m', STEP_COST, str(path)], env, timeout, directory / 'step_cost.log'
    )
    if answer.row is None:
        say(f'step cost: {": ".join(answer.failure)} (see {directory / "step_cost.log"})')
        return ': '.join(answer.failure)
    rows.append(directory / COSTS, answer.row)
    return ''


def save(spec: Spec, directory: pathlib.Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SPEC).write_text(json.dumps(asdict(spec), indent=1), encoding='utf-8')


def save_failures(failures: dict[str, str], directory: pathlib.Path) -> None:
    (directory / FAILURES).write_text(json.dumps(failures, indent=1), encoding='utf-8')


def load_failures(directory: pathlib.Path) -> dict[str, str]:
    """Of the last command that ran."""
    path = directory / FAILURES
    return json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}


def load(directory: pathlib.Path) -> Spec:
    """Raises UserError: no comparison there."""
    try:
        values = json.loads((directory / SPEC).read_text(encoding='utf-8'))
        for field in ('seconds', 'evaluations'):  # once one number for all methods
            if not isinstance(values[field], dict):
                values[field] = dict.fromkeys(values['methods'], values[field])
        return Spec(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f'{directory / SPEC}: cannot be read: {error}; --output names the folder of a comparison'
        ) from None
