"""Says what was read of a set of images before a run trains on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from absl import logging
from jaxtyping import UInt

from jaxunet.data.crop import Batch
from jaxunet.data.pixels import BadImage
from jaxunet.data.source import Source, spread
from jaxunet.data.threads import ordered_map
from jaxunet.runtime.errors import heading, plural

T = TypeVar('T')

LOOKED_AT = 64  # images
NEAR_BLACK = 16  # of 256 levels; values below are near black
NEARLY_ALL = 0.95  # share of pixels near black that deserves a warning
NARROW = 16  # a set of 16 bits that uses less than this part of its range gets a warning
CHANNELS = {1: ('grey',), 3: ('red', 'green', 'blue'), 4: ('red', 'green', 'blue', 'opacity')}


def log_pixels(source: Source, *, may_be_dark: bool = False) -> None:
    """Logs the values of each channel, of a few images spread over a set, and its transparency.

    Images that are almost black, of one value or of a small part of 16 bits get a warning. Corrupt
    ones are left out: reading them for training reports them. The pictures that belong to the
    images come first, if there are any.

    Args:
      may_be_dark: no warning of almost black images, as edges and masks are.
    """
    if source.pictures is not None:
        log_pixels(source.pictures, may_be_dark=True)
    loaded = _of_some(source, lambda row: source.load(np.array([row])))
    images = [pixels for pixels in loaded if pixels is not None]
    if not images:
        return
    pixels = np.concatenate(images)
    reading = source.reading
    near = NEAR_BLACK * (reading.top + 1) // 256
    # What is transparent counts as white.
    shown = pixels[..., :3] + (reading.top - pixels[..., 3:]) if reading.keeps else pixels
    black = float((shown < near).mean())
    logging.info(
        '%s pixels of %d of %s, %dx%dx%d: %s; %.0f%% near black (below %g)',
        *(heading(source.name), len(images), plural(len(source), 'image'), *source.image_shape),
        '; '.join(_channels(source, pixels)),
        *(100 * black, _value(source, near)),
    )
    _tell_transparency(source)
    if pixels.min() == pixels.max() or (black > NEARLY_ALL and not may_be_dark):
        logging.warning(
            '%s the images are %s; were they stored with another range than %g to %g, or '
            'converted by another program? Look at the files before you train on them',
            *(
                heading(source.name),
                'of one value' if pixels.min() == pixels.max() else 'nearly black',
            ),
            *(_value(source, 0), _value(source, reading.top)),
        )
    least, most = int(pixels.min()), int(pixels.max())
    if reading.bits == 16 and least < most and most - least < (reading.top + 1) // NARROW:
        logging.warning(
            '%s the values %g to %g are less than 1/%d of the range; '
            'data.range=%g,%g would spread them over all of it',
            *(heading(source.name), _value(source, least), _value(source, most), NARROW),
            *_suggested(source, least, most),
        )


def _of_some(source: Source, ask: Callable[[int], T]) -> list[T | None]:
    """Returns answers about some images spread over a set; None for corrupt ones."""

    def one(row: np.integer) -> T | None:
        with contextlib.suppress(BadImage):
            return ask(int(row))
        return None

    return list(ordered_map(one, spread(len(source), LOOKED_AT)))


def _value(source: Source, level: float) -> float:
    """Returns the stored value that became a pixel."""
    reading = source.reading
    low, high = reading.range or (0, reading.top)
    value = low + level * (high - low) / reading.top
    return round(value) if reading.is_whole and level == int(level) else value


def _suggested(source: Source, least: int, most: int) -> tuple[float, float]:
    """Returns a range for stored values between these pixels."""
    low, high = _value(source, least), _value(source, most)
    if source.reading.range:
        return low, high
    return 0, 2 ** int(high).bit_length() - 1


def _channels(source: Source, pixels: Batch) -> list[str]:
    """Returns the values of each channel: range, mean, and the share at each end that has any."""
    names = CHANNELS.get(pixels.shape[3])
    if names is None:
        return [f'{pixels.shape[3]} channels, {_statistics(source, pixels)}']
    if len(names) == 1:
        return [_statistics(source, pixels)]
    return [f'{name} {_statistics(source, pixels[..., i])}' for i, name in enumerate(names)]


def _statistics(source: Source, pixels: UInt[np.ndarray, '...']) -> str:
    least, mean, most = (
        _value(source, float(x)) for x in (pixels.min(), pixels.mean(), pixels.max())
    )
    ends = [
        f'{share:.1%} at {_value(source, end):g}'
        for end in (0, source.reading.top)
        if (share := float((pixels == end).mean()))
    ]
    return ', '.join([f'{least:g} to {most:g}, mean {mean:.4g}', *ends])


def _tell_transparency(source: Source) -> None:
    """Logs how many images are transparent in places, and what becomes of it."""
    found = [has for has in _of_some(source, source.has_holes) if has is not None]
    if not any(found):
        return
    ground = source.reading.background
    what = {
        'keep': 'their opacity is a fourth channel',
        'drop': 'it is dropped, so that hidden colours count',
    }.get(ground, f'they are drawn on {ground}')
    logging.info(
        '%s %d of %d images are transparent in places; %s (data.background=%s)',
        *(heading(source.name), sum(found), len(found), what, ground),
    )
