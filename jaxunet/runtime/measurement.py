"""What the benchmark of a kernel consists of: the sides compared, their inputs and how much work they do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

SETS = 2  # of inputs, which calls take in turn
WEIGHTS = ('kernel', 'shortcut')  # inputs that are scaled to keep the size of what they multiply


class Measurement(NamedTuple):
    """One direction of one op in one case.

    Fields:
      op, case, direction, batch: what the row is called.
      sides: functions of the inputs that compute the same: `xla`, the reference, and kernels by the name of their backend.
      inputs: shapes and types by name.
      flops: of the products, multiplications and additions; None where there are none to speak of.
    """

    op: str
    case: str
    direction: str
    batch: int
    sides: Mapping[str, Callable[[Any], Any]]
    inputs: dict[str, PyTree[jax.ShapeDtypeStruct]]
    flops: int | None

    @property
    def name(self) -> str:
        return f'{self.op} {self.direction}, {self.case}, batch {self.batch}'

    def bytes_needed(self) -> int:
        """Of inputs read once and outputs written once: no implementation moves fewer."""
        outputs = jax.eval_shape(self.sides['xla'], self.inputs)
        return sum(
            math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves((self.inputs, outputs))
        )


def with_gradients(
    function: Callable[[Any], Any], fixed: tuple[str, ...] = ()
) -> Callable[[Any], Any]:
    """The value of a function of named inputs, and its gradients by all but `fixed`, where the input `dy` is that of the value."""

    def both(inputs: dict[str, Any]) -> Any:
        free = {name: value for name, value in inputs.items() if name not in (*fixed, 'dy')}
        y, pull = jax.vjp(lambda arguments: function(inputs | arguments), free)
        return y, pull(inputs['dy'])

    return both


class Inputs:
    """Random arrays for measurements. Those that agree in name, shape and type are one array, in each of the sets."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)
        # Larger arrays repeat these: no kernel notices, and drawing would take longer than the benchmark.
        self._pools = {
            np.dtype(np.float32): self._generator.standard_normal(4_000_037, dtype=np.float32)
        }
        self._arrays: dict[tuple[Any, ...], jax.Array] = {}

    def of(self, measurement: Measurement, number: int) -> dict[str, PyTree[jax.Array]]:
        """Set `number` of the inputs of a measurement: standard normal, weights divided by the root of what they sum over."""

        def draw(path: tuple[Any, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
            key = jax.tree_util.keystr(path), like.shape, like.dtype, number % SETS
            if key not in self._arrays:
                self._arrays[key] = jax.device_put(self._draw(like, weights=path[0].key in WEIGHTS))
            return self._arrays[key]

        return jax.tree_util.tree_map_with_path(draw, measurement.inputs)

    def _draw(self, like: jax.ShapeDtypeStruct, *, weights: bool) -> np.ndarray:
        wide, dtype = np.dtype(np.float32), np.dtype(like.dtype)
        if dtype not in self._pools:
            self._pools[dtype] = self._pools[wide].astype(dtype)
        pool = self._pools[wide if weights else dtype]
        values = np.roll(pool, -int(self._generator.integers(len(pool))))
        if weights:
            values = (values / np.float32(math.sqrt(math.prod(like.shape[:-1])))).astype(dtype)
        return np.resize(values, like.shape)

    def clear(self) -> None:
        """Gives the memory back."""
        self._arrays.clear()
