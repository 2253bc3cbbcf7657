"""Named sets of arrays that AdamW updates together: the weights of our configs, and awkward ones.

Tests and benchmarks share them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

Shape = tuple[int, ...]


class Case(NamedTuple):
    """Arrays of one step.

    Fields:
      shapes: of the arrays, in order.
      averages: averages of the weights.
      kernels: type of the gradients of arrays of two and more dimensions; others are float32.
        'mixed': bfloat16, float32 and float16 in turns.
    """

    name: str
    shapes: tuple[Shape, ...]
    averages: int = 1
    kernels: str = 'bfloat16'

    @property
    def elements(self) -> int:
        """Elements of all arrays."""
        return sum(map(math.prod, self.shapes))

    def gradient_types(self) -> list[str]:
        """Returns the type of each array's gradient."""
        if self.kernels == 'mixed':
            return [('bfloat16', 'float32', 'float16')[i % 3] for i in range(len(self.shapes))]
        return [self.kernels if len(shape) > 1 else 'float32' for shape in self.shapes]


def _network(
    convolutions: Mapping[tuple[int, int], int],
    matrices: Mapping[tuple[int, int], int],
    rows: Mapping[int, int],
) -> tuple[Shape, ...]:
    """Returns the shapes of a network's weights, given the number of weights of each shape.

    Args:
      convolutions: by (channels, features), kernels of 3×3 pixels.
      matrices: by (channels, features), linear layers and shortcuts.
      rows: by length, biases and the norms' scales and offsets.
    """
    shapes: list[Shape] = []
    for (channels, features), count in convolutions.items():
        shapes += [(3, 3, channels, features)] * count
    for shape, count in matrices.items():
        shapes += [shape] * count
    for length, count in rows.items():
        shapes += [(length,)] * count
    return tuple(shapes)


# The parameters of configs/elephants64.py and configs/cifar10.py; a test compares them.
ELEPHANTS64 = Case(
    'elephants64',
    _network(
        {
            (256, 256): 10, (512, 256): 2, (192, 192): 6, (448, 256): 1, (128, 128): 6,
            (448, 192): 1, (384, 192): 1, (320, 192): 1, (192, 256): 1, (320, 128): 1,
            (256, 128): 1, (64, 64): 7, (128, 192): 1, (192, 128): 1, (128, 64): 2,
            (192, 64): 1, (64, 128): 1, (3, 64): 1, (64, 3): 1,
        },
        {
            (256, 768): 6, (256, 256): 14, (192, 576): 5, (512, 256): 2, (256, 192): 5,
            (256, 128): 6, (192, 192): 5, (448, 256): 1, (448, 192): 1, (256, 64): 5,
            (384, 192): 1, (320, 192): 1, (192, 256): 1, (320, 128): 1, (128, 192): 1,
            (192, 128): 1, (64, 256): 1, (128, 64): 2, (192, 64): 1, (64, 128): 1,
        },
        {256: 67, 192: 52, 128: 37, 768: 6, 576: 5, 64: 37, 512: 4, 448: 4, 320: 4, 384: 2, 3: 1},
    ),
)  # fmt: skip
CIFAR10 = Case(
    'cifar10',
    _network(
        {
            (256, 256): 29, (512, 256): 8, (128, 128): 8, (384, 256): 1, (256, 128): 2,
            (384, 128): 1, (128, 256): 1, (3, 128): 1, (128, 3): 1,
        },
        {
            (512, 256): 25, (256, 768): 6, (256, 256): 6, (512, 128): 5, (512, 512): 1,
            (384, 256): 1, (128, 512): 1, (256, 128): 2, (384, 128): 1, (128, 256): 1,
        },
        {256: 136, 512: 18, 128: 38, 768: 6, 384: 4, 3: 1},
    ),
)  # fmt: skip
# Scalars, empty arrays, sizes next to those of vectors and blocks, and an array of several chunks.
SIZES: tuple[Shape, ...] = (
    (), (1,), (3, 5), (64,), (3, 3, 16, 32), (1023,), (4099,), (0, 4), (2, (1 << 14) + 3),
)  # fmt: skip
AWKWARD = (
    Case('no_average', SIZES, averages=0, kernels='float32'),
    Case('two_averages', SIZES, averages=2, kernels='float32'),
    Case('mixed_types', SIZES, averages=1, kernels='mixed'),
)
MANY = Case('many', ((7,), (130,)) * 300, kernels='float32')  # more than one launch takes
CASES = (ELEPHANTS64, CIFAR10, *AWKWARD, MANY)
