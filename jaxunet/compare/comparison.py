"""A comparison of training methods as its report needs it: methods, seeds, times and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from jaxunet.compare.statistics import Find, value
from jaxunet.config.relations import HIGHER_IS_BETTER

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


class Metric(NamedTuple):
    """A metric with its title in reports; `find` reads it from a row."""

    title: str
    find: Find
    higher_is_better: bool = False


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison of training methods.

    Fields:
      title: title of the report.
      baseline: the method with which the others are compared.
      rounds: the runs in their order.
      seconds: seconds of training at which each run is measured, ascending.
      own_seconds: those of methods that are measured at other times.
      references: real images and the metrics of samples against them; the first are those by which
        methods are compared.
      by: metrics of the first reference by which methods are compared; () = its distances.
    """

    title: str
    baseline: str
    rounds: tuple[Round, ...]
    seconds: tuple[float, ...]
    own_seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    references: tuple[Reference, ...]
    by: tuple[str, ...] = ()

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
                value(metric, one.name),
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

    def samplers_of(self, method: str) -> tuple[str, ...]:
        """Returns the samplers that measure a method; () = any."""
        return ()
