"""Writes the comparison that flags describe as a comparison file, in the folder of its results."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxunet.compare import collected
from jaxunet.compare.comparison import DISTANCES, Comparison
from jaxunet.compare.comparison_file import read_comparison
from jaxunet.compare.jobs import Job
from jaxunet.compare.methods import BASELINE, METHODS, Method, named_fields
from jaxunet.compare.step_times import COSTS
from jaxunet.config import Config, identity, to_dict
from jaxunet.config.samplers import evaluation_sampler
from jaxunet.metrics.features import INCEPTION
from jaxunet.runtime import subprocesses
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.whole_files import written
from jaxunet.sweep.config_file import config_file

FILE, CONFIG = 'compare.toml', 'config.py'
STEP_COSTS = 'jaxunet.compare.step_cost'
EARLIER = 'compare.json'  # of versions that had other rows for comparisons of flags
OPTIONS = {'eta': 0.0, 'variance': '', 'guidance_scale': 1.0}  # of samplers, with their defaults


@dataclasses.dataclass(frozen=True)
class FlagsComparison:
    """A comparison as flags state it.

    Fields:
      config: the config of all runs, before the fields of the methods are set (`base_config`).
      methods: the first is the baseline.
      seconds: method -> seconds of training of each run.
      seeds: method -> number of runs, with the seeds 0, 1, ...
      evaluations: method -> number of times, equally spaced up to `seconds`, that are measured.
      command: the command line.
      note: a paragraph for the report; '' = that of an earlier command.
    """

    config: Config
    methods: Sequence[Method]
    seconds: Mapping[str, float]
    seeds: Mapping[str, int]
    evaluations: Mapping[str, int]
    command: str
    note: str = ''

    def times(self, method: str) -> list[float]:
        """Returns the seconds of training at which the runs of a method are measured.

        They are rounded, so that a time is the same number whatever it is a part of.
        """
        count = self.evaluations[method]
        return [round(self.seconds[method] * (i + 1) / count, 6) for i in range(count)]


def load(directory: Path) -> Comparison:
    """Returns the comparison of flags in a folder.

    Raises:
      UserError: the folder holds none, or one of an earlier version.
    """
    if (directory / EARLIER).exists():
        raise UserError(
            f'--output: {directory} holds a comparison of an earlier version ({EARLIER}), which '
            'commit 5bac3eb9 reads; choose another --output'
        )
    if not (directory / FILE).is_file():
        raise UserError(
            f'--output: {directory} holds no comparison (no {FILE}); give the folder of one, or '
            'run without --plot_only'
        )
    return read_comparison(directory / FILE)


def write(stated: FlagsComparison, directory: Path) -> Comparison:
    """Writes the comparison file and its config to the folder, and returns the comparison.

    Raises:
      UserError: the comparison is not valid, or the folder holds other runs of the same names.
    """
    before = load(directory) if any((directory / n).exists() for n in (FILE, EARLIER)) else None
    if before and before.note and not stated.note:
        stated = dataclasses.replace(stated, note=before.note)
    texts = {
        CONFIG: config_file('Runs of a comparison', to_dict(stated.config)),
        FILE: ''.join(f'{key} = {toml(value)}\n' for key, value in values(stated).items()),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            (Path(folder) / name).write_text(text, encoding='utf-8')
        try:
            jobs = read_comparison(Path(folder) / FILE).jobs('', '')
        except UserError as error:
            raise UserError(str(error).replace(f'{folder}{os.sep}', '')) from None
        began = before.jobs('', '') if before and (directory / '1').exists() else []
        known = {job.name: _identity(job) for job in began}
        for job in jobs:
            if job.name in known and known[job.name] != _identity(job):
                raise UserError(
                    f'{directory}: {job.name}: holds a run with another config or other times; '
                    'choose another --output, or remove it'
                )
    for name, text in texts.items():
        with written(directory / name, '--output') as partial:
            partial.write_text(text, encoding='utf-8')
    return load(directory)


def _identity(job: Job) -> object:
    """Returns what distinguishes a run and its measurements from others of its name."""
    same = dataclasses.replace(job, config='', fields={}, batch_size=1, picture=0)
    return same, identity(to_dict(job.load_config(devices=0)))


def values(stated: FlagsComparison) -> dict[str, Any]:
    """Returns the keys of the comparison file (`jaxunet.compare.comparison_file`)."""
    config, names = stated.config, [method.name for method in stated.methods]
    evaluation, path = config.evaluation, config.data.path
    features = evaluation.features
    reference: dict[str, object] = {'metrics': evaluation.metrics}
    reference['name'] = evaluation.reference or path
    if evaluation.reference:
        reference['path'] = _absolute(evaluation.reference)
    samplers: dict[str, list[str]] = {}
    for method in stated.methods:
        applied = method.apply(config)
        name, steps = evaluation_sampler(applied)
        parts = (name, str(steps or applied.diffusion.steps), evaluation.skip_schedule)
        samplers[applied.diffusion.objective] = [':'.join(filter(None, parts))]
    count = max(stated.seeds.values())
    by = {*evaluation.metrics} & {*DISTANCES} or evaluation.metrics[:1]
    return {
        'title': 'Methods at equal training wall-clock',
        'command': stated.command,
        'note': stated.note,
        'config': CONFIG,
        'baseline': names[0],
        'seeds': range(count),
        'seconds': stated.times(names[0]),
        'features': features if features in INCEPTION else _absolute(features),
        'by': [name for name in evaluation.metrics if name in by],
        'rounds': [
            {'methods': [name for name in names if seed < stated.seeds[name]], 'seeds': [seed]}
            for seed in range(count)
        ],
        'methods': {
            method.name: own for method in stated.methods if (own := _method(method, stated))
        },
        'images': {
            'name': re.sub(r'[^\w.-]', '', Path(path).name)[:40] or 'images',
            'path': _absolute(path),
        },
        'fields': {'diffusion.objective': config.diffusion.objective},
        'samplers': samplers,
        'samples': {
            'count': evaluation.samples,
            'batch_size': evaluation.batch_size,
            **{
                name: getattr(evaluation, name)
                for name, default in OPTIONS.items()
                if getattr(evaluation, name) != default
            },
        },
        'references': [reference],
    }


def measure_step_costs(
    stated: FlagsComparison, directory: Path, device: str, timeout: float
) -> str:
    """Times the steps of all methods in one process, for step_cost.jsonl.

    Args:
      device: GPU as CUDA_VISIBLE_DEVICES names it; '' = the first that JAX finds.
      timeout: seconds after which the process is killed.

    Returns:
      The reason of a failure, or ''.
    """
    alone = stated.config.replace(parallel={'devices': 1})
    configs = {method.name: to_dict(method.apply(alone)) for method in stated.methods}
    path, log = directory / 'step_cost.json', directory / 'step_cost.log'
    path.write_text(json.dumps(configs), encoding='utf-8')
    env = subprocesses.environment([device] if device else [])
    print(f'timing the steps of {", ".join(configs)} ...', flush=True)
    # --begun, because the fields have been checked.
    process = [sys.executable, '-m', STEP_COSTS, '--begun', str(path)]
    answer = subprocesses.answer(process, env, timeout, log)
    if answer.row is None:
        return f'step cost: {": ".join(answer.failure)} (see {log})'
    collected.write(directory / COSTS, [answer.row])
    return ''


def _absolute(path: str) -> str:
    """Returns a path for any current folder; names of sources such as digits: stay."""
    return path if ':' in path else os.path.abspath(os.path.expanduser(path))


def _method(method: Method, stated: FlagsComparison) -> dict[str, object]:
    """Returns the keys of a method; {} for a known one as it is, with the times of all."""
    known = method.name in METHODS or '+' in method.name
    start = method.name if known else BASELINE
    usual = named_fields(start, '--methods')
    changed = {path: value for path, value in method.fields.items() if value != usual.get(path)}
    own: dict[str, object] = {} if known and not changed else {'fields': changed}
    if (times := stated.times(method.name)) != stated.times(stated.methods[0].name):
        own['seconds'] = times
    return {'from': start, **own} if own else {}


def toml(value: object) -> str:
    """Returns a value as TOML."""
    if isinstance(value, Mapping):
        parts = (f'{json.dumps(key)} = {toml(part)}' for key, part in value.items())
        return f'{{{", ".join(parts)}}}'
    if isinstance(value, list | tuple | range):
        return f'[{", ".join(map(toml, value))}]'
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
