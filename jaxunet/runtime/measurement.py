"""The measurement of a kernel: the implementations to compare, their inputs and their work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

SETS = 2  # number of sets of inputs; calls alternate among them
WEIGHTS = ('kernel', 'shortcut')  # inputs that are scaled, so that results have the scale of x
POSITIVE = ('nu',)  # inputs without negative numbers
Arrays = dict[str, PyTree]  # arrays, or trees of them, by name
ArrayFunction = Callable[[Arrays], PyTree]


class Measurement(NamedTuple):
    """One direction of one op in one case.

    Fields:
      op, case, direction, batch: identify the row.
      sides: functions of the inputs that compute the same: `xla`, the reference, and the kernels of
        each backend by its name.
      inputs: shapes and types by name.
      flops: multiplications and additions of matrix products; None if they do not matter.
      updated: inputs whose memory the results reuse. Each call gets copies of them; the time to
        copy does not count.
      unread: those of `updated` whose old values need not be read.
    """

    op: str
    case: str
    direction: str
    batch: int
    sides: Mapping[str, ArrayFunction]
    inputs: dict[str, PyTree[jax.ShapeDtypeStruct]]
    flops: int | None
    updated: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The measurement's name in messages."""
        return f'{self.op} {self.direction}, {self.case}, batch {self.batch}'

    def bytes_needed(self) -> int:
        """Returns the fewest bytes possible: inputs are read once, and outputs written once."""
        outputs = jax.eval_shape(self.sides['xla'], self.inputs)
        read = [value for name, value in self.inputs.items() if name not in self.unread]
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves((read, outputs)))


def with_gradients(function: ArrayFunction, fixed: tuple[str, ...] = ()) -> ArrayFunction:
    """Returns a function of named inputs that computes the value and gradients of `function`.

    Args:
      function: a function of named inputs without `dy`.
      fixed: inputs without gradients.

    Returns: a function whose input `dy` is the gradient of the value.
    """

    def both(inputs: Arrays) -> PyTree:
        free = {name: value for name, value in inputs.items() if name not in (*fixed, 'dy')}
        y, pull = jax.vjp(lambda arguments: function(inputs | arguments), free)
        return y, pull(inputs['dy'])

    return both


class Inputs:
    """Random arrays for measurements.

    Within a set, inputs that agree in name, shape and type share one array.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)
        # Larger arrays repeat these numbers: kernels take the same time, and drawing takes long.
        self._pools = {
            np.dtype(np.float32): self._generator.standard_normal(4_000_037, dtype=np.float32)
        }
        self._arrays: dict[tuple[object, ...], jax.Array] = {}

    def of(self, measurement: Measurement, number: int) -> dict[str, PyTree[jax.Array]]:
        """Returns set `number` of a measurement's inputs: standard normal values.

        Inputs in `WEIGHTS` are divided by the square root of the number of products in a sum.
        Inputs in `POSITIVE` are absolute values.
        """

        def draw(
            path: tuple[jax.tree_util.DictKey, *tuple[object, ...]], like: jax.ShapeDtypeStruct
        ) -> jax.Array:
            key = jax.tree_util.keystr(path), like.shape, like.dtype, number % SETS
            if key not in self._arrays:
                drawn = self._draw(like, weights=path[0].key in WEIGHTS)
                self._arrays[key] = jax.device_put(
                    np.abs(drawn) if path[0].key in POSITIVE else drawn
                )
            return self._arrays[key]

        return jax.tree_util.tree_map_with_path(draw, measurement.inputs)

    def _draw(self, like: jax.ShapeDtypeStruct, *, weights: bool) -> np.ndarray:
        wide, dtype = np.dtype(np.float32), np.dtype(like.dtype)
        if dtype not in self._pools:
            self._pools[dtype] = self._pools[wide].astype(dtype)
        pool = self._pools[wide if weights else dtype]
        first, size = int(self._generator.integers(len(pool))), math.prod(like.shape)
        whole = first + size <= len(pool)
        values = pool[first : first + size] if whole else np.roll(pool, -first)
        if weights:
            values = (values / np.float32(math.sqrt(math.prod(like.shape[:-1])))).astype(dtype)
        return np.resize(values, like.shape)

    def clear(self) -> None:
        """Frees the arrays."""
        self._arrays.clear()
