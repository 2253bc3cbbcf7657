"""The part of an image that is kept, and its resizing to the size of the model.

The part is the largest centred crop of the target's aspect ratio, or a random one
(`data.crop=random`); an antialiased Lanczos filter resizes it. An image of the target's size keeps
its pixels, unless a smaller part of it is cut out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, UInt
from PIL import Image

Shape = tuple[int, int, int]  # height, width, channels
# uint8, or uint16 with data.bits=16
Pixels = UInt[np.ndarray, 'height width channels']
Batch = UInt[np.ndarray, 'images height width channels']
Crops = Float64[np.ndarray, 'images 3']  # rows of the fields of `Crop`

# A box filter by a whole factor first reduces an image to this many times its final size: almost
# as good as Lanczos alone, and much faster.
REDUCING_GAP = 3.0


class Crop(NamedTuple):
    """The part of an image to keep.

    Fields:
      share: its sides, as a share of the largest crop of the target's aspect ratio.
      down, right: its place from top to bottom and from left to right, 0 to 1.
    """

    share: float
    down: float
    right: float


CENTRE = Crop(1.0, 0.5, 0.5)


def crop_of(crops: Crops | None, row: int) -> Crop:
    """Returns the part of an image to keep; the centre where there are no crops."""
    if crops is None:
        return CENTRE
    return Crop(*crops[row].tolist())


def random_crops(random: np.random.Generator, count: int, side: int, least: float) -> Crops:
    """Draws crops as guided-diffusion's `random_crop_arr`.

    It resizes the shorter side of an image to a random whole number of pixels, from the target's
    side to that side divided by `least`, and cuts the target out anywhere.

    Args:
      side: shorter side of the target, in pixels.
      least: smallest crop, as a share of the largest, above 0 and at most 1.
    """
    resized = random.integers(side, math.ceil(side / least) + 1, count)
    return np.stack([side / resized, *random.random((2, count))], axis=1)


def resized(image: Image.Image, height: int, width: int, crop: Crop = CENTRE) -> Image.Image:
    """Returns the part of an image to keep, at this size."""
    if image.size == (width, height) and crop.share == 1:
        return image
    scale = max(width / image.width, height / image.height) / crop.share
    box_width, box_height = min(width / scale, image.width), min(height / scale, image.height)
    left = (image.width - box_width) * crop.right
    top = (image.height - box_height) * crop.down
    box = (left, top, min(left + box_width, image.width), min(top + box_height, image.height))
    return image.resize(
        (width, height), Image.Resampling.LANCZOS, box=box, reducing_gap=REDUCING_GAP
    )
