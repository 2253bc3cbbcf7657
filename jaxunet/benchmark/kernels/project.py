"""Measurements of the projections of the time embedding: forward, and with all gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxunet.ops.backends import implementations
from jaxunet.ops.linear.projection_cases import CIFAR10, ELEPHANTS64, Case
from jaxunet.ops.linear.projections import Projection
from jaxunet.ops.references import PROJECT, Op
from jaxunet.runtime.measurement import ArrayFunction, Arrays, Measurement
from jaxunet.runtime.plugins import Backend

CASES = (ELEPHANTS64, CIFAR10)
WITH_GRADIENTS = ('x', 'kernel', 'bias')


def measurements(
    batch: int, dtype: DTypeLike = jnp.bfloat16, backends: Sequence[Backend] = ()
) -> Iterator[Measurement]:
    """Yields all measurements at a batch size, on XLA and the backends that implement the op.

    For a backend that only has `linear`, XLA computes the projections, so it is left out.
    """
    backends = [backend for backend in backends if PROJECT in backend.ops]
    if not backends:
        return
    for case in CASES:
        sides = {name: _side(case, op) for name, op in implementations(PROJECT, backends).items()}
        inputs, flops = _inputs(case, batch, dtype), case.flops(batch)
        yield Measurement(PROJECT, case.name, 'forward', batch, sides, inputs, flops)
        both = {name: _with_gradients(side) for name, side in sides.items()}
        dy = tuple(
            jax.ShapeDtypeStruct((batch, layer.features), jnp.float32)
            for layer in case.layers
            if layer.product
        )
        yield Measurement(
            PROJECT, case.name, 'forward+backward', batch, both, inputs | {'dy': dy}, 3 * flops
        )


def _inputs(case: Case, batch: int, dtype: DTypeLike) -> Arrays:
    """Returns shapes and types: the biases of a product are its `bias` and `added` ones."""
    array = jax.ShapeDtypeStruct
    products = [layer for layer in case.layers if layer.product]

    def biases(features: int, number: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (array((features,), jnp.float32),) * number

    return {
        'x': array((batch, case.width), dtype),
        'kernel': tuple(array((case.width, layer.features), dtype) for layer in products),
        'bias': tuple(array((layer.features,), jnp.float32) for layer in products),
        'added': tuple(biases(layer.features, layer.biases - 1) for layer in products),
        'sums': tuple(
            biases(layer.features, layer.biases) for layer in case.layers if not layer.product
        ),
    }


def _side(case: Case, op: Op) -> ArrayFunction:
    """Returns a function that computes the results of the products, and those of the sums."""

    def call(i: Arrays) -> PyTree:
        products = zip(i['kernel'], i['bias'], i['added'], strict=True)
        sums = iter(i['sums'])
        layers = []
        for layer in case.layers:
            if layer.product:
                kernel, bias, added = next(products)
                layers.append(Projection(kernel, (bias, *added)))
            else:
                layers.append(Projection(None, next(sums)))
        outputs = list(zip(op(i['x'], layers), case.layers, strict=True))
        return (
            tuple(y for y, layer in outputs if layer.product),
            tuple(y for y, layer in outputs if not layer.product),
        )

    return call


def _with_gradients(side: ArrayFunction) -> ArrayFunction:
    """Returns a function that also computes the gradients of x, of the kernels and of each `bias`.

    Those of `added` are the same arrays, and those of the sums' biases are dy itself. A network
    copies neither, but a program that returned them would.
    """

    def both(i: Arrays) -> PyTree:
        free = {name: i[name] for name in WITH_GRADIENTS}
        y, pull, sums = jax.vjp(lambda arguments: side(i | arguments), free, has_aux=True)
        return y, sums, pull(i['dy'])

    return both
