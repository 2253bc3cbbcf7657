"""From images to results: features of both sides once, every metric from them, every result with its protocol."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Float

from jaxunet.config.relations import METRICS
from jaxunet.data.source import Source
from jaxunet.metrics.features import FeatureNetwork, batches
from jaxunet.metrics.frechet import (
    Moments,
    Statistics,
    frechet_distance,
    is_statistics,
    load_statistics,
)
from jaxunet.metrics.image_sets import Size, open_images
from jaxunet.metrics.inception_score import SPLITS, inception_score
from jaxunet.metrics.kernel_distance import SUBSET_SIZE, SUBSETS, kernel_distance
from jaxunet.metrics.precision_recall import NEIGHBOURS, precision_recall
from jaxunet.runtime.errors import UserError, near_misses

WITHOUT_REFERENCE = ('inception_score',)
# What they are called with features other than Inception's.
GENERAL = {'fid': 'frechet_distance', 'kid': 'kernel_distance'}
MAX_FEATURES = 16 * 2**30  # bytes of features kept in host memory


@dataclass(frozen=True)
class Side:
    """What the metrics need of the samples or of the reference.

    Fields:
      name: the path.
      count: how many images; None where a file of statistics does not tell.
      size: of the images, for people.
      statistics: if `fid` is asked for.
      features: float32 (count, dimension), if any other metric is.
    """

    name: str
    count: int | None
    size: str
    statistics: Statistics | None = None
    features: Float[np.ndarray, 'n d'] | None = None


@dataclass(frozen=True)
class Result:
    """A number and how it was come by. `label` is the metric's name, with the features where they are not Inception's."""

    label: str
    value: float
    std: float | None
    protocol: dict[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return {
            'metric': self.label,
            'value': self.value,
            **({} if self.std is None else {'std': self.std}),
            **self.protocol,
        }

    def line(self) -> str:
        """For people: the number, then the protocol."""
        spread = '' if self.std is None else f' ± {self.std:.6g}'
        return f'{self.label}: {self.value:.6g}{spread}  [{"; ".join(f"{k} {v}" for k, v in self.protocol.items())}]'


def check_metrics(
    metrics: Sequence[str], network: FeatureNetwork | None = None, option: str = '--metrics'
) -> None:
    """Raises UserError: no metrics, an unknown one, one twice, or one that the features do not allow."""
    if not metrics:
        raise UserError(f'{option}: expected some of {", ".join(METRICS)}, found none')
    for metric in metrics:
        if metric not in METRICS:
            raise UserError(
                f'{option}: expected some of {", ".join(METRICS)}, found {metric!r}{near_misses(metric, METRICS)}'
            )
        if metrics.count(metric) > 1:
            raise UserError(f'{option}: {metric} is there twice')
    if network and not network.is_inception and 'inception_score' in metrics:
        raise UserError(
            f'{option}: inception_score needs the features inception, found {network.name}; leave it out'
        )


def statistics_side(path: str, metrics: Sequence[str], network: FeatureNetwork, flag: str) -> Side:
    """A side from a file of statistics. Raises UserError: other metrics than fid, or statistics of other features."""
    if others := [m for m in metrics if m != 'fid']:
        raise UserError(
            f'{flag}: {path} holds statistics (mu, sigma), which serve fid only, not {", ".join(others)}; give images'
        )
    statistics = load_statistics(Path(path).expanduser())
    if (found := len(statistics.mu)) != network.dimension:
        raise UserError(
            f'{flag}: {path}: expected statistics of {network.dimension} features ({network.name}), found {found}'
        )
    made = statistics.protocol.get('features')
    if made is not None and made != network.name:
        raise UserError(
            f'{flag}: {path}: expected statistics of features {network.name}, found those of {made}; make them again'
        )
    count = statistics.protocol.get('count')
    origin = f' ({statistics.protocol["images"]})' if 'images' in statistics.protocol else ''
    return Side(
        path + origin,
        count if isinstance(count, int) else None,
        str(statistics.protocol.get('size', 'unknown')),
        statistics,
    )


@contextlib.contextmanager
def open_side(
    path: str,
    metrics: Sequence[str],
    network: FeatureNetwork,
    option: str,
    *,
    grid_size: Size | None = None,
    count: int | None = None,
    seed: int = 0,
    batch_size: int,
) -> Iterator[tuple[Callable[[], Side], Size | None]]:
    """A side from a path, and the size of its images where it has some. A wrong path is told here; the features are computed by the call.

    Args:
      path: of images (`open_images`) or of statistics.
      option: what gave the path, for messages.
      grid_size, count, seed, batch_size: of `open_images` and `image_side`.
    """
    file = Path(path).expanduser()
    if file.suffix.lower() == '.npz' and file.is_file() and is_statistics(file):
        if count is not None:
            raise UserError(
                f'--num_samples: {path} holds statistics, from which nothing can be drawn; leave it out'
            )
        side = statistics_side(path, metrics, network, option)
        yield lambda: side, None
        return
    with open_images(path, grid_size=grid_size) as source:
        _check_count(count, source, path)
        compute_side = functools.partial(
            image_side,
            path,
            source,
            metrics,
            network,
            count=count,
            seed=seed,
            batch_size=batch_size,
        )
        yield compute_side, source.image_shape[:2]


def _check_count(count: int | None, source: Source, name: str) -> None:
    if count is not None and count > len(source):
        raise UserError(f'--num_samples: {count} asked for, but {name} has {len(source)} images')


def image_side(
    name: str,
    source: Source,
    metrics: Collection[str],
    network: FeatureNetwork,
    *,
    count: int | None = None,
    seed: int = 0,
    batch_size: int,
) -> Side:
    """A side from images; with `count`, from so many of them, drawn at random by `seed` without replacement.

    Raises:
      UserError: fewer images than asked for or than a metric needs, corrupt images, or too many to keep their features.
    """
    _check_count(count, source, name)
    rows = np.arange(len(source))
    if count is not None and count < len(source):
        rows = np.sort(np.random.default_rng(seed).choice(len(source), count, replace=False))
    keep = any(metric != 'fid' for metric in metrics)
    if keep and (size := 4 * network.dimension * len(rows)) > MAX_FEATURES:
        raise UserError(
            f'{name}: the features of {len(rows):,} images take {size / 2**30:.1f} GiB, more than the {MAX_FEATURES / 2**30:g} accepted; '
            'ask for fid alone, which keeps none, or give fewer images'
        )
    moments = Moments(network.dimension)
    features = np.empty((len(rows) if keep else 0, network.dimension), np.float32)
    done = 0
    for batch in batches(network, source, rows, batch_size, name=Path(name).name or name):
        if not np.isfinite(batch).all():
            raise UserError(
                f'{name}: the features of images {done} to {done + len(batch) - 1} are not finite; the network is damaged'
            )
        if keep:
            features[done : done + len(batch)] = batch
        if 'fid' in metrics:
            moments.add(batch)
        done += len(batch)
    size_text = '{}x{}'.format(*source.image_shape[:2])
    statistics = None
    if 'fid' in metrics:
        if len(rows) <= network.dimension:
            logging.warning(
                '%s: %d images are few for a covariance of %d features: the distance is biased',
                name,
                len(rows),
                network.dimension,
            )
        statistics = moments.statistics(
            {'images': name, 'count': len(rows), 'size': size_text, 'features': network.name}
        )
    return Side(name, len(rows), size_text, statistics, features if keep else None)


def compute(
    metrics: Sequence[str],
    network: FeatureNetwork,
    samples: Side,
    reference: Side | None,
    *,
    seed: int = 0,
    kid_subsets: int = SUBSETS,
    kid_subset_size: int = SUBSET_SIZE,
) -> list[Result]:
    """The metrics, in the order asked for.

    Args:
      reference: None only for metrics of `WITHOUT_REFERENCE`.

    Raises:
      UserError: a metric that is unknown, that the features do not allow, or that needs more images.
    """
    check_metrics(metrics, network)
    results = []
    manifold: tuple[float, float] | None = None
    for metric in metrics:
        std, details = None, {}
        if metric == 'inception_score':
            value, std = inception_score(_class_scores(network, samples), seed=seed)
            details = {'parts': SPLITS, 'logits': 'without bias'}
        else:
            assert reference is not None
            if metric == 'fid':
                assert samples.statistics is not None
                assert reference.statistics is not None
                value = frechet_distance(samples.statistics, reference.statistics)
            else:
                assert samples.features is not None
                assert reference.features is not None
                if metric == 'kid':
                    kid = kernel_distance(
                        samples.features,
                        reference.features,
                        subsets=kid_subsets,
                        subset_size=kid_subset_size,
                        seed=seed,
                    )
                    value, std = kid.value, kid.std
                    details = {
                        'subsets': kid.subsets if kid_subsets else 'none',
                        'subset_size': kid.subset_size if kid_subsets else 'all',
                    }
                else:
                    manifold = manifold or precision_recall(samples.features, reference.features)
                    value = manifold[metric == 'recall']
                    details = {'k': NEIGHBOURS}
        protocol = (
            _protocol(network, samples, None if metric in WITHOUT_REFERENCE else reference, seed)
            | details
        )
        results.append(Result(label(metric, network), value, std, protocol))
    return results


def label(metric: str, network: FeatureNetwork) -> str:
    """What a result is called: by other features than Inception's, no FID and no KID."""
    return (
        metric
        if network.is_inception
        else f'{GENERAL.get(metric, metric)}[features={network.name}]'
    )


def _protocol(
    network: FeatureNetwork, samples: Side, reference: Side | None, seed: int
) -> dict[str, Any]:
    protocol = {
        'samples': samples.name,
        'num_samples': samples.count or 'unknown',
        'sample_size': samples.size,
    }
    if reference is not None:
        protocol |= {
            'reference': reference.name,
            'num_reference': reference.count or 'unknown',
            'reference_size': reference.size,
        }
    return protocol | {'features': network.name, 'resize': network.resize, 'seed': seed}


def _class_scores(network: FeatureNetwork, samples: Side) -> Float[np.ndarray, 'n classes']:
    assert network.classify is not None
    assert samples.features is not None
    parts = [
        np.asarray(network.classify(samples.features[i : i + 1024]))
        for i in range(0, len(samples.features), 1024)
    ]
    return np.concatenate(parts)
