"""Shared by the warpgroups of the Hopper convolution: references, barriers, loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jax import lax
from jaxtyping import Array

from pallas_kernels.conv3x3.hopper_plan import Mainloop
from pallas_kernels.types import Index, Ref

SiluOf = Callable[[Array], Array]  # the activation of a float32 array


@dataclasses.dataclass(frozen=True)
class Program:
    """The references and barriers of one program.

    Fields:
      index: the program's number in the grid.
      inputs, weights, extra_weights, shift, coefficients, out: in device memory.
      strips: input strips, in shared memory.
      blocks: weights in shared memory; a block holds one tap of one chunk.
      staged: outputs in shared memory, before they are stored to device memory.
      strip_full, strip_ready, strip_empty, weights_full, weights_empty, turn: barriers;
        `hopper_kernel` has their table.
    """

    mainloop: Mainloop
    index: Index
    inputs: Sequence[Ref]
    weights: Ref
    extra_weights: Ref
    shift: Ref
    coefficients: Sequence[Ref]
    out: Ref
    strips: Ref
    blocks: Ref
    staged: Ref
    strip_full: Ref
    strip_ready: Ref
    strip_empty: Ref
    weights_full: Ref
    weights_empty: Ref
    turn: Ref

    def each_tile(self, body: Callable[[Index, Index, Index], None]) -> None:
        """Runs body(i, first strip, first output channel) for this program's tiles."""
        s = self.mainloop.schedule

        def step(i: Index, _: int) -> int:
            body(i, *s.tile_at(self.index, i))
            return 0

        lax.fori_loop(0, s.local_tiles(self.index), step, 0)

    def barrier(self, barriers: Ref, group: Index, slot: Index) -> Ref:
        """Returns a consumer's barrier of a strip slot."""
        return barriers.at[group * self.mainloop.schedule.tile.slots + slot]


def loop(start: int, stop: int, body: Callable[[Index], None]) -> None:
    """Runs body(n) for start ≤ n < stop, as a loop on the device."""

    def step(n: Index, _: int) -> int:
        body(n)
        return 0

    if start < stop:
        lax.fori_loop(start, stop, step, 0)
