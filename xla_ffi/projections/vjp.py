"""Linear layers that read the same vectors as calls of the FFI handlers (plan.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxunet.ops.checks import check_kernel_type
from jaxunet.ops.linear.projections import Projection, check_projections
from xla_ffi.call import ffi_call

MAX_LAYERS = 1 << 12  # kMaxLayers in read.cc
Kernels = tuple[Array | None, ...]
Biases = tuple[tuple[Array, ...], ...]


def project(
    x: Float[Array, 'batch width'], layers: Sequence[Projection]
) -> tuple[Float[Array, '#batch features'], ...]:
    """Returns the result of every layer; see `jaxunet.ops.linear.projections.project`.

    Products accumulate in float32 and are not rounded. The backward pass rounds the gradients of
    the results to the type of x before it multiplies them.

    Raises:
      ValueError: shapes or types that do not fit each other, or that the kernels do not take.
    """
    check_projections(x, layers)
    check_kernel_type('project', 'x', x)
    if len(layers) > MAX_LAYERS:
        raise ValueError(f'project: {len(layers)} layers; the kernels take at most {MAX_LAYERS}')
    if not layers:
        return ()
    biases = tuple(tuple(b.astype(jnp.float32) for b in layer.biases) for layer in layers)
    return _project(x, tuple(layer.kernel for layer in layers), biases)


@jax.custom_vjp
def _project(x: Array, kernels: Kernels, biases: Biases) -> tuple[Array, ...]:
    operands, shapes = [x], []
    attributes: dict[str, Any] = {'layers': np.int64(len(kernels))}
    for i, (kernel, added) in enumerate(zip(kernels, biases, strict=True)):
        operands += [*([] if kernel is None else [kernel]), *added]
        rows = 1 if kernel is None else x.shape[0]
        shapes.append(jax.ShapeDtypeStruct((rows, added[0].shape[0]), jnp.float32))
        attributes |= {f'kernel_{i}': kernel is not None, f'biases_{i}': np.int64(len(added))}
    return tuple(ffi_call('jaxunet_projections', shapes)(*operands, **attributes))


Saved = tuple[Array, Kernels, Biases]  # for the backward pass: x, the kernels and the biases


def _forward(x: Array, kernels: Kernels, biases: Biases) -> tuple[tuple[Array, ...], Saved]:
    return _project(x, kernels, biases), (x, kernels, biases)


def _backward(saved: Saved, given: Sequence[Array]) -> tuple[Array, Kernels, Biases]:
    x, kernels, biases = saved
    products = [(i, kernel) for i, kernel in enumerate(kernels) if kernel is not None]
    of_kernel: list[Array | None] = [None] * len(kernels)
    # The result of a layer without a kernel has one row.
    of_bias = [dy[0] if kernel is None else dy for kernel, dy in zip(kernels, given, strict=True)]
    dx = jnp.zeros_like(x)
    if products:
        operands, shapes = [x], []
        for i, kernel in products:
            operands += [kernel, given[i]]
            shapes += [
                jax.ShapeDtypeStruct(kernel.shape, kernel.dtype),
                jax.ShapeDtypeStruct(kernel.shape[1:], jnp.float32),
            ]
        shapes += [
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((len(products), *x.shape), jnp.float32),
        ]
        call = ffi_call('jaxunet_projection_gradients', shapes)
        *gradients, dx, _ = call(*operands, layers=np.int64(len(products)))
        for n, (i, _) in enumerate(products):
            of_kernel[i], of_bias[i] = gradients[2 * n : 2 * n + 2]
    of_biases = tuple((db,) * len(added) for db, added in zip(of_bias, biases, strict=True))
    return dx, tuple(of_kernel), of_biases


_project.defvjp(_forward, _backward)
