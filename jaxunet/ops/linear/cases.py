"""Named linear layers: those of our configs, and awkward ones."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """One call of the op; batch 0 = chosen by the test or benchmark."""

    height: int
    width: int
    channels: int
    features: int
    residual: bool = False
    batch: int = 0

    @property
    def name(self) -> str:
        """The case's name in tests and tables."""
        residual, batch = '_res' if self.residual else '', f'_b{self.batch}' if self.batch else ''
        return f'{self.height}x{self.width}_{self.channels}to{self.features}{residual}{batch}'


def _attention(side: int, channels: int) -> tuple[Case, Case]:
    """Returns the layers around an attention."""
    return Case(side, side, channels, 3 * channels), Case(
        side, side, channels, channels, residual=True
    )


ELEPHANTS64 = (*_attention(16, 192), *_attention(8, 256))
CIFAR10 = (*_attention(16, 256), *_attention(4, 256))
# Numbers of pixels that do not divide into strips of 8×8 or 8×16, or into rows of 8; channels that
# are not a multiple of 8; one pixel.
AWKWARD = (
    Case(5, 7, 24, 40, residual=True, batch=3),
    Case(4, 6, 72, 136, residual=True, batch=5),
    Case(12, 8, 136, 200, batch=2),
    Case(9, 4, 8, 8, residual=True, batch=2),
    Case(8, 8, 20, 3, residual=True, batch=3),
    Case(3, 5, 7, 12, batch=2),
    Case(16, 16, 456, 64, batch=2),
    Case(1, 1, 5, 9, residual=True, batch=1),
)
CASES = ELEPHANTS64 + CIFAR10 + AWKWARD
