"""A comparison of training methods as data; `jaxunet.compare.comparison_file` reads it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from jaxunet.compare.jobs import Job, check_jobs
from jaxunet.compare.methods import named_fields
from jaxunet.compare.statistics import Metric
from jaxunet.config.checks import INVALID
from jaxunet.config.relations import HIGHER_IS_BETTER
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.paths import expanded
from jaxunet.runtime.rows import Row
from jaxunet.runtime.untrusted import plain

EVERY = ('', 'all')  # parts that mean all methods
TITLES = {
    'fid': 'Fréchet distance',
    'sfid': 'spatial Fréchet distance',
    'kid': 'kernel distance',
    'precision': 'precision',
    'recall': 'recall',
    'copies': 'copies',
    'inception_score': 'Inception Score',
}
DISTANCES = ('fid', 'sfid', 'kid')


class Round(NamedTuple):
    """Runs that come before those of later rounds: all methods with one seed, then the next."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]


class Reference(NamedTuple):
    """Real images that samples are compared with; the fields are the keys of the file.

    Without a path, they are the training images, as the model sees them.
    """

    path: str
    name: str
    metrics: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison of training methods, as its file states it.

    Fields:
      path: the file.
      title: title of the report.
      baseline: the method with which the others are compared.
      rounds: the runs in their order.
      seconds: seconds of training at which each run is measured, ascending.
      own_seconds: those of methods that are measured at other times.
      references: real images and the metrics of samples against them; the first are those by which
        methods are compared.
      by: metrics of the first reference by which methods are compared; () = its distances.
      own: name of a method that the file defines -> its fields.
      template: a run without method, seed, times, samplers and references.
      samplers: samplers by objective; the key '' holds for objectives that are not named.
      step_ms: milliseconds that the clock counts for a step, or the path of a file with a number
        for each method; '0' = it measures training time.
      others: the keys of the file with the same names (`jaxunet.compare.comparison_file`).
    """

    path: Path
    title: str
    baseline: str
    rounds: tuple[Round, ...]
    seconds: tuple[float, ...]
    own_seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    references: tuple[Reference, ...]
    by: tuple[str, ...] = ()
    protocol: Path | None
    command: str
    note: str
    own: Mapping[str, Mapping[str, object]]
    template: Job
    samplers: Mapping[str, tuple[str, ...]]
    features: Path
    step_ms: str
    rows: Path | None

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """The methods in the order in which they first appear."""
        return tuple(dict.fromkeys(name for one in self.rounds for name in one.methods))

    @cached_property
    def cells(self) -> tuple[tuple[str, int], ...]:
        """All runs in their order, as (method, seed)."""
        return tuple(
            (method, seed) for one in self.rounds for seed in one.seeds for method in one.methods
        )

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """All metrics, those of the first reference first."""
        first = self.references[0].name
        return tuple(
            Metric(
                TITLES[metric] + ('' if one.name == first else f' to {one.name} images'),
                _reader(metric, one.name),
                metric in HIGHER_IS_BETTER,
            )
            for one in self.references
            for metric in one.metrics
        )

    @cached_property
    def distances(self) -> tuple[Metric, ...]:
        """The metrics by which methods are compared, of the first reference."""
        named = zip(self.metrics, self.references[0].metrics, strict=False)
        return tuple(metric for metric, name in named if name in (self.by or DISTANCES))

    def seconds_of(self, method: str) -> tuple[float, ...]:
        """Returns the seconds of training at which the runs of a method are measured."""
        return self.own_seconds.get(method, self.seconds)

    def fields_of(self, method: str) -> dict[str, object]:
        """Returns the fields that make a method.

        Raises:
          UserError: an unknown name, or names that do not go together.
        """
        if method in self.own:
            return dict(self.own[method])
        return named_fields(method, f'{self.path}: rounds')

    def samplers_of(self, method: str) -> tuple[str, ...]:
        """Returns the samplers of a method: those of its objective.

        Raises:
          UserError: the file has no samplers for its objective, or the method has none.
        """
        if '' in self.samplers:
            return self.samplers['']
        objective = {**self.template.fields, **self.fields_of(method)}.get('diffusion.objective')
        if objective is None:
            raise UserError(
                f'{self.path}: fields: expected "diffusion.objective", by which the samplers are '
                f'chosen, as {method} has none'
            )
        if not isinstance(objective, str) or objective not in self.samplers:
            raise UserError(
                f'{self.path}: samplers: expected those of {plain(objective)}, the objective of '
                f'{method}, found those of {", ".join(self.samplers)}'
            )
        return self.samplers[objective]

    def jobs(self, part: str, data: str) -> list[Job]:
        """Returns the runs of a part in their order, checked.

        Args:
          part: names of methods, joined by commas; one of `EVERY` for all.
          data: folder of the images.

        Raises:
          UserError: a method that the file does not have, or a value that does not fit.
        """
        cells = list(self.cells)
        if part not in EVERY:
            names = part.split(',')
            for name in names:
                if name not in self.methods:
                    raise UserError(
                        f'{self.path}:{part}: expected methods of its rounds, found {name!r}'
                        f'{near_misses(name, self.methods)}; add it to a round'
                    )
            seeds = dict.fromkeys(seed for _, seed in cells)
            cells = [(name, s) for s in seeds for name in names if (name, s) in self.cells]
        jobs = [self._job(method, seed, data) for method, seed in cells]
        try:
            check_jobs(jobs)
        except UserError as error:
            name, *lines = str(error).replace(f' {INVALID}', '').splitlines()
            rest = '; '.join(line.strip() for line in lines)
            raise UserError(f'{self.path}: {name}{" " if rest else ""}{rest}') from None
        return jobs

    def _job(self, method: str, seed: int, data: str) -> Job:
        def located(path: str) -> str:
            return path if ':' in path or not path else str(Path(data) / expanded(path))

        images = {'data.path': located(str(self.template.fields['data.path']))}
        return dataclasses.replace(
            self.template,
            case=method,
            fields={**self.template.fields, **images, **self.fields_of(method)},
            seconds=self.seconds_of(method),
            samplers=self.samplers_of(method),
            references={located(r.path): (r.name, r.metrics) for r in self.references},
            seed=seed,
            picture=self.template.picture if seed == self.cells[0][1] else 0,
        )


def _reader(metric: str, reference: str) -> Callable[[Row], float]:
    """Returns a function that reads a metric of a row; NaN where it was not measured."""
    return lambda row: row.get('values', {}).get(reference, {}).get(metric, math.nan)
