"""Reads comparison files, and files of jobs.

A comparison file is TOML that states a comparison of training methods:

    title = "Which method is sooner?"
    protocol = "PROTOCOL.md"            # why these methods, seeds and times; optional
    command = "python -m ..."           # for the report; default: that of the report itself
    note = "On a shared machine."       # a paragraph of the report
    config = "../../../configs/cifar10.py"
    baseline = "uniform"
    seeds = [0, 1, 2]
    seconds = [60, 120, 240]            # of training, at which each run is measured
    features = "features.npz"           # file of the feature network, or inception
    by = ["fid"]                        # metrics of the first reference by which methods are
                                        # compared; default: its distances
    step_ms = "step_ms.jsonl"           # a number, or rows of jaxunet.compare.step_cost;
                                        # default: training time is measured
    rows = "rows.jsonl"                 # of earlier runs, which are not repeated; may be missing

    [[rounds]]                          # the order in which the cells are filled
    methods = ["uniform", "flow", "flow+muon", "mine"]
    seeds = [0]                         # default: all

    [methods.mine]                      # own methods; others are names of jaxunet.compare.methods
    from = "adaptive"                   # starts from its fields; default: those of uniform. A
                                        # method that starts from itself changes a known one
    fields = {"timesteps.adaptive_bins" = 64}
    seconds = [60, 120]                 # default: those of all

    [images]
    name = "cifar10"                    # their name in the rows
    path = "cifar10_train.tar.xz"       # data.path, in the folder of --data

    [fields]                            # of the config, the same for all methods
    "data.holdout" = 1000

    [samplers]                          # by diffusion.objective, or samplers = [...] for all; the
    epsilon = ["ddpm:50", "heun:25"]    # first also chooses the average

    [samples]
    count = 10_000                      # drawn by each sampler
    batch_size = 1000
    picture = 64                        # images in the grid of the first seed; default 0: no grid
    guidance_scale = 1.5                # options of all samplers, with eta and variance

    [averages]                          # default: the config's first rate
    names = [0.9999, 0.05, 0.15]        # rates and widths that the config keeps
    samples = 1000                      # drawn with each average to choose one of them

    [[references]]                      # methods are compared by distances to the first
    path = "cifar10_train.tar.xz"       # as [images] path; default: the training images, as the
                                        # model sees them
    name = "train"
    metrics = ["fid", "kid", "precision", "recall"]

Paths are relative to the folder of the file; those of images are in the folder of `--data`, unless
they name a source such as digits:. `docs/results/methods/methods.toml` is such a file.

A Python file of jobs has a function `get_jobs(part, data)` that returns a list of `Job`, the most
important first; `docs/results/recipes/jobs.py` is one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jaxunet.compare.comparison import DISTANCES, Comparison, Reference, Round, known_fields
from jaxunet.compare.jobs import OVERRIDDEN, Job, call_function, check_jobs
from jaxunet.compare.methods import BASELINE, METHODS, OWN
from jaxunet.compare.toml_table import Table, read_toml
from jaxunet.config import Config
from jaxunet.config.relations import METRICS, unknown_metric
from jaxunet.config.unused import check_used
from jaxunet.metrics.features import INCEPTION
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.paths import expanded
from jaxunet.runtime.untrusted import NUMBER, shown

SUFFIX = '.toml'
# Options of samplers, with their kinds.
OPTIONS = {'eta': NUMBER, 'variance': str, 'guidance_scale': NUMBER}
MOST_RUNS = 10_000
# Fields that other keys of the file set, or that have no effect on the runs of a comparison.
STATED = ('seed', 'data.path', *OVERRIDDEN)


def read_comparison(path: str | Path) -> Comparison:
    """Returns the comparison of a file.

    Raises:
      UserError: no such file, a key that is unknown or missing, or a value that does not fit; the
        message names the file and the key.
    """
    path = Path(path)
    table = read_toml(path)

    def beside(name: str) -> Path:
        return Path(os.path.normpath(path.parent / expanded(name)))

    rows, step_ms = table.one('rows', str, None), table.one('step_ms', str | NUMBER, 0)
    images, samples = table.table('images'), table.table('samples')
    averages = table.table('averages', optional=True)
    names = averages.several('names', NUMBER, ())
    if len(names) < 2 and averages.holds('samples', int):
        raise UserError(
            f'{averages.place}samples: choose one of several averages; expected two names or more, '
            f'found {len(names)}'
        )
    seeds, features = table.several('seeds', int), table.one('features', str)
    own, own_seconds = _own_methods(table.table('methods', optional=True))
    comparison = Comparison(
        path=path,
        title=table.one('title', str, 'Training methods at equal time'),
        protocol=_existing(table, 'protocol', path.parent) if table.has('protocol') else None,
        command=table.one('command', str, ''),
        note=table.one('note', str, ''),
        config=_existing(table, 'config', path.parent),
        baseline=table.one('baseline', str),
        rounds=_rounds(table, seeds),
        seconds=table.several('seconds', NUMBER),
        own_seconds=own_seconds,
        by=table.several('by', str, ()),
        own=own,
        images=(images.one('name', str), images.one('path', str)),
        fields=_fields(table.table('fields', optional=True), STATED),
        samplers=_samplers(table),
        samples=samples.one('count', int),
        batch_size=samples.one('batch_size', int),
        picture=samples.one('picture', int, 0),
        options={
            name: samples.one(name, kind) for name, kind in OPTIONS.items() if samples.has(name)
        },
        averages=tuple(str(float(name)) for name in names),
        choosing=averages.one('samples', int, *([] if len(names) > 1 else [0])),
        references=_references(table),
        features=Path(features) if features in INCEPTION else beside(features),
        step_ms=str(beside(step_ms)) if isinstance(step_ms, str) else str(step_ms),
        rows=beside(rows) if rows is not None else None,
    )
    for one in (table, images, samples, averages):
        one.done()
    _check(comparison)
    return comparison


def _check(comparison: Comparison) -> None:
    """Raises UserError for values that do not fit each other."""
    for method in comparison.methods:
        comparison.fields_of(method)
    if comparison.baseline not in comparison.methods:
        raise UserError(
            f'{comparison.path}: baseline: expected one of the methods of the rounds, '
            f'{", ".join(comparison.methods)}, found {comparison.baseline!r}'
        )
    if unused := [name for name in comparison.own if name not in comparison.methods]:
        raise UserError(
            f'{comparison.path}: methods.{unused[0]}: expected a method of a round, '
            'found it in none'
        )
    for cell, count in Counter(comparison.cells).items():
        if count > 1:
            raise UserError(
                f'{comparison.path}: rounds: {cell[0]} with seed {cell[1]} is there twice; leave one '
                'of them out'
            )
    metrics = comparison.references[0].metrics
    if not {*(comparison.by or DISTANCES)} & {*metrics}:
        raise UserError(
            f'{comparison.path}: references[0].metrics: expected one of '
            f'{", ".join(comparison.by or DISTANCES)}, by which the methods are compared'
        )
    if unknown := [name for name in comparison.by if name not in metrics]:
        raise UserError(
            f'{comparison.path}: by: expected some of {", ".join(metrics)}, the metrics of the '
            f'first reference, found {unknown[0]!r}'
        )
    for values in zip(*((one.name, one.path) for one in comparison.references), strict=True):
        if len(set(values)) < len(values):
            raise UserError(
                f'{comparison.path}: references: expected different names and paths, found '
                f'{", ".join(values)}'
            )
    for method in comparison.methods:
        comparison.samplers_of(method)


def _existing(table: Table, key: str, folder: Path) -> Path:
    """Returns the path of a file that must be there."""
    named = table.one(key, str)
    path = Path(os.path.normpath(folder / expanded(named)))
    if not path.is_file():
        neighbours = [p.name for p in path.parent.glob(f'*{path.suffix}')]
        hint = near_misses(path.name, neighbours)
        raise UserError(f'{table.place}{key}: no file {path}{hint}')
    return path


def _rounds(table: Table, seeds: tuple[int, ...]) -> tuple[Round, ...]:
    found = []
    for one in table.tables('rounds'):
        mine = one.several('seeds', int, seeds)
        if unknown := [seed for seed in mine if seed not in seeds]:
            raise UserError(
                f'{one.place}seeds: expected some of {shown(seeds)}, found {unknown[0]}'
            )
        found.append(Round(one.several('methods', str), mine))
        one.done()
    if (runs := sum(len(one.methods) * len(one.seeds) for one in found)) > MOST_RUNS:
        raise UserError(f'{table.place}rounds: expected at most {MOST_RUNS:,} runs, found {runs:,}')
    if unused := sorted({*seeds}.difference(*(one.seeds for one in found))):
        raise UserError(f'{table.place}seeds: expected a round with seed {unused[0]}, found none')
    return tuple(found)


def _own_methods(
    table: Table,
) -> tuple[dict[str, dict[str, object]], dict[str, tuple[float, ...]]]:
    """Returns the fields of the methods that the file defines, and the times of some of them."""
    found: dict[str, dict[str, object]] = {}
    seconds: dict[str, tuple[float, ...]] = {}
    for name in table.every():
        one = table.table(name)
        start = one.one('from', str, BASELINE)
        if (name in METHODS or '+' in name) and not (start == name and one.has('from')):
            raise UserError(
                f'{one.place[:-1]}: expected a new name without +, or one that starts from itself, '
                f'found {name!r}'
            )
        fields = known_fields(start, f'{one.place}from')
        found[name] = fields | _fields(one.table('fields', optional=True), OWN)
        if one.has('seconds'):
            seconds[name] = one.several('seconds', NUMBER)
        one.done()
    return found, seconds


def _fields(table: Table, others: tuple[str, ...]) -> dict[str, object]:
    """Returns fields of the config by dotted path; the file may quote the path or not.

    Args:
      others: fields that are set elsewhere; a name that ends in a dot is a whole section.
    """
    fields: dict[str, object] = {}
    for name, value in table.every().items():
        inside = table.table(name).every() if table.holds(name, dict) else {'': value}
        fields |= {f'{name}.{field}' if field else name: v for field, v in inside.items()}
    for path in fields:
        if path in others or path.startswith(tuple(o for o in others if o.endswith('.'))):
            raise UserError(
                f'{table.place}{path}: is set by every comparison, or by another key of the file; '
                'leave it out here'
            )
    return {p: tuple(v) if isinstance(v, list) else v for p, v in fields.items()}


def _samplers(table: Table) -> dict[str, tuple[str, ...]]:
    """Returns samplers by objective; those of a list have the key ''."""
    if table.holds('samplers', list):
        return {'': table.several('samplers', str)}
    by_objective = table.table('samplers')
    return {name: by_objective.several(name, str) for name in by_objective.every()}


def _references(table: Table) -> tuple[Reference, ...]:
    found = []
    for one in table.tables('references'):
        metrics = one.several('metrics', str)
        for metric in metrics:
            if metric not in METRICS:
                raise UserError(f'{one.place}metrics: {unknown_metric(metric)}')
        found.append(Reference(one.one('path', str, ''), one.one('name', str), metrics))
        one.done()
    return tuple(found)


def read_jobs(named: str, data: str, *, begun: bool = False) -> list[Job]:
    """Reads and checks the jobs of a file; every field must have an effect in some job.

    With a part of a comparison file, the jobs of all its methods count for this check.

    Args:
      named: FILE or FILE:PART. For a comparison file, PART is names of methods joined by commas;
        `get_jobs` of a Python file receives it, or '' without one.
      data: folder of the images.
      begun: jobs have already started with these fields; fields without an effect are then logged,
        and are no error.

    Raises:
      UserError: the file or part does not exist, two jobs have the same name, a value is out of
        range, or a field has no effect.
    """
    path, _, part = named.partition(':')
    if path.endswith(SUFFIX):
        comparison = read_comparison(path)
        jobs, every = comparison.jobs(part, data), comparison.jobs('', data)
    else:
        jobs = every = _python_jobs(named, data)
    check_configs_used(path, load_configs(every), begun=begun)
    return jobs


def _python_jobs(named: str, data: str) -> list[Job]:
    path, _, part = named.partition(':')
    try:
        jobs = call_function(path, 'get_jobs', part, data)
    except UserError as error:
        raise UserError(f'--jobs: {str(error).removeprefix("--jobs: ")}') from None
    if not isinstance(jobs, list) or not jobs or not all(isinstance(job, Job) for job in jobs):
        raise UserError(f'--jobs: {named}: expected get_jobs() to return jobs, found {shown(jobs)}')
    try:
        check_jobs(jobs)
    except UserError as error:
        raise UserError(f'--jobs: {named}: {error}') from None
    return jobs


def load_configs(jobs: Sequence[Job]) -> list[Config]:
    """Returns the configs of jobs; jobs that differ only in their seeds share one."""
    different = {(job.config, str(job.fields)): job for job in jobs}
    return [job.load_config() for job in different.values()]


def check_configs_used(path: str, configs: Sequence[Config], *, begun: bool) -> None:
    """Checks that the fields of a file's configs have an effect in some of them.

    Args:
      path: the file, for the message.
      begun: jobs have already started with these fields; fields without an effect are then logged,
        and are no error.

    Raises:
      UserError: a field has no effect.
    """
    try:
        check_used(*configs, earlier=configs if begun else [])
    except UserError as error:
        raise UserError(f'{path}: {error}') from None
