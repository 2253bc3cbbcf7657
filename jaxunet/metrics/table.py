"""The table of metrics: what each one needs, how it is computed, and the name of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxunet.metrics.copies import NEIGHBOUR, THRESHOLD, find_copies
from jaxunet.metrics.features import FeatureNetwork
from jaxunet.metrics.frechet import Statistics, frechet_distance
from jaxunet.metrics.inception_score import SPLITS, inception_score
from jaxunet.metrics.kernel_distance import SUBSET_SIZE, SUBSETS, kernel_distance
from jaxunet.metrics.precision_recall import NEIGHBOURS, PrecisionRecall, precision_recall
from jaxunet.runtime.errors import UserError

CLASSIFY_BATCH = 1024  # feature vectors per call of the network's last layer

Need = Literal['statistics', 'spatial', 'features']  # fields of `ImageSummary` that metrics read

Protocol = dict[str, object]


@dataclass(frozen=True)
class ImageSummary:
    """The samples or the reference, reduced to what the metrics need.

    Fields:
      name: path of the images or statistics.
      count: number of images; None if a file of statistics does not state it.
      size: 'HEIGHTxWIDTH' of the images, for reports.
      statistics: mean and covariance of the features; set if a requested metric needs them.
      features: float32 (count, dimension); set if a requested metric needs them.
      spatial: mean and covariance of the spatial features; set if a requested metric needs them.
    """

    name: str
    count: int | None
    size: str
    statistics: Statistics | None = None
    features: Float[np.ndarray, 'n d'] | None = None
    spatial: Statistics | None = None


@dataclass(frozen=True)
class Inputs:
    """The inputs of all metrics. `reference` is None if no requested metric needs one."""

    network: FeatureNetwork
    samples: ImageSummary
    reference: ImageSummary | None
    seed: int = 0
    kid_subsets: int = SUBSETS
    kid_subset_size: int = SUBSET_SIZE

    @cached_property
    def precision_recall(self) -> PrecisionRecall:
        """Precision and recall, computed once for both metrics."""
        return precision_recall(*self.features())

    def features(self) -> tuple[Float[np.ndarray, 'n d'], Float[np.ndarray, 'm d']]:
        """Returns the features of the samples and of the reference."""
        assert self.reference is not None
        assert self.samples.features is not None
        assert self.reference.features is not None
        return self.samples.features, self.reference.features

    def frechet_distance(self, need: Literal['statistics', 'spatial']) -> Value:
        """Returns the Fréchet distance, and as its settings the files that statistics come from.

        Statistics in a file may come from other images than those in the file: ADM's reference
        batches hold the statistics of whole data sets, and only some of the images.
        """
        both: list[Statistics] = []
        settings: Protocol = {}
        assert self.reference is not None
        for name, side in (('samples', self.samples), ('reference', self.reference)):
            statistics: Statistics | None = getattr(side, need)
            assert statistics is not None
            both.append(statistics)
            if statistics.arrays:
                settings[f'num_{name}'] = statistics.protocol.get('count', 'unknown')
                settings[f'{name}_statistics'] = f'{" and ".join(statistics.arrays)} of the file'
        return Value(frechet_distance(*both), settings=settings)


class Value(NamedTuple):
    """A metric's value, its spread where it has one, and the settings that produced it."""

    value: float
    std: float | None = None
    settings: Protocol = {}  # noqa: RUF012  # never written to


@dataclass(frozen=True)
class Metric:
    """One metric.

    Fields:
      compute: Inputs -> Value.
      needs: the field of `ImageSummary` that it reads.
      needs_reference: compares the samples with real images.
      needs_inception: defined by Inception's layers, so no other feature network will do.
      general_label: name of its results with features other than Inception's; '' = the same name.
      least_samples: smallest number of samples for which it is defined.
      least_reference: smallest number of reference images for which it is defined.
    """

    compute: Callable[[Inputs], Value]
    needs: Need
    needs_reference: bool = True
    needs_inception: bool = False
    general_label: str = field(default='', kw_only=True)
    least_samples: int = field(default=1, kw_only=True)
    least_reference: int = field(default=1, kw_only=True)


def _fid(inputs: Inputs) -> Value:
    return inputs.frechet_distance('statistics')


def _sfid(inputs: Inputs) -> Value:
    return inputs.frechet_distance('spatial')


def _kid(inputs: Inputs) -> Value:
    samples, reference = inputs.features()
    kid = kernel_distance(
        samples,
        reference,
        subsets=inputs.kid_subsets,
        subset_size=inputs.kid_subset_size,
        seed=inputs.seed,
    )
    settings: Protocol = {'subsets': 'none', 'subset_size': 'all'}
    if inputs.kid_subsets:
        settings = {'subsets': kid.subsets, 'subset_size': kid.subset_size}
    return Value(kid.value, kid.std, settings)


def _precision(inputs: Inputs) -> Value:
    return Value(inputs.precision_recall.precision, settings={'k': NEIGHBOURS})


def _recall(inputs: Inputs) -> Value:
    return Value(inputs.precision_recall.recall, settings={'k': NEIGHBOURS})


def _copies(inputs: Inputs) -> Value:
    copies = find_copies(*inputs.features(), seed=inputs.seed)
    return Value(
        copies.share,
        settings={
            'threshold': f'{THRESHOLD:.4f}',
            'k': NEIGHBOUR,
            'of_training_images': copies.baseline,
        },
    )


def _inception_score(inputs: Inputs) -> Value:
    classify, features = inputs.network.classify, inputs.samples.features
    assert classify is not None
    assert features is not None
    starts = range(0, len(features), CLASSIFY_BATCH)
    scores = [np.asarray(classify(features[i : i + CLASSIFY_BATCH])) for i in starts]
    value, std = inception_score(np.concatenate(scores), seed=inputs.seed)
    return Value(value, std, {'parts': SPLITS, 'logits': 'without bias'})


# The names are those of jaxunet.config.relations.METRICS, in the same order.
TABLE = {
    'fid': Metric(
        _fid, 'statistics', general_label='frechet_distance', least_samples=2, least_reference=2
    ),
    'sfid': Metric(_sfid, 'spatial', needs_inception=True, least_samples=2, least_reference=2),
    'kid': Metric(
        _kid, 'features', general_label='kernel_distance', least_samples=2, least_reference=2
    ),
    'precision': Metric(
        _precision, 'features', least_samples=NEIGHBOURS + 1, least_reference=NEIGHBOURS + 1
    ),
    'recall': Metric(
        _recall, 'features', least_samples=NEIGHBOURS + 1, least_reference=NEIGHBOURS + 1
    ),
    'copies': Metric(_copies, 'features', least_reference=NEIGHBOUR + 2),
    'inception_score': Metric(
        _inception_score,
        'features',
        needs_reference=False,
        needs_inception=True,
        least_samples=SPLITS,
    ),
}


def with_reference(metrics: Iterable[str]) -> list[str]:
    """Returns the metrics that compare the samples with a reference."""
    return [metric for metric in metrics if TABLE[metric].needs_reference]


def check_reference(count: int, metrics: Iterable[str], name: str) -> None:
    """Checks that a reference has enough images.

    Args:
      count: number of its images.
      metrics: those that compare samples with its images.
      name: of the reference, for messages.

    Raises:
      UserError: a metric needs more.
    """
    for metric in metrics:
        if count < (least := TABLE[metric].least_reference):
            raise UserError(
                f'{name}: {metric} needs {least} reference images or more, found {count}'
            )


def needing(need: Need, metrics: Iterable[str]) -> list[str]:
    """Returns the metrics that read this field of `ImageSummary`."""
    return [metric for metric in metrics if TABLE[metric].needs == need]


def general_label(metric: str) -> str:
    """Returns a metric's name with features other than Inception's (FID and KID need Inception)."""
    return TABLE[metric].general_label or metric if metric in TABLE else metric
