"""Named convolutions: those of our configs, and awkward ones.

Tests, benchmarks and tuning share them.
"""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """One call of a convolution op.

    Fields:
      parts: channels of the input, several where it is a skip connection read in place.
      residual: channels of what is added to the result; a shortcut projects them when they differ
        from `features`. () = nothing.
      norm: GroupNorm and SiLU come before the convolution.
      batch: 0 = any, chosen by the benchmark.
    """

    height: int
    width: int
    parts: tuple[int, ...]
    features: int
    residual: tuple[int, ...] = ()
    norm: bool = True
    groups: int = 32
    batch: int = 0
    per_sample: bool = False

    @property
    def channels(self) -> int:
        """Channels of the input."""
        return sum(self.parts)

    @property
    def name(self) -> str:
        """The case's name in tests and tables."""
        parts, norm = '+'.join(map(str, self.parts)), 'norm_' if self.norm else ''
        residual = f'_res{"+".join(map(str, self.residual))}' if self.residual else ''
        batch = f'_b{self.batch}' if self.batch else ''
        return f'{norm}{self.height}x{self.width}_{parts}to{self.features}{residual}{batch}'

    def flops(self, batch: int) -> int:
        """Returns the multiplications and additions of the convolution."""
        return 2 * 9 * batch * self.height * self.width * self.channels * self.features


def _level(side: int, features: int, *inputs: tuple[int, ...]) -> tuple[Case, ...]:
    """Returns the convolutions of the residual blocks of a level, given the parts of their inputs.

    The first convolution of a block is shifted by its time embedding; the input is the residual of
    the second one.
    """
    return (
        *(Case(side, side, parts, features, per_sample=True) for parts in inputs),
        *(Case(side, side, (features,), features, residual=parts) for parts in inputs),
    )


ELEPHANTS64 = (
    Case(64, 64, (3,), 64, norm=False),
    *_level(64, 64, (64,), (64, 64), (128, 64)),
    Case(64, 64, (64,), 3),
    *_level(32, 128, (64,), (128,), (128, 64), (128, 128), (192, 128)),
    *_level(16, 192, (128,), (192,), (192, 128), (192, 192), (256, 192)),
    *_level(8, 256, (192,), (256,), (256, 192), (256, 256)),
)
CIFAR10 = (
    Case(32, 32, (3,), 128, norm=False),
    Case(32, 32, (256,), 256, norm=False),
    Case(16, 16, (256,), 256, norm=False),
    Case(32, 32, (256, 128), 128, per_sample=True),
    Case(32, 32, (128,), 3),
    Case(16, 16, (128,), 256, per_sample=True),
    Case(16, 16, (256, 128), 256, per_sample=True),
    Case(16, 16, (256, 256), 256, per_sample=True),
    Case(4, 4, (256,), 256, per_sample=True),
    Case(4, 4, (256,), 256, residual=(256, 256)),
)
# Small images that configs/cifar10.py upsamples, and configs/elephants64.py with `conv_resample`.
UPSAMPLED = (
    Case(4, 4, (256,), 256, norm=False),
    Case(8, 8, (256,), 256, norm=False),
    Case(16, 16, (256,), 256, norm=False),
    Case(16, 16, (192,), 192, norm=False),
    Case(32, 32, (128,), 128, norm=False),
)
AWKWARD = (
    Case(8, 8, (1,), 32, norm=False, batch=5),
    Case(16, 8, (64,), 64, (64,), batch=1, per_sample=True),
    Case(9, 7, (32, 16), 24, (8, 12), groups=4, batch=3, per_sample=True),
    Case(5, 12, (72,), 40, groups=8, batch=2),
    Case(4, 4, (64, 32), 64, (64, 32), batch=3),
    Case(3, 2, (4,), 6, norm=False, batch=2),
    Case(6, 5, (20, 12), 3, batch=2, groups=8),
)
CASES = ELEPHANTS64 + CIFAR10 + AWKWARD
