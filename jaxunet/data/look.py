"""Says what was read of a set of images before a run trains on it."""

from __future__ import annotations

import contextlib

import numpy as np
from absl import logging

from jaxunet.data.pixels import BadImage
from jaxunet.data.source import Source, spread
from jaxunet.data.threads import ordered_map

LOOKED_AT = 64  # images
BLACK = 16  # values below are near black
NEARLY_ALL = 0.95  # share of pixels near black that deserves a warning


def tell_pixels(source: Source) -> None:
    """Logs the range of the pixels and the share near black, of a few images spread over a set.

    Images that are almost black, or of one value, get a warning. Corrupt ones are left out: reading
    them for training reports them.
    """

    def load(row: np.integer) -> np.ndarray | None:
        with contextlib.suppress(BadImage):
            return source.load(np.array([row]))
        return None

    rows = spread(len(source), LOOKED_AT)
    images = [pixels for pixels in ordered_map(load, rows) if pixels is not None]
    if not images:
        return
    pixels = np.concatenate(images)
    low, high, black = int(pixels.min()), int(pixels.max()), float((pixels < BLACK).mean())
    logging.info(
        '%s: pixels of %d of %d images, %dx%dx%d: values %d to %d, %.0f%% near black (below %d)',
        *(source.name, len(images), len(source), *source.image_shape),
        *(low, high, 100 * black, BLACK),
    )
    if low == high or black > NEARLY_ALL:
        logging.warning(
            '%s: the images are %s; were they stored with another range than 0 to 255, or '
            'converted by another program? Look at the files before you train on them',
            *(source.name, 'of one value' if low == high else 'nearly black'),
        )
