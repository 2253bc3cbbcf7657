"""Chooses the kernel of a convolution for this device and shape, and defines it under `jax.vmap`.

Hopper's kernel where it supports the shape, else Triton's, which takes every shape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxunet.ops.conv3x3.operands import Added, Affine, Parts
from jaxunet.runtime import device
from pallas_kernels.conv3x3 import hopper, hopper_weight_gradient, triton, triton_weight_gradient
from pallas_kernels.types import Shaped

# Pixels of an image from which Hopper's kernel, and output channels up to which Triton's, apply
# GroupNorm and SiLU themselves. To refit, time `norm_silu_conv3x3` on both sides of the limits with
# `python -m jaxunet.benchmark.kernels`.
FUSED_PIXELS = 1024
FUSED_FEATURES = 16


def project(added: Added) -> Float[Array, 'batch height width features']:
    """Returns the 1×1 convolution of a residual, in the type of its parts.

    One product a part: a concatenation of the parts would have to be written and read.
    """
    assert added.shortcut is not None
    products, start = [], 0
    for part in added.parts:
        matrix = added.shortcut[start : start + part.shape[-1]].astype(part.dtype)
        products.append(
            jnp.einsum('bhwc,cf->bhwf', part, matrix, preferred_element_type=jnp.float32)
        )
        start += part.shape[-1]
    return functools.reduce(jnp.add, products).astype(added.parts[0].dtype)


def forward(
    parts: Parts,
    kernel: Float[Array, '3 3 channels features'],
    shift: Float[Array, '#batch features'],
    added: Added | None = None,
    affine: Affine | None = None,
) -> Float[Array, 'batch height width features']:
    """Returns conv3x3(act(x)) + shift + added.

    Args:
      parts: x, joined along channels.
      affine: (a, b): act(x) = SiLU(a · x + b); None: act is the identity.
    """
    return _forward(parts, kernel.astype(parts[0].dtype), shift.astype(jnp.float32), added, affine)


def weight_gradient(
    parts: Parts, dy: Float[Array, 'batch height width features']
) -> Float[Array, '3 3 channels features']:
    """Returns the gradient of conv3x3(x, kernel) · dy by the kernel, float32; x joins `parts`."""
    return _weight_gradient(parts, dy)


def input_gradient(
    dy: Float[Array, 'batch height width features'],
    kernel: Float[Array, '3 3 channels features'],
    widths: tuple[int, ...],
) -> Parts:
    """Returns the gradient of conv3x3(x, kernel) · dy by each part of x.

    These are convolutions with the flipped kernel.

    Args:
      widths: channels of the parts.
    """
    parts, start = [], 0
    for width in widths:
        part = kernel[:, :, start : start + width].astype(dy.dtype)
        parts.append(_input_gradient((dy,), part, jnp.zeros((1, width), jnp.float32), None, None))
        start += width
    return tuple(parts)


def fuses_activation(parts: Sequence[Shaped], kernel: Shaped) -> bool:
    """Returns whether GroupNorm and SiLU are faster inside the convolution than before it.

    Hopper's kernel activates a tile once for its nine taps, which is faster in large images.
    Triton's kernel fuses with few output channels, where reading x takes most of its time.
    """
    if device.target() is device.Target.HOPPER and hopper.supports(parts, kernel) is None:
        return parts[0].shape[1] * parts[0].shape[2] >= FUSED_PIXELS
    return kernel.shape[3] <= FUSED_FEATURES


def _convolve(
    flipped: bool,
    parts: Parts,
    kernel: Array,
    shift: Array,
    added: Added | None,
    affine: Affine | None,
) -> Float[Array, 'batch height width features']:
    """Runs one convolution on this device.

    Args:
      flipped: convolve with kernel[::-1, ::-1], its input and output channels exchanged.
    """
    target = device.target()
    if target is device.Target.HOPPER:
        residual, shortcut = (None, None) if added is None else (added.parts, added.shortcut)
        shortcut = None if shortcut is None else shortcut.astype(kernel.dtype)
        if (
            hopper.supports(
                parts, kernel, residual=residual, shortcut=shortcut, affine=affine, flipped=flipped
            )
            is None
        ):
            return hopper.forward(
                parts,
                kernel,
                shift,
                residual=residual,
                shortcut=shortcut,
                affine=affine,
                flipped=flipped,
            )
    plain = None if added is None else added.parts[0] if added.shortcut is None else project(added)
    matrix = hopper.flip(kernel) if flipped else kernel
    return triton.forward(
        parts,
        matrix,
        shift,
        residual=plain,
        affine=affine,
        interpret=target is device.Target.INTERPRET,
    )


def _batched(convolve: Callable[..., Array]) -> Callable[..., Array]:
    """Returns the convolution with a rule for `jax.vmap`.

    The mapped axis joins the batch. With mapped weights the calls run one after the other.
    """
    call = jax.custom_batching.custom_vmap(convolve)

    @call.def_vmap
    def rule(
        size: int,
        mapped: PyTree[bool],
        parts: tuple[Array, ...],
        kernel: Array,
        shift: Array,
        added: Added | None,
        affine: tuple[Array, Array] | None,
    ) -> tuple[Array, bool]:
        def spread(x: Array, is_mapped: bool) -> Array:
            return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))

        arguments = (parts, kernel, shift, added, affine)
        if mapped[1] or (added is not None and added.shortcut is not None and mapped[3].shortcut):
            return jax.lax.map(
                lambda a: call(*a), jax.tree.map(spread, arguments, tuple(mapped))
            ), True
        batch = parts[0].shape[1 if mapped[0][0] else 0]

        def merge(x: Array, is_mapped: bool) -> Array:
            whole = spread(x, is_mapped)
            # A shared shift has a batch of 1.
            whole = jnp.broadcast_to(whole, (size, batch, *whole.shape[2:]))
            return whole.reshape(size * batch, *whole.shape[2:])

        parts, shift, affine = jax.tree.map(
            merge, (parts, shift, affine), (mapped[0], mapped[2], mapped[4])
        )
        if added is not None:
            added = Added(jax.tree.map(merge, added.parts, mapped[3].parts), added.shortcut)
        y = call(parts, kernel, shift, added, affine)
        return y.reshape(size, batch, *y.shape[1:]), True

    return call


_forward = _batched(functools.partial(_convolve, False))
_input_gradient = _batched(functools.partial(_convolve, True))


@jax.custom_batching.sequential_vmap
def _weight_gradient(parts: Parts, dy: Array) -> Array:
    target, pixels = device.target(), math.prod(dy.shape[:3])
    # Over few pixels XLA computes float32 in full rather than as tf32. Triton's three tf32 products
    # are as accurate as that; Hopper's three bfloat16 products are not.
    exact = dy.dtype == jnp.float32 and pixels < 2048
    if (
        target is device.Target.HOPPER
        and not exact
        and hopper_weight_gradient.supports(parts, dy) is None
    ):
        return hopper_weight_gradient.weight_gradient(parts, dy)
    return triton_weight_gradient.weight_gradient(
        parts, dy, interpret=target is device.Target.INTERPRET
    )
