"""Measurements of the optimizer: AdamW, the sum of the squared gradients, and 16-bit copies.

They do not depend on the batch size; their rows have batch 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxunet.ops.adamw.cases import CIFAR10, ELEPHANTS64, Case
from jaxunet.ops.adamw.operands import Rule
from jaxunet.ops.backends import implementations
from jaxunet.ops.vocabulary import FusedUpdate
from jaxunet.runtime.measurement import Arrays, Measurement, Side
from jaxunet.runtime.plugins import Backend

CASES = (ELEPHANTS64, CIFAR10)
RULE = Rule(0.9, 0.999, 1e-8, 0.0)  # constants of the configs
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
UPDATED = ('params', 'mu', 'nu', 'averages')


def measurements(
    batch: int, dtype: DTypeLike = jnp.bfloat16, backends: Sequence[Backend] = ()
) -> Iterator[Measurement]:
    """Yields all measurements, on XLA and the backends that implement the op.

    Args:
      batch: not used.
      dtype: type of the 16-bit copies and of their gradients.
      backends: the backends beside XLA.
    """
    del batch
    if not any('adamw' in backend.ops for backend in backends):
        return
    sides = implementations('adamw', backends)
    for case in CASES:
        kernels = case._replace(kernels=str(jnp.dtype(dtype)))
        gradients = [
            jax.ShapeDtypeStruct(shape, kind)
            for shape, kind in zip(case.shapes, kernels.gradient_types(), strict=True)
        ]
        weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in case.shapes]
        wide = [weight for weight in weights if len(weight.shape) > 1]
        state: Arrays = dict.fromkeys(('params', 'mu', 'nu'), weights)
        state |= {'averages': [weights] * case.averages}
        yield Measurement(
            'adamw',
            case.name,
            'step',
            1,
            {name: _step(op, case) for name, op in sides.items()},
            {'gradients': gradients, **state, 'factor': NUMBER},
            None,
            UPDATED,
        )
        sums = {name: _sum(op) for name, op in sides.items()}
        yield Measurement(
            'adamw', case.name, 'sum_of_squares', 1, sums, {'gradients': gradients}, None
        )
        copies = {name: _narrow(op, dtype) for name, op in sides.items()}
        yield Measurement('adamw', case.name, 'narrow', 1, copies, {'weights': wide}, None)


def _step(op: FusedUpdate, case: Case) -> Side:
    def call(i: Arrays) -> PyTree:
        number = jnp.float32(1)
        result = op.adamw(
            RULE,
            *(i[name] for name in ('gradients', *UPDATED)),
            take=number > 0,
            factor=i['factor'],
            learning_rate=1e-4 * number,
            corrections=(0.5 * number, 0.25 * number),
            follow=[1e-3 * number] * case.averages,
        )
        # JAX gives the results the memory of the inputs in order, and orders both by name.
        return {name: getattr(result, name) for name in UPDATED}

    return call


def _sum(op: FusedUpdate) -> Side:
    return lambda i: op.sum_of_squares(i['gradients'])


def _narrow(op: FusedUpdate, dtype: DTypeLike) -> Side:
    return lambda i: op.narrow(i['weights'], dtype)
