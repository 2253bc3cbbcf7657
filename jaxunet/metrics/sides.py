"""Turns images or a file of statistics into one side of a comparison; computes features once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float, Int

from jaxunet.data.source import Source
from jaxunet.metrics.features import FeatureNetwork, batches
from jaxunet.metrics.frechet import (
    POOLED,
    SPATIAL,
    Moments,
    Statistics,
    has_statistics,
    is_statistics,
    load_statistics,
)
from jaxunet.metrics.image_sets import Size, open_images
from jaxunet.metrics.table import TABLE, ImageSummary, Need, check_reference, needing
from jaxunet.runtime.errors import UserError, plural, printable
from jaxunet.runtime.remote import on_disk

MAX_FEATURES = 16 * 2**30  # bytes of features kept in host memory
# Needs of metrics that a file of statistics can meet, with the names of its arrays.
ARRAYS: dict[Need, tuple[str, str]] = {'statistics': POOLED, 'spatial': SPATIAL}


def statistics_side(
    path: str, metrics: Sequence[str], network: FeatureNetwork, flag: str
) -> ImageSummary:
    """Opens a file of statistics as a side.

    Args:
      flag: the option that named the file, for messages.

    Raises:
      UserError: a metric needs images, or the statistics are missing or come from other features.
    """
    if others := needing('features', metrics):
        raise UserError(
            f'{flag}: {path} holds statistics (mu, sigma), which serve fid and sfid only, '
            f'not {", ".join(others)}; give images'
        )
    file = Path(on_disk(path))
    if needing('spatial', metrics) and not has_statistics(file, SPATIAL):
        raise UserError(
            f'{flag}: {path}: sfid needs the statistics {" and ".join(SPATIAL)} or images, '
            'found neither; give images'
        )
    statistics = file_statistics(path, metrics, network, flag)
    protocol = next(iter(statistics.values())).protocol
    count = protocol.get('count')
    origin = f' ({printable(str(protocol["images"]))})' if 'images' in protocol else ''
    return ImageSummary(
        path + origin,
        count if isinstance(count, int) else None,
        str(protocol.get('size', 'unknown')),
        statistics=statistics.get('statistics'),
        spatial=statistics.get('spatial'),
    )


def file_statistics(
    path: str, metrics: Collection[str], network: FeatureNetwork, flag: str
) -> dict[Need, Statistics]:
    """Reads the statistics of a file that the metrics need; returns them by the need they meet.

    Raises:
      UserError: the statistics come from other features, or have another length than the network's
        features.
    """
    file = Path(on_disk(path))
    by_need: dict[Need, Statistics] = {}
    made = None
    for need, names in ARRAYS.items():
        if not needing(need, metrics) or not has_statistics(file, names):
            continue
        statistics = by_need[need] = load_statistics(file, names)
        expected = network.dimension if need == 'statistics' else network.spatial_dimension
        if len(statistics.mu) != expected:
            raise UserError(
                f'{flag}: {path}: {names[0]}: expected statistics of {expected} features '
                f'({network.name}), found {len(statistics.mu)}'
            )
        made = statistics.protocol.get('features')
        if made is not None and made != network.name:
            raise UserError(
                f'{flag}: {path}: expected statistics of features {network.name}, '
                f'found those of {made}; make them again'
            )
    if by_need and made is None and has_statistics(file, SPATIAL) and not network.as_tensorflow:
        logging.warning(
            "%s: %s: statistics of ADM's evaluator, which prepares images as TensorFlow does; "
            '--features inception_tensorflow prepares the others alike',
            flag,
            path,
        )
    return by_need


def beside_images(
    path: str, metrics: Collection[str], network: FeatureNetwork, flag: str, count: int | None
) -> dict[Need, Statistics]:
    """Returns the statistics that a file holds beside images, for the metrics that need them.

    They are used only if all images are asked for, with Inception's features; otherwise the result
    is {}. Logs what each metric uses.

    Args:
      count: number of images asked for; None = all.
    """
    file = Path(on_disk(path))
    if file.suffix.lower() != '.npz' or not file.is_file() or not has_statistics(file):
        return {}
    wanted = [name for need in ARRAYS for name in needing(need, metrics)]
    if not wanted:
        return {}
    why = 'with --num_samples' if count is not None else f'for the features {network.name}'
    if count is None and network.is_inception:
        statistics = file_statistics(path, metrics, network, flag)
        for need, names in ARRAYS.items():
            used = ' and '.join(names) + ' of the file' if need in statistics else 'its images'
            for metric in needing(need, metrics):
                logging.info('%s: %s: %s uses %s', flag, path, metric, used)
        return statistics
    logging.info('%s: %s: %s use its images, %s', flag, path, ', '.join(wanted), why)
    return {}


class OpenedSide(NamedTuple):
    """A side whose images or statistics have been found.

    Fields:
      compute: computes and returns the side; for images, it runs the network.
      size: (height, width) of the images; None for statistics.
    """

    compute: Callable[[], ImageSummary]
    size: Size | None


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
    is_reference: bool = False,
) -> Iterator[OpenedSide]:
    """Opens a side now; its features are computed only when `OpenedSide.compute` is called.

    So a wrong path fails before the features of the other side are computed.

    Args:
      path: images (see `open_images`), an .npz of statistics, or an .npz with both, whose
        statistics serve fid and sfid.
      option: the option that gave the path, for messages.
      grid_size, count, seed, batch_size: see `open_images` and `image_side`.
      is_reference: the side is the reference, not the samples.

    Raises:
      UserError: see `open_images`, `statistics_side`, `check_reference` and `image_side`.
    """
    file = Path(on_disk(path))
    if file.suffix.lower() == '.npz' and file.is_file() and is_statistics(file):
        if count is not None:
            raise UserError(
                f'--num_samples: {path} holds statistics, from which no images can be drawn; '
                'leave it out'
            )
        side = statistics_side(path, metrics, network, option)
        yield OpenedSide(lambda: side, None)
        return
    with open_images(path, grid_size=grid_size) as source:
        check_count(count, source, path)
        given = beside_images(path, metrics, network, option, count)
        if is_reference:
            compared = [metric for metric in metrics if TABLE[metric].needs not in given]
            check_reference(len(source), compared, f'{option}: {path}')
        compute_side = functools.partial(
            image_side,
            path,
            source,
            metrics,
            network,
            count=count,
            seed=seed,
            batch_size=batch_size,
            given=given,
        )
        yield OpenedSide(compute_side, source.image_shape[:2])


def image_side(
    name: str,
    source: Source,
    metrics: Collection[str],
    network: FeatureNetwork,
    *,
    count: int | None = None,
    seed: int = 0,
    batch_size: int,
    given: Mapping[Need, Statistics] | None = None,
) -> ImageSummary:
    """Computes a side from images.

    Args:
      name: what messages and reports call the images.
      count: use this many images, drawn by `seed` without replacement; None = all.
      batch_size: images per call of the network.
      given: statistics that need not be computed.

    Raises:
      UserError: fewer images than `count`, fewer than a metric needs, corrupt images, features
        that are not finite, or more features than `MAX_FEATURES` bytes.
    """
    check_count(count, source, name)
    rows = drawn_rows(len(source), count, seed)
    size = '{}x{}'.format(*source.image_shape[:2])
    statistics = dict(given or {})
    keep = bool(needing('features', metrics))
    fit = [need for need in ARRAYS if needing(need, metrics) and need not in statistics]
    features: Float[np.ndarray, 'n d'] | None = None
    if keep or fit:
        features, moments = _extract(
            name, source, rows, network, fit, keep=keep, batch_size=batch_size
        )
        protocol = {'images': name, 'count': len(rows), 'size': size, 'features': network.name}
        statistics |= {need: each.statistics(protocol) for need, each in moments.items()}
    return ImageSummary(
        name, len(rows), size, statistics.get('statistics'), features, statistics.get('spatial')
    )


def _extract(
    name: str,
    source: Source,
    rows: Int[np.ndarray, ' rows'],
    network: FeatureNetwork,
    fit: Collection[Need],
    *,
    keep: bool,
    batch_size: int,
) -> tuple[Float[np.ndarray, 'n d'] | None, dict[Need, Moments]]:
    """Runs the network on these rows of a source.

    Args:
      fit: the moments to compute.
      keep: True to keep the features, too.

    Returns:
      The features of each image, float32, or None; and the moments by the need that they meet.

    Raises:
      UserError: corrupt images, features that are not finite, or too many to keep.
    """
    if keep and (size := 4 * network.dimension * len(rows)) > MAX_FEATURES:
        raise UserError(
            f'{name}: the features of {len(rows):,} images take {size / 2**30:.1f} GiB, more than '
            f'the {MAX_FEATURES / 2**30:g} accepted; ask for fid alone, which keeps none, or give '
            'fewer images'
        )
    lengths = {'statistics': network.dimension, 'spatial': network.spatial_dimension}
    moments = {need: Moments(lengths[need]) for need in fit}
    features = np.empty((len(rows), network.dimension), np.float32) if keep else None
    done = 0
    label, spatial = Path(name).name or name, 'spatial' in fit
    for both in batches(network, source, rows, batch_size, name=label, spatial=spatial):
        if not np.isfinite(both).all():
            raise UserError(
                f'{name}: the features of images {done} to {done + len(both) - 1} '
                'are not finite; the network is damaged'
            )
        batch = both[:, : network.dimension]
        if features is not None:
            features[done : done + len(batch)] = batch
        for need in fit:
            moments[need].add(batch if need == 'statistics' else both[:, network.dimension :])
        done += len(batch)
    for need in fit:
        if len(rows) <= lengths[need]:
            logging.warning(
                '%s: a covariance of %d features needs more than %s: the distance is biased',
                name,
                lengths[need],
                plural(len(rows), 'image'),
            )
    return features, moments


def check_count(count: int | None, source: Source, name: str, which: str = '') -> None:
    """Checks that a source has at least `count` images.

    Args:
      which: of the images of `name` are in the source; ends the message.

    Raises:
      UserError: it has fewer.
    """
    if count is not None and count > len(source):
        images = plural(len(source), 'image')
        raise UserError(f'--num_samples: {count} asked for, but {name} has {images}{which}')


def drawn_rows(total: int, count: int | None, seed: int) -> Int[np.ndarray, ' rows']:
    """Returns `count` random indices below `total`, ascending, drawn by `seed`; all if None."""
    if count is None or count >= total:
        return np.arange(total)
    return np.sort(np.random.default_rng(seed).choice(total, count, replace=False))
