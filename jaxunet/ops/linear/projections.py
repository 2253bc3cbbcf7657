"""Many small linear layers that read the same vectors, and sums of biases, all in one op.

A residual block adds a projection of the embedding to the shift of its convolution. Each of them is
so small that a GPU takes longer to launch it than to compute it, so a network computes those of all
blocks at once, in this op.

In plain JAX: the reference that kernels are tested against, and the xla backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import at_least_float32
from jaxunet.ops.checks import check_floating

MAX_BIASES = 2  # of a layer: its own, and that of the convolution or shortcut it is added to


class Projection(NamedTuple):
    """One layer: x · kernel + the sum of its biases.

    Fields:
      kernel: None = the layer is only the sum of its biases, one row for all samples.
      biases: one or two.
    """

    kernel: Float[Array, 'width features'] | None
    biases: tuple[Float[Array, ' features'], ...]


def project(
    x: Float[Array, 'batch width'], layers: Sequence[Projection]
) -> tuple[Float[Array, '#batch features'], ...]:
    """Returns the result of every layer in float32, or in float64 if x has it.

    Products are rounded to the type of x, and biases are added afterwards.

    Raises:
      ValueError: shapes or types do not fit.
    """
    check_projections(x, layers)
    wide = at_least_float32(x.dtype)
    biases = [_sum([bias.astype(wide) for bias in layer.biases]) for layer in layers]
    kernels = [layer.kernel for layer in layers if layer.kernel is not None]
    products: list[Array] = []
    if kernels:
        joined = (x @ jnp.concatenate(kernels, axis=1)).astype(wide)
        own = [b for b, layer in zip(biases, layers, strict=True) if layer.kernel is not None]
        widths = [bias.shape[0] for bias in own]
        products = list(jax.lax.split(joined + jnp.concatenate(own)[None, :], widths, axis=1))
    return tuple(
        bias[None, :] if layer.kernel is None else products.pop(0)
        for bias, layer in zip(biases, layers, strict=True)
    )


def _sum(arrays: Sequence[Array]) -> Array:
    return sum(arrays[1:], arrays[0])


def check_projections(x: Array, layers: Sequence[Projection]) -> None:
    """Checks that the operands fit each other.

    Raises:
      ValueError: shapes or types do not fit; the message names the operand.
    """
    check_floating('project', x=x)
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(
            f'project: x: shape {list(x.shape)}; expected [batch, width], width at least 1'
        )
    for i, (kernel, biases) in enumerate(layers):
        if not 1 <= len(biases) <= MAX_BIASES:
            raise ValueError(
                f'project: layers[{i}]: {len(biases)} biases; expected 1 to {MAX_BIASES}'
            )
        if kernel is not None and (
            kernel.ndim != 2
            or kernel.shape[0] != x.shape[1]
            or kernel.shape[1] == 0
            or kernel.dtype != x.dtype
        ):
            raise ValueError(
                f'project: layers[{i}].kernel: {kernel.dtype}{list(kernel.shape)}; '
                f'expected {x.dtype}[{x.shape[1]}, features], features at least 1'
            )
        features = biases[0].shape[-1:] if kernel is None else kernel.shape[1:]
        for bias in biases:
            check_floating('project', bias=bias)
            if bias.shape != features or bias.ndim != 1:
                expected = list(features) or '[features]'
                raise ValueError(
                    f'project: layers[{i}].biases: shape {list(bias.shape)}; expected {expected}'
                )
