"""Does one run of a comparison: trains, keeps the averaged weights of every milestone, measures.

    python -m jaxunet.compare.worker FOLDER       # FOLDER/task.json has the fields of `Task`

`python -m jaxunet.compare` starts it. The folder gets one line of rows.jsonl for each metric of
each milestone. Interrupted training starts from scratch, because its clock would not be comparable.
Once all weights are saved, the run is not trained again; no milestone is measured twice.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxunet.checkpoint.store import state_template
from jaxunet.config import Config, cli, resolve
from jaxunet.data.sources import Source, open_images
from jaxunet.metrics.arrays import read_arrays
from jaxunet.model.unet import Params
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import NUMBER, check_fields, read_json
from jaxunet.training.clock import Milestones
from jaxunet.training.evaluation import Evaluator
from jaxunet.training.loop import train

TASK, ROWS, SNAPSHOTS = 'task.json', 'rows.jsonl', 'snapshots'
TASK_FIELDS = {'method': str, 'seed': int, 'config': dict, 'seconds': list}
MILESTONE_FIELDS = {'milestone': int, 'name': str}
ROW_FIELDS = {  # what a report needs
    **MILESTONE_FIELDS,
    'method': str,
    'seed': int,
    'metric': str,
    'value': NUMBER,
    'step': int,
    'training_seconds': NUMBER,
    'features': object,
    'resize': object,
    'reference': object,
    'num_samples': object,
    'sampler': object,
    'evaluations': object,
    'device': str,
    'driver': object,  # null without a GPU
    'versions': {'jax': str},
    'git': object,  # null outside a checkout
}


@dataclass(frozen=True)
class Task:
    """The input of a run.

    Fields:
      method: name of the method.
      seed: seed of the run.
      config: the config as nested dicts.
      seconds: milestones: seconds of training at which the run is measured, increasing.
    """

    method: str
    seed: int
    config: dict[str, Any]
    seconds: list[float]

    @property
    def label(self) -> str:
        """Name of the run in messages."""
        return f'{self.method}, seed {self.seed}'

    @property
    def folder(self) -> str:
        """Name of the run's folder."""
        return run_name(self.method, self.seed)


def run_name(method: str, seed: int) -> str:
    """Returns the name of a run, used for its folder and in the list of failures."""
    return f'{method}_seed{seed}'


def run_folder(directory: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the folder of a run; `directory` is its comparison's, `name` is from `run_name`."""
    return directory / 'runs' / name


def read_task(folder: pathlib.Path) -> Task:
    """Reads the task of a run's folder.

    Raises:
      UserError: the file is damaged.
    """
    path, advice = folder / TASK, f'remove {folder}, and the run starts again'
    values = read_json(path, advice=advice)
    check_fields(values, TASK_FIELDS, str(path), advice=advice)
    if len(values) > len(TASK_FIELDS) or any(
        type(s) not in (int, float) for s in values['seconds']
    ):
        raise UserError(f'{path}: expected {", ".join(TASK_FIELDS)} alone; {advice}')
    return Task(**values)


def finished(
    folder: pathlib.Path, fields: Mapping[str, object] = MILESTONE_FIELDS
) -> list[rows.Row]:
    """Returns the rows of a run so far.

    Args:
      fields: the fields that the caller needs; see `check_fields`.

    Raises:
      UserError: a line that lacks one of them.
    """

    def check(row: rows.Row, source: str) -> None:
        check_fields(row, fields, source, advice='remove the line')

    return rows.read(folder / ROWS, check) if (folder / ROWS).exists() else []


def missing(task: Task, folder: pathlib.Path) -> list[int]:
    """Returns the milestones that lack a row of any metric."""
    metrics = resolve(task.config).evaluation.metrics
    done = {(row['milestone'], row['name']) for row in finished(folder)}
    return [i for i in range(len(task.seconds)) if any((i, name) not in done for name in metrics)]


def run(folder: pathlib.Path) -> None:
    """Does the rest of the run in a folder with a task.

    Raises:
      UserError: the config does not fit the data or the machine, or training diverged.
    """
    task = read_task(folder)
    config = resolve(task.config)
    source = open_images(config)
    paths = [folder / SNAPSHOTS / f'{i}.npz' for i in range(len(task.seconds))]
    if not all(path.exists() for path in paths) and missing(task, folder):
        _train(task, config, source, folder, paths)
    left = missing(task, folder)
    if not left:
        return
    evaluator = Evaluator(config, source, jax.local_devices())
    template = state_template(config).params
    origin = rows.provenance()
    for i in (i for i in most_telling(len(paths)) if i in left):  # in case time runs out
        kept = load_snapshot(paths[i], template)
        began = time.perf_counter()
        results = evaluator.measure(kept.params)
        for name, result in zip(config.evaluation.metrics, results, strict=True):
            where = {'milestone': i, 'method': task.method, 'seed': task.seed, 'name': name}
            measured = evaluator.row(result, kept.step, kept.seconds)
            rows.append(folder / ROWS, {**where, **measured, **origin})
        print(
            f'{task.label}: milestone {i + 1} measured in {time.perf_counter() - began:.1f} s',
            flush=True,
        )


def most_telling(count: int) -> list[int]:
    """Returns the milestones in the order in which they tell most about the curve.

    The last milestone comes first, then always the middle of the widest gap.
    """
    order = [count - 1]
    while len(order) < count:
        ends = sorted([-1, *order])
        low, high = max(itertools.pairwise(ends), key=lambda gap: gap[1] - gap[0])
        order.append((low + high) // 2)
    return order


def _train(
    task: Task, config: Config, source: Source, folder: pathlib.Path, paths: Sequence[pathlib.Path]
) -> None:
    for stale in (folder / 'training', folder / SNAPSHOTS):
        shutil.rmtree(stale, ignore_errors=True)
    (folder / ROWS).unlink(missing_ok=True)  # these rows belong to the removed weights
    reached: list[float] = []
    rate = str(config.ema.rates[0])

    def keep(
        step: int, seconds: float, averages: dict[str, Params], asked: Callable[[], bool]
    ) -> None:
        save_snapshot(paths[len(reached)], averages[rate], step, seconds)
        reached.append(seconds)
        print(f'{task.label}: {seconds:.1f} s of training, step {step}', flush=True)

    train(config, folder / 'training', source, milestones=Milestones(tuple(task.seconds), keep))
    if len(reached) < len(task.seconds):
        raise UserError(
            f'{task.label}: stopped after {len(reached)} of {len(task.seconds)} milestones; the '
            'same command starts it again'
        )


def save_snapshot(path: pathlib.Path, params: Params, step: int, seconds: float) -> None:
    """Writes weights as arrays in tree order; the file is complete or absent.

    Args:
      path: the .npz file; its folder is created if needed.
      params: the averaged weights.
      step: training steps so far.
      seconds: seconds of training so far.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix('.partial')
    with partial.open('wb') as file:
        arrays = {'step': np.asarray(step, np.int64), 'seconds': np.asarray(seconds, np.float64)}
        arrays |= {f'{i}': np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(params))}
        np.savez(file, **arrays)  # type: ignore[arg-type]
    os.replace(partial, path)


class Snapshot(NamedTuple):
    """The averaged weights of a milestone.

    Fields:
      params: numpy arrays.
      step: training steps so far.
      seconds: seconds of training so far.
    """

    params: Params
    step: int
    seconds: float


def load_snapshot(path: pathlib.Path, template: Params) -> Snapshot:
    """Reads a file of `save_snapshot`.

    Args:
      template: weights with the expected tree and shapes.

    Raises:
      UserError: the shapes are those of another model.
    """
    leaves, tree = jax.tree.flatten(template)
    arrays = read_arrays(path)
    wanted = [*(f'{i}' for i in range(len(leaves))), 'step', 'seconds']
    if missing := [name for name in wanted if name not in arrays]:
        raise UserError(f'{path}: expected an array {missing[0]}, found none; remove the file')
    *found, step_array, seconds_array = (arrays[name] for name in wanted)
    if step_array.shape or seconds_array.shape or step_array.dtype.kind not in 'iu':
        raise UserError(f'{path}: step: expected one whole number; remove the file')
    step, seconds = int(step_array), float(seconds_array)
    if [x.shape for x in found] != [x.shape for x in leaves]:
        raise UserError(f'{path}: holds the weights of another model; remove {path.parent.parent}')
    return Snapshot(jax.tree.unflatten(tree, found), step, seconds)


def save_task(task: Task, folder: pathlib.Path) -> None:
    """Writes the task to the run's folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f'{TASK}.partial'
    partial.write_text(json.dumps(dataclasses.asdict(task), indent=1), encoding='utf-8')
    partial.replace(folder / TASK)


def main(argv: Sequence[str]) -> None:
    """Does the run of the folder on the command line.

    Raises:
      UserError: there is not exactly one argument, or an error of `run`.
    """
    if len(argv) != 2:
        raise UserError(f'expected FOLDER, found {len(argv) - 1} arguments')
    cli.enable_compilation_cache()
    run(pathlib.Path(argv[1]))


if __name__ == '__main__':
    cli.run(main, arguments=True)
