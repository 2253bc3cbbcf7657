"""Turns images, or a file of statistics, into one side of a comparison: its features, once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
from absl import logging
from jaxtyping import Int

from jaxunet.data.source import Source
from jaxunet.metrics.features import FeatureNetwork, batches
from jaxunet.metrics.frechet import Moments, is_statistics, load_statistics
from jaxunet.metrics.image_sets import Size, open_images
from jaxunet.metrics.table import Side, needing
from jaxunet.runtime.errors import UserError

MAX_FEATURES = 16 * 2**30  # bytes of features kept in host memory


def statistics_side(path: str, metrics: Sequence[str], network: FeatureNetwork, flag: str) -> Side:
    """Opens a file of statistics as a side.

    Args:
      flag: the option that named the file, for messages.

    Raises:
      UserError: a metric other than fid is requested, or the statistics are of other features.
    """
    if others := needing('features', metrics):
        raise UserError(
            f'{flag}: {path} holds statistics (mu, sigma), which serve fid only, '
            f'not {", ".join(others)}; give images'
        )
    statistics = load_statistics(Path(path).expanduser())
    if (found := len(statistics.mu)) != network.dimension:
        raise UserError(
            f'{flag}: {path}: expected statistics of {network.dimension} features '
            f'({network.name}), found {found}'
        )
    made = statistics.protocol.get('features')
    if made is not None and made != network.name:
        raise UserError(
            f'{flag}: {path}: expected statistics of features {network.name}, '
            f'found those of {made}; make them again'
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
    """Opens a side at once, but computes its features only when asked.

    A wrong path fails here, before the features of another side take their time.

    Args:
      path: images (see `open_images`) or an .npz of statistics.
      option: the option that gave the path, for messages.
      grid_size, count, seed, batch_size: see `open_images` and `image_side`.

    Yields:
      A function that computes the side, and the (height, width) of its images, or None for
      statistics.

    Raises:
      UserError: what `open_images`, `statistics_side` and `image_side` raise.
    """
    file = Path(path).expanduser()
    if file.suffix.lower() == '.npz' and file.is_file() and is_statistics(file):
        if count is not None:
            raise UserError(
                f'--num_samples: {path} holds statistics, from which no images can be drawn; '
                'leave it out'
            )
        side = statistics_side(path, metrics, network, option)
        yield lambda: side, None
        return
    with open_images(path, grid_size=grid_size) as source:
        check_count(count, source, path)
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
    """Computes a side from images.

    Args:
      name: what messages and reports call the images.
      count: use this many images, drawn by `seed` without replacement; None = all.
      batch_size: images per call of the network.

    Raises:
      UserError: fewer images than `count`, fewer than a metric needs, corrupt images, features
        that are not finite, or more features than `MAX_FEATURES` bytes.
    """
    check_count(count, source, name)
    rows = drawn_rows(len(source), count, seed)
    keep, fit = bool(needing('features', metrics)), bool(needing('statistics', metrics))
    if keep and (size := 4 * network.dimension * len(rows)) > MAX_FEATURES:
        raise UserError(
            f'{name}: the features of {len(rows):,} images take {size / 2**30:.1f} GiB, more than '
            f'the {MAX_FEATURES / 2**30:g} accepted; ask for fid alone, which keeps none, or give '
            'fewer images'
        )
    moments = Moments(network.dimension)
    features = np.empty((len(rows) if keep else 0, network.dimension), np.float32)
    done = 0
    for batch in batches(network, source, rows, batch_size, name=Path(name).name or name):
        if not np.isfinite(batch).all():
            raise UserError(
                f'{name}: the features of images {done} to {done + len(batch) - 1} '
                'are not finite; the network is damaged'
            )
        if keep:
            features[done : done + len(batch)] = batch
        if fit:
            moments.add(batch)
        done += len(batch)
    size_text = '{}x{}'.format(*source.image_shape[:2])
    statistics = None
    if fit:
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


def check_count(count: int | None, source: Source, name: str) -> None:
    """Checks that a source has `count` images to draw.

    Raises:
      UserError: it has fewer.
    """
    if count is not None and count > len(source):
        raise UserError(f'--num_samples: {count} asked for, but {name} has {len(source)} images')


def drawn_rows(total: int, count: int | None, seed: int) -> Int[np.ndarray, ' rows']:
    """Returns `count` of the numbers below `total`, ascending, drawn by `seed`; None = all."""
    if count is None or count >= total:
        return np.arange(total)
    return np.sort(np.random.default_rng(seed).choice(total, count, replace=False))
