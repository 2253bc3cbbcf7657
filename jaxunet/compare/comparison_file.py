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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxunet.compare.comparison import DISTANCES, Comparison, Reference, Round
from jaxunet.compare.jobs import OVERRIDDEN, Job, call_function, check_jobs
from jaxunet.compare.methods import BASELINE, METHODS, OWN, named_fields
from jaxunet.compare.toml_file import check_form, read_toml
from jaxunet.config import Config
from jaxunet.config.relations import METRICS, unknown_metric
from jaxunet.config.unused import check_used
from jaxunet.metrics.features import INCEPTION
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.paths import expanded
from jaxunet.runtime.untrusted import NUMBER, shown

SUFFIX = '.toml'
MOST_RUNS = 10_000
# Fields that other keys of the file set, or that have no effect on the runs of a comparison.
STATED = ('seed', 'data.path', *OVERRIDDEN)
OPTIONS = {'eta': NUMBER, 'variance': str, 'guidance_scale': NUMBER}  # of samplers
FORM = {  # as `check_form` takes it
    'title?': str,
    'protocol?': str,
    'command?': str,
    'note?': str,
    'config': str,
    'baseline': str,
    'seeds': [int],
    'seconds': [NUMBER],
    'features': str,
    'by?': [str],
    'step_ms?': str | NUMBER,
    'rows?': str,
    'rounds': [{'methods': [str], 'seeds?': [int]}],
    'methods?': {'*': {'from?': str, 'fields?': dict, 'seconds?': [NUMBER]}},
    'images': {'name': str, 'path': str},
    'fields?': dict,
    'samplers': {'*': [str]},
    'samples': {
        'count': int,
        'batch_size': int,
        'picture?': int,
        **{f'{name}?': kind for name, kind in OPTIONS.items()},
    },
    'averages?': {'names?': [NUMBER], 'samples?': int},
    'references': [{'path?': str, 'name': str, 'metrics': [str]}],
}


def read_comparison(path: str | Path) -> Comparison:
    """Returns the comparison of a file.

    Raises:
      UserError: no such file, a key that is unknown or missing, or a value that does not fit; the
        message names the file and the key.
    """
    path = Path(path)
    values = read_toml(path)
    listed = isinstance(values.get('samplers'), list)
    check_form(values, FORM | ({'samplers': [str]} if listed else {}), f'{path}: ')

    def beside(name: str) -> Path:
        return Path(os.path.normpath(path.parent / expanded(name)))

    def existing(key: str) -> Path:
        file = beside(values[key])
        if not file.is_file():
            hint = near_misses(file.name, [p.name for p in file.parent.glob(f'*{file.suffix}')])
            raise UserError(f'{path}: {key}: no file {file}{hint}')
        return file

    samples, step_ms = values['samples'], values.get('step_ms', 0)
    averages, choosing = _averages(values.get('averages', {}), f'{path}: averages.')
    own = values.get('methods', {})
    comparison = Comparison(
        path=path,
        title=values.get('title', 'Training methods at equal time'),
        protocol=existing('protocol') if 'protocol' in values else None,
        command=values.get('command', ''),
        note=values.get('note', ''),
        baseline=values['baseline'],
        rounds=_rounds(values['rounds'], values['seeds'], f'{path}: '),
        seconds=tuple(values['seconds']),
        own_seconds={n: tuple(one['seconds']) for n, one in own.items() if 'seconds' in one},
        by=tuple(values.get('by', ())),
        own={name: _method(name, one, f'{path}: methods.{name}') for name, one in own.items()},
        template=Job(
            case='',
            data=values['images']['name'],
            config=str(existing('config')),
            fields={
                'data.path': values['images']['path'],
                **_fields(values.get('fields', {}), STATED, f'{path}: fields.'),
            },
            seconds=(),
            samplers=(),
            samples=samples['count'],
            batch_size=samples['batch_size'],
            options={name: samples[name] for name in OPTIONS if name in samples},
            picture=samples.get('picture', 0),
            averages=averages,
            choosing=choosing,
        ),
        samplers={
            objective: tuple(names)
            for objective, names in (
                {'': values['samplers']} if listed else values['samplers']
            ).items()
        },
        references=_references(values['references'], f'{path}: references'),
        features=Path(values['features'])
        if values['features'] in INCEPTION
        else beside(values['features']),
        step_ms=str(beside(step_ms)) if isinstance(step_ms, str) else str(step_ms),
        rows=beside(values['rows']) if 'rows' in values else None,
    )
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
                f'{comparison.path}: rounds: {cell[0]} with seed {cell[1]} is there twice; leave '
                'one of them out'
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


def _averages(values: Mapping[str, Any], place: str) -> tuple[tuple[str, ...], int]:
    """Returns the names of averages, and the number of samples by which one of them is chosen."""
    names = tuple(str(float(name)) for name in values.get('names', ()))
    if len(names) < 2 and 'samples' in values:
        raise UserError(
            f'{place}samples: choose one of several averages; expected two names or more, found '
            f'{len(names)}'
        )
    if len(names) > 1:
        check_form(values, {'names': [NUMBER], 'samples': int}, place)
    return names, values.get('samples', 0)


def _rounds(tables: Sequence[Any], seeds: Sequence[int], place: str) -> tuple[Round, ...]:
    rounds = [Round(tuple(one['methods']), tuple(one.get('seeds', seeds))) for one in tables]
    for i, one in enumerate(rounds):
        if unknown := [seed for seed in one.seeds if seed not in seeds]:
            raise UserError(
                f'{place}rounds[{i}].seeds: expected some of {shown(tuple(seeds))}, found '
                f'{unknown[0]}'
            )
    if (runs := sum(len(one.methods) * len(one.seeds) for one in rounds)) > MOST_RUNS:
        raise UserError(f'{place}rounds: expected at most {MOST_RUNS:,} runs, found {runs:,}')
    if unused := sorted({*seeds}.difference(*(one.seeds for one in rounds))):
        raise UserError(f'{place}seeds: expected a round with seed {unused[0]}, found none')
    return tuple(rounds)


def _method(name: str, values: Mapping[str, Any], place: str) -> dict[str, object]:
    """Returns the fields of a method that the file defines."""
    start = values.get('from', BASELINE)
    if (name in METHODS or '+' in name) and values.get('from') != name:
        raise UserError(
            f'{place}: expected a new name without +, or one that starts from itself, found '
            f'{name!r}'
        )
    fields = named_fields(start, f'{place}.from')
    return fields | _fields(values.get('fields', {}), OWN, f'{place}.fields.')


def _fields(values: Mapping[str, Any], others: Sequence[str], place: str) -> dict[str, object]:
    """Returns fields of the config by dotted path; the file may quote the path or not.

    Args:
      others: fields that are set elsewhere; a name that ends in a dot is a whole section.
    """
    fields: dict[str, object] = {}
    for name, value in values.items():
        inside = value if isinstance(value, dict) else {'': value}
        fields |= {f'{name}.{field}' if field else name: v for field, v in inside.items()}
    for path in fields:
        if path in others or path.startswith(tuple(o for o in others if o.endswith('.'))):
            raise UserError(
                f'{place}{path}: is set by every comparison, or by another key of the file; leave '
                'it out here'
            )
    return {p: tuple(v) if isinstance(v, list) else v for p, v in fields.items()}


def _references(tables: Sequence[Any], place: str) -> tuple[Reference, ...]:
    for i, one in enumerate(tables):
        for metric in one['metrics']:
            if metric not in METRICS:
                raise UserError(f'{place}[{i}].metrics: {unknown_metric(metric)}')
    return tuple(
        Reference(one.get('path', ''), one['name'], tuple(one['metrics'])) for one in tables
    )


def read_jobs(named: str, data: str, *, begun: bool = False) -> list[Job]:
    """Reads and checks the jobs of a file; every field must have an effect in some job.

    With a part of a comparison file, the jobs of all its methods count for this check.

    Args:
      named: FILE or FILE:PART. For a comparison file, PART is names of methods joined by commas;
        `get_jobs` of a Python file receives it, or '' without one.
      data: folder of the images.
      begun: as for `check_configs_used`.

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
    # Jobs that differ only in their seeds share a config.
    different = {(job.config, str(job.fields)): job for job in every}
    configs = [job.load_config() for job in different.values()]
    check_configs_used(path, configs, begun=begun)
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


def check_configs_used(path: str, configs: Sequence[Config], *, begun: bool) -> None:
    """Raises UserError, named after the file, for a field that has no effect in any of its configs.

    Args:
      begun: jobs have already started with these fields, so it is only logged.
    """
    try:
        check_used(*configs, earlier=configs if begun else [])
    except UserError as error:
        raise UserError(f'{path}: {error}') from None
