"""Chooses the size of images, the levels of their network, the batch and the number of steps.

They follow from the sizes and the number of the images.
"""

from __future__ import annotations

import math
import statistics

from jaxunet.runtime.errors import UserError

LARGEST = 128  # pixels a side up to which images that share one size keep it
USUAL = 64  # pixels a side of the others, unless they are smaller
SMALLEST = 8
# Attention at levels of at most this many pixels: of images up to `USUAL` pixels at all of them, of
# larger ones at the lowest two levels, if these have at most twice as many.
ATTENDED = 16
# Channels of the levels, from full resolution down, as multiples of model.base_channels. From 5
# levels on as in guided-diffusion for 128, 256 and 512 pixels.
LADDERS = {
    **{1: (1,), 2: (1, 2), 3: (1, 2, 3), 4: (1, 2, 3, 4), 5: (1, 1, 2, 3, 4)},
    **{6: (1, 1, 2, 2, 4, 4), 7: (1, 1, 1, 2, 2, 4, 4)},
}
# Usual batches by the largest side of square images: with XLA, a step at 256 or 512 pixels is
# estimated to take 13 or 23 GiB.
BATCHES = {32: 128, 128: 32, 256: 16, math.inf: 8}
# How often a tuning shows each image, if they are few, without dropout and with it. Without, 500
# photographs gave better pictures after 300 times than after 590. With dropout, these are about
# equal, and 600 emoji gave better ones after 490 times than after 250 (docs/few_steps.md).
TIMES_TUNED, TIMES_WITH_DROPOUT = 300, 600


def image_size(sizes: list[tuple[int, int]]) -> tuple[int, ...]:
    """Returns the size of images to train on, (side,) or (height, width).

    Images that share one size of at most `LARGEST` pixels a side keep it. Others are cut to a
    square, whose side is the median of their shorter sides, at most `USUAL` pixels. Sides are
    multiples of 8, or of 4 below 32 pixels.
    """
    if len(set(sizes)) == 1 and max(sizes[0]) <= LARGEST:
        found = sizes[0]
    else:
        side = min(USUAL, int(statistics.median(min(size) for size in sizes)))
        found = side, side
    if min(found) < SMALLEST:
        raise UserError(
            f'data.path: the images have {found[0]}x{found[1]} pixels; expected {SMALLEST} a side '
            'or more. Set data.image_size to enlarge them'
        )
    multiple = 8 if min(found) >= 32 else 4
    height, width = (side // multiple * multiple for side in found)
    return (height,) if height == width else (height, width)


def levels_of(height: int, width: int) -> int:
    """Returns the number of levels: halving ends at a shorter side of 8, or 4 of small images."""
    least = 8 if min(height, width) >= 32 else 4
    levels = 1
    while (
        levels < max(LADDERS)
        and height % 2**levels == width % 2**levels == 0
        and min(height, width) >> levels >= least
    ):
        levels += 1
    return levels


def attended(side: int, levels: int) -> tuple[int, ...]:
    """Returns the sides of the levels with attention; see `ATTENDED`."""
    sides = [side >> level for level in range(levels)]
    if side > USUAL:
        return tuple(s for s in sides[-2:] if s <= 2 * ATTENDED)
    return tuple(s for s in sides if s <= ATTENDED)


def batch_size(pixels: int, count: int) -> int:
    """Returns the usual batch for images of so many pixels; fewer if there are fewer images."""
    usual = next(batch for side, batch in BATCHES.items() if pixels <= side * side)
    return min(usual, 2 ** int(math.log2(count)))  # a power of 2, which devices divide


def steps_to_train(images: int) -> int:
    """Returns 12,000 √(images/500) steps, in thousands; at least 4,000 and at most 200,000."""
    return 1000 * min(max(round(12 * math.sqrt(images / 500)), 4), 200)


def steps_to_tune(images: int, batch: int, dropout: bool) -> int:
    """Returns the steps that show each image often enough, in thousands; 4,000 to 8,000."""
    times = TIMES_WITH_DROPOUT if dropout else TIMES_TUNED
    return 1000 * min(max(round(times * images / batch / 1000), 4), 8)
