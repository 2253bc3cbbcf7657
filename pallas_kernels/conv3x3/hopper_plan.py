"""The inputs, channels and weights that the steps of the Hopper convolution read."""

from __future__ import annotations

import dataclasses

from pallas_kernels.conv3x3.schedule import CHUNK, Schedule, Tile
from pallas_kernels.hopper_grid import ceil_div


@dataclasses.dataclass(frozen=True)
class Source:
    """The consecutive chunks that one input array contributes.

    Fields:
      array: index of the kernel's input.
      first: its first step.
      steps: the number of its steps.
      weight: its first channel among the input channels of the weights.
      follows_tile: its channels start at the tile's output channels (a residual without shortcut).
    """

    array: int
    first: int
    steps: int
    weight: int
    follows_tile: bool = False


@dataclasses.dataclass(frozen=True)
class Mainloop:
    """The steps of one call: their schedule and inputs.

    Fields:
      sources: inputs of the nine-tap steps.
      extras: inputs of the residual's steps.
      arrays: the number of inputs: the parts (split: their high, then their low halves), then the
        parts of the residual in the same way (split and without shortcut: its three terms).
      outputs_first: weights are stored as (taps, output channels, input channels) instead of (taps,
        input channels, output channels).
      flipped: the last tap comes first.
    """

    schedule: Schedule
    sources: tuple[Source, ...]
    extras: tuple[Source, ...]
    arrays: int
    outputs_first: bool
    flipped: bool


def mainloop(
    image: tuple[int, int, int],
    channels: tuple[int, ...],
    features: int,
    tile: Tile,
    *,
    residual: tuple[int, ...] = (),
    shortcut: bool = False,
    split: bool = False,
    flipped: bool = False,
    activated: bool = False,
    itemsize: int = 2,
) -> Mainloop:
    """Returns the steps of conv3x3 for inputs whose parts have these channels.

    Args:
      image: batch, height, width.
      residual: channels of the parts that a shortcut projects, or (features,) for one array that is
        added unchanged. It becomes the centre tap of its own chunks.
      split: float32 operands as bfloat16 terms, x = high + low. The products are high · high + high
        · low + low · high, with the weights in the order high, low, high. A residual without
        shortcut has three terms, which represent it exactly.
      flipped: compute the input gradient of the convolution with this kernel.
      activated: apply SiLU(a · x + b) to the parts.
      itemsize: bytes of an output value.
    """
    step = arrays = 0

    def products(widths: tuple[int, ...]) -> list[Source]:
        nonlocal step, arrays
        out, weight = [], 0
        for half in (0, 0, 1) if split else (0,):
            for i, width in enumerate(widths):
                out.append(
                    Source(arrays + half * len(widths) + i, step, ceil_div(width, CHUNK), weight)
                )
                step, weight = step + out[-1].steps, weight + width
        arrays += len(widths) * (2 if split else 1)
        return out

    sources = products(channels)
    chunks = step
    extras = products(residual) if shortcut else []
    if residual and not shortcut:
        for _ in range(3 if split else 1):
            extras.append(
                Source(arrays, step, ceil_div(tile.features, CHUNK), 0, follows_tile=True)
            )
            step, arrays = step + extras[-1].steps, arrays + 1
    schedule = Schedule(*image, chunks, step - chunks, features, itemsize, tile, activated)
    # wgmma can read either order, but boxes of (input, output) channels need multiples of 64 of
    # both.
    whole = features % 64 == 0 and tile.features % 64 == 0
    return Mainloop(
        schedule,
        tuple(sources),
        tuple(extras),
        arrays,
        outputs_first=flipped or not whole,
        flipped=flipped,
    )
