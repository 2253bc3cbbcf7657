"""Named attentions: those of our configs, and awkward ones.

Tests, benchmarks and tuning share them.
"""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """Self-attention over `tokens` pixels.

    Fields:
      width: channels of a head.
      batch: 0 = chosen by the test or benchmark.
    """

    tokens: int
    heads: int
    width: int
    batch: int = 0

    @property
    def name(self) -> str:
        """The case's name in tests and tables."""
        batch = f'_b{self.batch}' if self.batch else ''
        return f'{self.tokens}_tokens_{self.heads}x{self.width}{batch}'

    def flops(self, batch: int) -> int:
        """Returns the multiplications and additions of the two products, forward."""
        return 4 * batch * self.heads * self.tokens**2 * self.width


ELEPHANTS64 = (Case(256, 6, 32), Case(64, 8, 32))
CIFAR10 = (Case(256, 1, 256), Case(16, 1, 256))
ADM = (Case(1024, 4, 64), Case(256, 8, 64), Case(1024, 2, 128))
LONG = (Case(4096, 2, 64, batch=2),)
AWKWARD = (
    Case(49, 3, 8, batch=1),
    Case(77, 2, 32, batch=3),
    Case(130, 1, 48, batch=2),
    Case(9, 1, 160, batch=2),
)
CASES = ELEPHANTS64 + CIFAR10 + ADM + LONG + AWKWARD
