"""One run of a comparison in this process: trains to every milestone, keeps the averaged weights of each, then samples and measures them.

    python -m jaxunet.compare.worker FOLDER       # FOLDER/task.json has the fields of `Task`

`python -m jaxunet.compare` starts it. The folder gets a line of rows.jsonl for each metric of each milestone. Training that was cut off
starts anew, as its clock would not be comparable; weights that are kept are not trained again, nor is a milestone measured twice.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxunet.checkpoint.store import state_template
from jaxunet.config import Config, cli, resolve
from jaxunet.data.sources import Source, open_images
from jaxunet.model.unet import Params
from jaxunet.runtime import rows
from jaxunet.runtime.errors import USER_ERROR, UserError
from jaxunet.training.clock import Milestones
from jaxunet.training.evaluation import Evaluator
from jaxunet.training.loop import train

TASK, ROWS, SNAPSHOTS = 'task.json', 'rows.jsonl', 'snapshots'


@dataclass(frozen=True)
class Task:
    """What a run is: its config, and the seconds of training at which it is measured."""

    method: str
    seed: int
    config: dict[str, Any]
    seconds: list[float]

    @property
    def label(self) -> str:
        return f'{self.method}, seed {self.seed}'

    @property
    def folder(self) -> str:
        return f'{self.method}_seed{self.seed}'


def read_task(folder: pathlib.Path) -> Task:
    return Task(**json.loads((folder / TASK).read_text(encoding='utf-8')))


def finished(folder: pathlib.Path) -> list[rows.Row]:
    """The rows of a run so far."""
    return rows.read(folder / ROWS) if (folder / ROWS).exists() else []


def missing(task: Task, folder: pathlib.Path) -> list[int]:
    """The milestones without all their rows. A row is of the weights that are kept, so one with others is none."""
    metrics = resolve(task.config).evaluation.metrics
    done = {(row['milestone'], row['name']) for row in finished(folder)}
    return [i for i in range(len(task.seconds)) if any((i, name) not in done for name in metrics)]


def run(folder: pathlib.Path) -> None:
    """Does what is left of the run.

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
        params, step, seconds = load_snapshot(paths[i], template)
        began = time.perf_counter()
        results = evaluator.measure(params)
        assert results is not None  # nothing asks it to stop
        for name, result in zip(config.evaluation.metrics, results, strict=True):
            where = {'milestone': i, 'method': task.method, 'seed': task.seed, 'name': name}
            rows.append(folder / ROWS, {**where, **evaluator.row(result, step, seconds), **origin})
        print(
            f'{task.label}: milestone {i + 1} measured in {time.perf_counter() - began:.1f} s',
            flush=True,
        )


def most_telling(count: int) -> list[int]:
    """The order of milestones by what their curve would miss most without them: the last, then each time the middle of the widest gap."""
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
    (folder / ROWS).unlink(missing_ok=True)  # of weights that are no longer there
    reached: list[float] = []

    def keep(step: int, seconds: float, params: Params) -> None:
        save_snapshot(paths[len(reached)], params, step, seconds)
        reached.append(seconds)
        print(f'{task.label}: {seconds:.1f} s of training, step {step}', flush=True)

    train(config, folder / 'training', source, milestones=Milestones(tuple(task.seconds), keep))
    if len(reached) < len(task.seconds):
        raise UserError(
            f'{task.label}: stopped after {len(reached)} of {len(task.seconds)} milestones; the same command starts it anew'
        )


def save_snapshot(path: pathlib.Path, params: Params, step: int, seconds: float) -> None:
    """The weights' arrays in tree order; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix('.partial')
    with partial.open('wb') as file:
        arrays = {f'{i}': np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(params))}
        np.savez(file, step=np.int64(step), seconds=np.float64(seconds), **arrays)  # type: ignore[arg-type]
    os.replace(partial, path)


def load_snapshot(path: pathlib.Path, template: Params) -> tuple[Params, int, float]:
    """(weights as numpy, step, seconds of training)."""
    leaves, tree = jax.tree.flatten(template)
    with np.load(path) as arrays:
        found = [arrays[f'{i}'] for i in range(len(leaves))]
        step, seconds = int(arrays['step']), float(arrays['seconds'])
    if [x.shape for x in found] != [x.shape for x in leaves]:
        raise UserError(f'{path}: holds the weights of another model; remove {path.parent.parent}')
    return jax.tree.unflatten(tree, found), step, seconds


def save_task(task: Task, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f'{TASK}.partial'
    partial.write_text(json.dumps(dataclasses.asdict(task), indent=1), encoding='utf-8')
    partial.replace(folder / TASK)


def main() -> None:
    cli.enable_compilation_cache()
    try:
        run(pathlib.Path(sys.argv[1]))
    except UserError as error:
        print(f'error: {error}', file=sys.stderr, flush=True)
        sys.exit(USER_ERROR)


if __name__ == '__main__':
    main()
