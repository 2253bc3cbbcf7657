"""Measurements of the linear layer: forward, and with all gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxunet.ops.backends import implementations
from jaxunet.ops.linear.cases import CIFAR10, ELEPHANTS64
from jaxunet.ops.references import Op
from jaxunet.runtime.measurement import ArrayFunction, Arrays, Measurement, with_gradients
from jaxunet.runtime.plugins import Backend

CASES = ELEPHANTS64 + CIFAR10


def measurements(
    batch: int, dtype: DTypeLike = jnp.bfloat16, backends: Sequence[Backend] = ()
) -> Iterator[Measurement]:
    """Yields all measurements at a batch size, on XLA and the backends that implement the op."""
    if not any('linear' in backend.ops for backend in backends):
        return
    array = jax.ShapeDtypeStruct
    for case in CASES:
        image = batch, case.height, case.width
        y = array((*image, case.features), dtype)
        inputs: Arrays = {
            'x': array((*image, case.channels), dtype),
            'kernel': array((case.channels, case.features), dtype),
            'bias': array((1, case.features), jnp.float32),
        }
        if case.residual:
            inputs['residual'] = y
        sides = {name: _side(op) for name, op in implementations('linear', backends).items()}
        flops = 2 * batch * case.height * case.width * case.channels * case.features
        yield Measurement('linear', case.name, 'forward', batch, sides, inputs, flops)
        both = {name: with_gradients(side) for name, side in sides.items()}
        yield Measurement(
            'linear', case.name, 'forward+backward', batch, both, inputs | {'dy': y}, 3 * flops
        )


def _side(op: Op) -> ArrayFunction:
    return lambda i: op(i['x'], i['kernel'], i['bias'], residual=i.get('residual'))
