"""Runs a function on the CPU with the matrix products of an NVIDIA GPU: float32 operands as TF32.

On GPUs since Ampere, XLA rounds float32 operands to TF32 by default, unless its autotuner chooses
an algorithm that does not. Here the operands of every product are rounded on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.extend import core
from jaxtyping import PyTree

Arrays = dict[str, jax.Array]  # arguments by name
Op = Callable[..., PyTree]  # arrays in, one array or a tree of arrays out
Both = tuple[PyTree, Arrays | None]  # results, and gradients if they are asked for

PRODUCTS = ('dot_general', 'conv_general_dilated')
# Primitive that only calls a function -> the parameter that holds this function.
INLINED = {
    'jit': 'jaxpr',
    'pjit': 'jaxpr',
    'closed_call': 'call_jaxpr',
    'custom_jvp_call': 'call_jaxpr',
    'custom_vjp_call': 'call_jaxpr',
    'remat2': 'jaxpr',
    'checkpoint': 'jaxpr',
}


def with_gradients(op: Op, arguments: Arrays, cotangent: PyTree, *, gradients: bool) -> Both:
    """Returns the results of `op(**arguments)` and, if asked, gradients of its arguments."""
    if not gradients:
        return op(**arguments), None
    out, pull = jax.vjp(lambda a: op(**a), arguments)
    return out, pull(cotangent)[0]


def with_tf32_products(op: Op, *, gradients: bool) -> Callable[[Arrays, PyTree], Both]:
    """Returns `with_gradients` of `op`, with all float32 products (also backward) as TF32."""

    def both(arguments: Arrays, cotangent: PyTree) -> Both:
        def plain(arguments: Arrays, cotangent: PyTree) -> Both:
            return with_gradients(op, arguments, cotangent, gradients=gradients)

        closed, shape = jax.make_jaxpr(plain, return_shape=True)(arguments, cotangent)
        leaves = jax.tree.leaves((arguments, cotangent))
        results = _evaluate(closed.jaxpr, closed.consts, leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return both


def _tf32(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10) if x.dtype == 'float32' else x


def _evaluate(
    jaxpr: core.Jaxpr, consts: Sequence[jax.Array], arguments: Sequence[jax.Array]
) -> list[jax.Array]:
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= dict(zip(jaxpr.invars, arguments, strict=True))

    def value(atom: core.Var | core.Literal) -> jax.Array:
        return atom.val if isinstance(atom, core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, [value(v) for v in equation.invars]
        if name in INLINED:
            inner = equation.params[INLINED[name]]
            closed = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
            found = _evaluate(closed.jaxpr, closed.consts, inputs)
        elif equation.params.keys() & {'jaxpr', 'call_jaxpr', 'body_jaxpr', 'branches'}:
            raise NotImplementedError(f'products inside {name}: expected one of {list(INLINED)}')
        else:
            inputs = [_tf32(x) for x in inputs] if name in PRODUCTS else inputs
            results = equation.primitive.bind(*inputs, **equation.params)
            found = results if equation.primitive.multiple_results else [results]
        known |= dict(zip(equation.outvars, found, strict=True))
    return [value(v) for v in jaxpr.outvars]
