"""Measurements of the optimizer: AdamW, the sum of the squared gradients, and 16-bit copies.

The copies are of all arrays of two and more dimensions, the kernels. (Training does not copy
the time embedding's kernels, which have less than 1% of the weights.) They are measured in three
directions: `narrow` is the conversion of the weights alone, `step_then_narrow` a step of AdamW and
then this conversion, and `step_with_copies` a step that also updates the copies, with the same
results.

Measurements do not depend on the batch size; their rows have batch 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from jaxunet.ops.adamw.cases import CIFAR10, ELEPHANTS64, Case
from jaxunet.ops.adamw.operands import Constants
from jaxunet.ops.backends import implementations
from jaxunet.ops.vocabulary import FusedUpdate
from jaxunet.runtime.measurement import ArrayFunction, Arrays, Measurement
from jaxunet.runtime.plugins import Backend

CASES = (ELEPHANTS64, CIFAR10)
CONSTANTS = Constants(0.9, 0.999, 1e-8, 0.0)  # constants of the configs
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
UPDATED = ('params', 'mu', 'nu', 'averages')
COPIES = 'copies'


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
        wide = [weight for weight in weights if _copied(weight)]
        state: Arrays = dict.fromkeys(('params', 'mu', 'nu'), weights)
        state |= {'averages': [weights] * case.averages, 'gradients': gradients, 'factor': NUMBER}
        yield from _steps(case, sides, state, dtype)
        sums = {name: _sum(op) for name, op in sides.items()}
        yield Measurement(
            'adamw', case.name, 'sum_of_squares', 1, sums, {'gradients': gradients}, None
        )
        packs = {name: _pack(op) for name, op in sides.items()}
        yield Measurement('adamw', case.name, 'pack', 1, packs, {'gradients': gradients}, None)
        copies = {name: _narrow(op, dtype) for name, op in sides.items()}
        yield Measurement('adamw', case.name, 'narrow', 1, copies, {'weights': wide}, None)


def _steps(
    case: Case, sides: Mapping[str, FusedUpdate], state: Arrays, dtype: DTypeLike
) -> Iterator[Measurement]:
    """Yields the measurements of AdamW: alone, with copies, and with a separate conversion.

    Args:
      state: the shapes and types of its arrays, without copies.
      dtype: type of the copies.
    """
    steps = {name: _step(op, case) for name, op in sides.items()}
    yield Measurement('adamw', case.name, 'step', 1, steps, state, None, UPDATED)
    copies = [jax.ShapeDtypeStruct(w.shape, dtype) if _copied(w) else None for w in state['params']]
    yield Measurement(
        'adamw',
        case.name,
        'step_with_copies',
        1,
        {name: step for name, step in steps.items() if sides[name].updates_copies},
        state | {COPIES: copies},
        None,
        (*UPDATED, COPIES),
        (COPIES,),
    )
    separate = {name: _step_then_narrow(step, sides[name], dtype) for name, step in steps.items()}
    yield Measurement('adamw', case.name, 'step_then_narrow', 1, separate, state, None, UPDATED)


def _copied(weight: Array | jax.ShapeDtypeStruct) -> bool:
    return len(weight.shape) > 1


def _step(op: FusedUpdate, case: Case) -> ArrayFunction:
    """Returns a step, which also updates the copies if there are some among its inputs."""

    def call(i: Arrays) -> PyTree:
        number = jnp.float32(1)
        options = {COPIES: i[COPIES]} if COPIES in i else {}
        result = op.adamw(
            CONSTANTS,
            *(i[name] for name in ('gradients', *UPDATED)),
            take=number > 0,
            factor=i['factor'],
            learning_rate=1e-4 * number,
            corrections=(0.5 * number, 0.25 * number),
            follow=[1e-3 * number] * case.averages,
            **options,
        )
        # JAX gives the results the memory of the inputs in order, and orders both by name.
        return {name: getattr(result, name) for name in (*UPDATED, *options)}

    return call


def _step_then_narrow(step: ArrayFunction, op: FusedUpdate, dtype: DTypeLike) -> ArrayFunction:
    def call(i: Arrays) -> PyTree:
        new = step(i)
        return new | {COPIES: op.narrow([w for w in new['params'] if _copied(w)], dtype)}

    return call


def _sum(op: FusedUpdate) -> ArrayFunction:
    return lambda i: op.sum_of_squares(i['gradients'])


def _pack(op: FusedUpdate) -> ArrayFunction:
    return lambda i: op.pack(i['gradients'], jnp.float32)


def _narrow(op: FusedUpdate, dtype: DTypeLike) -> ArrayFunction:
    return lambda i: op.narrow(i['weights'], dtype)
