"""A run says what was read before it trains."""

from __future__ import annotations

import numpy as np
import pytest
from support.data_files import put

from jaxunet.data import look
from jaxunet.data.source import ArraySource
from jaxunet.data.sources import open_source


@pytest.mark.parametrize(
    ('name', 'count', 'begin'),
    [
        ('herd', 200, 'herd: pixels of 64 of 200 images'),
        ('digits:', 1, 'digits: pixels of 1 of 1 image'),
    ],
)
def test_the_range_and_the_share_near_black(name, count, begin, logged):
    pixels = np.full((count, 8, 8, 1), 100, np.uint8)
    pixels[:, :2], pixels[:, 7] = 15, 250
    look.log_pixels(ArraySource(name, pixels, (8, 8, 1)))
    assert logged == [f'{begin}, 8x8x1: 15 to 250, mean 97.5; 25% near black (below 16)']


@pytest.mark.parametrize(
    ('value', 'what'), [(0, 'of one value'), (15, 'nearly black'), (255, 'of one value')]
)
def test_images_that_are_black_or_empty_get_a_warning(value, what, logged):
    pixels = np.full((20, 8, 8, 1), value, np.uint8)
    pixels[0, 0, 0] += value == 15
    look.log_pixels(ArraySource('herd', pixels, (8, 8, 1)))
    assert f'herd: the images are {what}; ' in logged[1]


def test_corrupt_images_are_left_out(logged, tmp_path):
    path = put(tmp_path, {'a.png': b'\x89PNG\r\n\x1a\n'}, 'folder')
    look.log_pixels(open_source(str(path), image_shape=(8, 8, 3)))
    assert not logged
