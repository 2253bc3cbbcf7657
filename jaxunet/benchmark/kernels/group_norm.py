"""Measurements of GroupNorm: forward, and with all gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxunet.ops.activation import Activation
from jaxunet.ops.backends import implementations
from jaxunet.ops.group_norm.cases import CIFAR10, ELEPHANTS64, Case
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.references import Op
from jaxunet.runtime.measurement import ArrayFunction, Arrays, Measurement, with_gradients
from jaxunet.runtime.plugins import Backend

CASES = tuple(dict.fromkeys(ELEPHANTS64 + CIFAR10))


def measurements(
    batch: int, dtype: DTypeLike = jnp.bfloat16, backends: Sequence[Backend] = ()
) -> Iterator[Measurement]:
    """Yields all measurements at a batch size, on XLA and the backends that implement the op."""
    for case in CASES:
        image, rows = (batch, case.height, case.width), batch if case.per_sample else 1
        affine = jax.ShapeDtypeStruct((rows, case.channels), jnp.float32)
        parts = tuple(jax.ShapeDtypeStruct((*image, c), dtype) for c in case.parts)
        inputs: Arrays = {'x': parts, 'scale': affine, 'offset': affine}
        sides = {
            name: _side(case, op) for name, op in implementations('group_norm', backends).items()
        }
        yield Measurement('group_norm', case.name, 'forward', batch, sides, inputs, None)
        both = {name: with_gradients(side) for name, side in sides.items()}
        inputs = inputs | {'dy': jax.ShapeDtypeStruct((*image, case.channels), dtype)}
        yield Measurement('group_norm', case.name, 'forward+backward', batch, both, inputs, None)


def _side(case: Case, op: Op) -> ArrayFunction:
    def call(i: Arrays) -> PyTree:
        norm = Norm(i['scale'], i['offset'], case.groups)
        return op(Activation(i['x']), norm, silu=case.silu)

    return call
