"""The reading of stored values as pixels: their range, transparency, and the bits that are kept.

Pixels are uint8, or uint16 with `data.bits=16`, and stand for −1 to 1 from their lowest value to
their highest. Values are mapped to them from `data.range`; without one, from the full range of
their type, or for floats from 0 to 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float32, Shaped, UInt

from jaxunet.config import Config
from jaxunet.runtime.errors import UserError

COLOURS = {'white': '#ffffff', 'black': '#000000'}
RANGES = {'u1': (0.0, 255.0), 'u2': (0.0, 65535.0), 'f': (0.0, 1.0)}  # of types, where none is set


class Reading(NamedTuple):
    """The fields of `config.data` of the same names.

    Fields:
      background: white, black or #rrggbb, on which transparent images are drawn; keep: their
        opacity is a fourth channel, and colours are multiplied by it; drop: opacity is ignored.
      bits: of each channel of a pixel, 8 or 16.
      range: the values that become the lowest and the highest pixel; () = those of the type.
    """

    background: str = 'white'
    bits: int = 8
    range: tuple[float, ...] = ()

    @classmethod
    def of(cls, config: Config) -> Reading:
        """Returns the reading that a config states."""
        return cls(config.data.background, config.data.bits, config.data.range)

    @classmethod
    def of_pictures(cls, config: Config) -> Reading:
        """Returns the reading of the pictures that a network sees beside the noisy images.

        Those of a set of their own have the range of their type, and opacity if they have four
        channels.
        """
        own = cls.of(config)
        if not config.picture_path:
            return own
        drawn_on = 'white' if own.keeps and config.picture_channels != 4 else own.background
        return cls(drawn_on, own.bits)

    @property
    def dtype(self) -> np.dtype:
        """Type of the pixels."""
        return np.dtype(np.uint8 if self.bits == 8 else np.uint16)

    @property
    def top(self) -> int:
        """The highest pixel."""
        return 2**self.bits - 1

    @property
    def keeps(self) -> bool:
        """True if opacity is a fourth channel."""
        return self.background == 'keep'

    @property
    def as_stored(self) -> bool:
        """True if 8-bit values are pixels as they are."""
        return self.bits == 8 and not self.range

    @property
    def colour(self) -> tuple[int, int, int]:
        """Red, green and blue of the background, 0 to 255."""
        text = COLOURS.get(self.background, self.background)
        return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)

    def levels(
        self, values: Shaped[np.ndarray, '*shape'], name: str
    ) -> Float32[np.ndarray, '*shape']:
        """Maps stored values to 0 to `top`, not rounded.

        Args:
          name: for the error.

        Raises:
          UserError: values out of range, or integers of a type that has no usual range.
        """
        low, high = self.check(values, name)
        return ((values.astype(np.float64) - low) * (self.top / (high - low))).astype(np.float32)

    def check(self, values: Shaped[np.ndarray, '...'], name: str) -> tuple[float, float]:
        """Returns the values that become the lowest and the highest pixel.

        Raises:
          UserError: as `levels`.
        """
        low, high = self._range_of(values.dtype, name)
        least, most = (values.min(), values.max()) if values.size else (low, high)
        if not (least >= low and most <= high):  # NaN is neither
            raise UserError(
                f'{name}: expected values from {low:g} to {high:g}'
                f'{"" if self.range else f", the range of {values.dtype} without data.range"}, '
                f'found {least:g} to {most:g}; set data.range to the lowest and the highest value '
                'of the set, or scale the values'
            )
        return low, high

    def _range_of(self, dtype: np.dtype, name: str) -> tuple[float, float]:
        if self.range:
            return self.range[0], self.range[1]
        found = RANGES.get(dtype.str[1:]) or RANGES.get(dtype.kind)
        if found is None:
            raise UserError(
                f'{name}: {dtype} has no usual range of pixels; set data.range to the lowest and '
                'the highest value of the set, such as 0,4095'
            )
        return found

    def rounded(self, levels: Float32[np.ndarray, '*shape']) -> UInt[np.ndarray, '*shape']:
        """Returns the pixels of levels; filters may have taken these out of range a little."""
        return np.clip(np.rint(levels), 0, self.top).astype(self.dtype)

    def stored(self, pixels: UInt[np.ndarray, '*shape']) -> Shaped[np.ndarray, '*shape']:
        """Returns pixels of 16 bits in the range of the set: uint16 if `is_whole`, else float32."""
        if self.bits == 8 or not self.range:
            return pixels
        low, high = self.range
        values = low + pixels.astype(np.float64) * ((high - low) / self.top)
        return np.rint(values).astype(np.uint16) if self.is_whole else values.astype(np.float32)

    @property
    def is_whole(self) -> bool:
        """True if the set's values are whole numbers from 0 to 65535, as PNG has.

        A range of fewer than 256 numbers is taken for one of floats.
        """
        if not self.range:
            return True
        low, high = self.range
        return low == int(low) and high == int(high) and 0 <= low <= high - 255 <= 65535 - 255


PLAIN = Reading()


@functools.cache
def log_once(log: Callable[..., None], text: str) -> None:
    """Logs a text by `logging.info` or the like: a run opens its images several times."""
    log('%s', text)


def tell_rounding(name: str, kind: str) -> None:
    """Logs, once for a set, that its values are rounded to 8 bits."""
    rounded = f'{name}: {kind} values are rounded to 8 bits; data.bits=16 keeps 16'
    log_once(logging.warning, rounded)
