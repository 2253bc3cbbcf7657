"""Measurements of attention: forward, and with its gradient."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxunet.ops.attention.cases import CIFAR10, ELEPHANTS64
from jaxunet.ops.backends import implementations
from jaxunet.ops.references import Op
from jaxunet.runtime.measurement import ArrayFunction, Measurement, with_gradients
from jaxunet.runtime.plugins import Backend

CASES = ELEPHANTS64 + CIFAR10


def measurements(
    batch: int, dtype: DTypeLike = jnp.bfloat16, backends: Sequence[Backend] = ()
) -> Iterator[Measurement]:
    """Yields all measurements at a batch size, on XLA and the backends that implement the op.

    The backward pass counts 2.5 times the work of forward, recomputation included
    (arXiv 2307.08691).
    """
    for case in CASES:
        channels, flops = case.heads * case.width, case.flops(batch)
        inputs = {'qkv': jax.ShapeDtypeStruct((batch, case.tokens, 3 * channels), dtype)}
        sides = {
            name: _side(case.heads, op)
            for name, op in implementations('attention', backends).items()
        }
        yield Measurement('attention', case.name, 'forward', batch, sides, inputs, flops)
        both = {name: with_gradients(side) for name, side in sides.items()}
        inputs = inputs | {'dy': jax.ShapeDtypeStruct((batch, case.tokens, channels), dtype)}
        yield Measurement(
            'attention', case.name, 'forward+backward', batch, both, inputs, flops * 7 // 2
        )


def _side(heads: int, op: Op) -> ArrayFunction:
    attention = functools.partial(op, num_heads=heads)
    return lambda i: attention(i['qkv'])
