"""Shows each sample beside its nearest training images, by pixels and by features."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from jaxunet.data.images import grid, save_png
from jaxunet.data.pipeline import images_bytes, load_all
from jaxunet.data.source import ArraySource, Source, Subset
from jaxunet.metrics.copies import NEIGHBOUR, THRESHOLD, Copies, find_copies
from jaxunet.metrics.evaluation import Result, protocol_of, result_label
from jaxunet.metrics.features import FeatureNetwork
from jaxunet.metrics.image_sets import Size, open_images
from jaxunet.metrics.sides import check_count, drawn_rows, image_side
from jaxunet.metrics.table import ImageSummary
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.whole_files import written

MAX_BYTES = 8 * 2**30  # bytes of pixels in host memory
SHOWN = 64  # pairs in the picture
COLUMNS = 16  # pairs in a row of the picture
TABLE_COLUMNS = (
    'sample',
    'pixel_neighbour',
    'pixel_mirrored',
    'pixel_distance',
    'pixel_ratio',
    'feature_neighbour',
    'feature_distance',
    'feature_ratio',
    'copy',
)

Pixels = UInt8[np.ndarray, 'n height width 3']


@dataclass(frozen=True)
class Comparison:
    """Samples with their nearest training images.

    Fields:
      samples, training: the images.
      numbers: indices of `samples` in their file or folder.
      pixels: result of the test on pixels; a copy may be mirrored.
      features: result of the test on features.
      results: the shares of copies by pixels, by features and by either.
    """

    samples: Pixels
    training: UInt8[np.ndarray, 'm height width 3']
    numbers: Int[np.ndarray, ' n']
    pixels: Copies
    features: Copies
    results: list[Result]

    @property
    def found(self) -> Bool[np.ndarray, ' n']:
        """True for each sample that is a copy by pixels or by features."""
        return self.pixels.found | self.features.found

    def picture(self) -> UInt8[np.ndarray, 'height width 3']:
        """Returns the `SHOWN` samples most similar to a training image, the most similar first.

        Below each row of samples come their nearest training images by pixels (mirrored if that is
        nearer), and below these their nearest by features.
        """
        order = np.argsort(np.minimum(self.pixels.ratio, self.features.ratio), kind='stable')
        by_pixels = self.training[self.pixels.nearest.image[:, 0]]
        mirrored = self.pixels.nearest.mirrored[:, 0]
        by_pixels[mirrored] = by_pixels[mirrored][:, :, ::-1]
        by_features = self.training[self.features.nearest.image[:, 0]]
        shown = order[:SHOWN]
        columns = min(COLUMNS, len(shown))
        rows = []
        for first in range(0, len(shown), columns):
            part = shown[first : first + columns]
            for images in (self.samples, by_pixels, by_features):
                white = np.full((columns - len(part), *images.shape[1:]), 255, np.uint8)
                rows.append(np.concatenate([images[part], white]))
        return grid(np.concatenate(rows), columns)

    def rows(self) -> list[dict[str, object]]:
        """Returns a row of the table for each sample, with the keys `TABLE_COLUMNS`.

        `pixel_distance` is the root mean square difference of pixel values between 0 and 1.
        """
        pixels, features = self.pixels, self.features
        scale = np.sqrt(np.prod(self.samples.shape[1:]))
        columns = (
            self.numbers,
            pixels.nearest.image[:, 0],
            pixels.nearest.mirrored[:, 0].astype(int),
            _short(pixels.nearest.distance[:, 0] / scale),
            _short(pixels.ratio),
            features.nearest.image[:, 0],
            _short(features.nearest.distance[:, 0]),
            _short(features.ratio),
            self.found.astype(int),
        )
        return [dict(zip(TABLE_COLUMNS, row, strict=True)) for row in zip(*columns, strict=True)]


def _short(values: Float[np.ndarray, ' n']) -> list[str]:
    return [f'{value:.5g}' for value in values]


def compare(
    samples_path: str,
    training_path: str,
    network: FeatureNetwork,
    *,
    grid_size: Size | None = None,
    count: int | None = None,
    seed: int = 0,
    batch_size: int,
) -> Comparison:
    """Finds the nearest training images of samples.

    Args:
      samples_path, training_path: images; see `jaxunet.metrics.image_sets.open_images`.
      network: the network whose features are compared.
      grid_size: (height, width) of the images in a .png grid; default: the training images'.
      count, seed, batch_size: see `jaxunet.metrics.sides.image_side`.

    Raises:
      UserError: a wrong path, images of two sizes, too few or too many images.
    """
    with open_images(training_path, grid_size=grid_size) as training_source:
        size = training_source.image_shape[:2]
        with open_images(samples_path, grid_size=grid_size or size) as samples_source:
            if samples_source.image_shape[:2] != size:
                found = 'x'.join(map(str, samples_source.image_shape[:2]))
                raise UserError(
                    f'--nearest: {samples_path} has images of {found} pixels, {training_path} of '
                    f'{size[0]}x{size[1]}; bring both to one size with '
                    'python -m jaxunet.prepare_data'
                )
            check_count(count, samples_source, samples_path)
            numbers = drawn_rows(len(samples_source), count, seed)
            samples = _pixels(samples_path, Subset(samples_source, numbers))
        training = _pixels(training_path, training_source)
    pixels = find_copies(
        samples.reshape(len(samples), -1),
        training.reshape(len(training), -1),
        mirror=lambda rows: rows.reshape(-1, *training.shape[1:])[:, :, ::-1].reshape(rows.shape),
        seed=seed,
    )
    sides = [
        _side(name, images, network, batch_size)
        for name, images in ((samples_path, samples), (training_path, training))
    ]
    assert sides[0].features is not None
    assert sides[1].features is not None
    features = find_copies(sides[0].features, sides[1].features, seed=seed)
    results = _results(pixels, features, network, sides, seed)
    return Comparison(samples, training, numbers, pixels, features, results)


def _pixels(path: str, source: Source) -> Pixels:
    if (size := images_bytes(source)) > MAX_BYTES:
        raise UserError(
            f'--nearest: {path}: {size / 2**30:.1f} GiB of pixels, more than the '
            f'{MAX_BYTES / 2**30:g} accepted; give fewer or smaller images'
        )
    return load_all(source, progress=True)[0]


def _side(name: str, images: Pixels, network: FeatureNetwork, batch_size: int) -> ImageSummary:
    source = ArraySource(name, images, (images.shape[1], images.shape[2], 3))
    return image_side(name, source, ['copies'], network, batch_size=batch_size)


def _results(
    pixels: Copies,
    features: Copies,
    network: FeatureNetwork,
    sides: Sequence[ImageSummary],
    seed: int,
) -> list[Result]:
    protocol = protocol_of(network, sides[0], sides[1], seed)
    settings = {'threshold': f'{THRESHOLD:.4f}', 'k': NEIGHBOUR}
    label = result_label('copies', network)
    either = float((pixels.found | features.found).mean())
    return [
        Result(
            'copies[pixels]',
            pixels.share,
            None,
            {name: value for name, value in protocol.items() if name not in ('features', 'resize')}
            | settings
            | {'of_training_images': pixels.baseline},
        ),
        Result(
            label,
            features.share,
            None,
            protocol | settings | {'of_training_images': features.baseline},
        ),
        Result(f'copies[pixels or features={network.name}]', either, None, protocol | settings),
    ]


def write(path: str | os.PathLike[str], comparison: Comparison) -> Path:
    """Writes the picture to `path`, and the table beside it with the suffix .csv.

    Returns the path of the table.

    Raises:
      UserError: one of them cannot be written.
    """
    save_png(path, comparison.picture())
    table = Path(path).with_suffix('.csv')
    with written(table, '--nearest') as partial, partial.open('w', newline='') as file:
        writer = csv.DictWriter(file, TABLE_COLUMNS)
        writer.writeheader()
        writer.writerows(comparison.rows())
    return table
