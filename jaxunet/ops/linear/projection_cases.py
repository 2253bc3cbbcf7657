"""Named projections of an embedding: those of our configs, and awkward ones.

Tests and benchmarks share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Layer(NamedTuple):
    """One layer of a call.

    Fields:
      features: length of its biases.
      biases: their number.
      product: False = the layer has no kernel and is only the sum of its biases.
    """

    features: int
    biases: int = 2
    product: bool = True


class Case(NamedTuple):
    """One call of `project`.

    Fields:
      width: length of the vectors that all layers read.
      batch: their number; 0 = chosen by the test or benchmark.
    """

    name: str
    width: int
    layers: tuple[Layer, ...]
    batch: int = 0

    def flops(self, batch: int) -> int:
        """Returns the multiplications and additions of all products, forward."""
        return (
            2 * batch * self.width * sum(layer.features for layer in self.layers if layer.product)
        )


def _block(features: int, *, shortcut: bool = False) -> tuple[Layer, ...]:
    """Returns the layers of a residual block that adds its embedding to the shift.

    The product takes the bias of the first convolution; the sum is that of the second one's bias
    and the shortcut's.
    """
    own = Layer(features)
    return (own, Layer(features, product=False)) if shortcut else (own,)


def _network(name: str, width: int, channels: Sequence[int]) -> Case:
    """Returns the projections of a UNet with two residual blocks per level, in its order.

    Args:
      channels: of each level, that of the full resolution first.
    """
    layers: list[Layer] = []
    for before, features in zip((channels[0], *channels), channels, strict=False):
        layers += [*_block(features, shortcut=features != before), *_block(features)]
    layers += _block(channels[-1]) * 2
    for features in channels:
        layers += _block(features, shortcut=True) * 3
    return Case(name, width, tuple(layers))


def _layers(
    products: Sequence[tuple[int, int]], sums: Sequence[tuple[int, int]] = ()
) -> tuple[Layer, ...]:
    """Returns layers, given features and number of biases of each."""
    return (
        *(Layer(*layer) for layer in products),
        *(Layer(*layer, product=False) for layer in sums),
    )


# The layers of configs/elephants64.py and configs/cifar10.py; a test compares them.
ELEPHANTS64 = _network('elephants64', 256, (64, 128, 192, 256))
CIFAR10 = _network('cifar10', 512, (128, 256, 256, 256))
# Widths of configs/imagenet64.py, whose norms take scales and shifts instead.
SCALE_SHIFT = Case(
    'scale_shift', 768, _layers([(384, 1), (768, 1), (1152, 1), (1536, 1)], [(768, 2)]), batch=64
)
# Rows that are multiples of 16 bytes or not, in one type or in both; several tiles of every side;
# more layers than a launch takes.
AWKWARD = (
    Case('one_sample', 5, _layers([(3, 1)]), batch=1),
    Case('odd_rows', 33, _layers([(9, 2), (70, 1)], [(5, 2), (300, 1)]), batch=7),
    Case('rows_of_four', 20, _layers([(12, 1), (68, 2)]), batch=3),
    Case('several_tiles', 136, _layers([(72, 2), (8, 1)], [(64, 2)]), batch=70),
    Case('many_layers', 8, _layers([(8, 1)] * 70, [(8, 2)] * 70), batch=2),
    Case('sums_only', 8, _layers([], [(8, 1), (13, 2)]), batch=4),
)
