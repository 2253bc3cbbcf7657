"""What the benchmark of GroupNorm compares: the op forward, and with all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import backend
from pallas_kernels.features import Features
from pallas_kernels.group_norm import reference
from pallas_kernels.group_norm.cases import CIFAR10, ELEPHANTS64, Case
from pallas_kernels.measurement import NONE, Measurement, with_gradients

CASES = tuple(dict.fromkeys(ELEPHANTS64 + CIFAR10))


def measurements(batch: int, dtype: DTypeLike = jnp.bfloat16, others: Mapping[str, Any] = NONE) -> Iterator[Measurement]:
    """Everything to time at a batch size, on XLA, Pallas and `others`: the ops of further backends by name."""
    for case in CASES:
        image, rows = (batch, case.height, case.width), batch if case.per_sample else 1
        affine = jax.ShapeDtypeStruct((rows, case.channels), jnp.float32)
        parts = tuple(jax.ShapeDtypeStruct((*image, c), dtype) for c in case.parts)
        inputs: dict[str, Any] = {'x': parts, 'scale': affine, 'offset': affine}
        sides = {name: _side(case, ops.group_norm) for name, ops in {'xla': reference, 'pallas': backend, **others}.items()}
        yield Measurement('group_norm', case.name, 'forward', batch, sides, inputs, None)
        both = {name: with_gradients(side) for name, side in sides.items()}
        inputs = inputs | {'dy': jax.ShapeDtypeStruct((*image, case.channels), dtype)}
        yield Measurement('group_norm', case.name, 'forward+backward', batch, both, inputs, None)


def _side(case: Case, op: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    def call(i: dict[str, Any]) -> Any:
        return op(Features(i['x'], (None,) * len(case.parts)), i['scale'], i['offset'], groups=case.groups, silu=case.silu)

    return call
