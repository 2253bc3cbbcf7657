"""Named normalisations: those of our configs, and awkward ones.

Tests, benchmarks and tuning share them.
"""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """GroupNorm of an image whose channels are the concatenation of `parts`.

    Fields:
      silu: SiLU follows.
      per_sample: every sample has its own scale and offset (a scale-shift norm).
      batch: 0 = chosen by the test or benchmark.
      mean: mean of the input; a large one reveals a kernel that loses the variance to cancellation.
    """

    height: int
    width: int
    parts: tuple[int, ...]
    groups: int = 32
    silu: bool = True
    per_sample: bool = False
    batch: int = 0
    mean: float = 0.0

    @property
    def channels(self) -> int:
        """Channels of the input."""
        return sum(self.parts)

    @property
    def name(self) -> str:
        """The case's name in tests and tables."""
        flags = [f'g{self.groups}'] if self.groups != 32 else []
        flags += (
            ['plain'] * (not self.silu)
            + ['per_sample'] * self.per_sample
            + [f'b{self.batch}'] * bool(self.batch)
        )
        flags += [f'mean{self.mean:g}'] * bool(self.mean)
        return '_'.join([f'{self.height}x{self.width}', '+'.join(map(str, self.parts)), *flags])


def _square(side: int, *parts: int, silu: bool = True, per_sample: bool = False) -> Case:
    return Case(side, side, parts, silu=silu, per_sample=per_sample)


ELEPHANTS64 = (
    *(_square(64, *parts) for parts in [(64,), (64, 64), (128, 64)]),
    *(_square(32, *parts) for parts in [(64,), (128,), (128, 64), (128, 128), (192, 128)]),
    *(_square(16, *parts) for parts in [(128,), (192,), (192, 128), (192, 192), (256, 192)]),
    _square(16, 192, silu=False),
    *(_square(8, *parts) for parts in [(192,), (256,), (256, 192), (256, 256)]),
    _square(8, 256, silu=False),
)
CIFAR10 = (_square(32, 128, 128), _square(16, 256, 128), _square(4, 256, 256))
ADM = (
    _square(64, 192, per_sample=True),
    _square(64, 384, 192),
    _square(32, 384, per_sample=True),
    _square(16, 576, 576),
    _square(8, 768, 768),
    _square(128, 128),
)
AWKWARD = (
    Case(3, 5, (6, 10), groups=4, batch=2, per_sample=True),
    Case(4, 4, (8,), groups=4, batch=1),
    Case(7, 5, (30,), groups=5, batch=1, silu=False),
    Case(8, 8, (16, 8), groups=8, batch=3),
    Case(4, 6, (3, 5, 4), groups=3, batch=2),
    Case(5, 3, (3,), groups=1, batch=3),
    Case(6, 6, (40,), groups=40, batch=1),
    Case(4, 4, (144,), groups=1, batch=1),
    Case(1, 2, (64,), groups=8, batch=2),
    Case(9, 9, (64,), batch=1, mean=1000.0),
)
CASES = ELEPHANTS64 + CIFAR10 + ADM + AWKWARD
