"""What the benchmark of the linear layer compares: the op forward, and with all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.linear import reference
from pallas_kernels.linear.cases import CIFAR10, ELEPHANTS64
from pallas_kernels.measurement import NONE, Measurement, with_gradients

CASES = ELEPHANTS64 + CIFAR10


def measurements(batch: int, dtype: DTypeLike = jnp.bfloat16, others: Mapping[str, Any] = NONE) -> Iterator[Measurement]:
    """Everything to time at a batch size, on XLA and `others`: the ops of further backends by name. Pallas has no kernels for it."""
    if not others:
        return
    array = jax.ShapeDtypeStruct
    for case in CASES:
        image = batch, case.height, case.width
        y = array((*image, case.features), dtype)
        inputs: dict[str, Any] = {'x': array((*image, case.channels), dtype), 'kernel': array((case.channels, case.features), dtype)}
        inputs |= {'bias': array((1, case.features), jnp.float32)} | ({'residual': y} if case.residual else {})
        sides = {name: _side(ops.linear) for name, ops in {'xla': reference, **others}.items()}
        flops = 2 * batch * case.height * case.width * case.channels * case.features
        yield Measurement('linear', case.name, 'forward', batch, sides, inputs, flops)
        both = {name: with_gradients(side) for name, side in sides.items()}
        yield Measurement('linear', case.name, 'forward+backward', batch, both, inputs | {'dy': y}, 3 * flops)


def _side(op: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda i: op(i['x'], i['kernel'], i['bias'], residual=i.get('residual'))
