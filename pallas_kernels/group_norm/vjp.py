"""The op: GroupNorm, optionally followed by SiLU, on the kernels, with its gradient."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.group_norm.operands import check_operands
from pallas_kernels.group_norm.apply import normalise
from pallas_kernels.group_norm.backward import gradient, gradient_sums, parameter_gradients
from pallas_kernels.group_norm.statistics import moments


def group_norm(
    x: Activation,
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    *,
    groups: int = 32,
    eps: float = 1e-5,
    silu: bool = False,
    interpret: bool = False,
) -> Float[Array, 'batch height width channels']:
    """act(norm(x) · scale + offset), act = SiLU or identity: `reference.group_norm` on kernels (Wu & He 2018, arXiv 1803.08494).

    A producer's moments are taken as a function of its part: the gradient of the part is the whole one, that of the moments is zero.

    Raises:
      ValueError: shapes or types that do not fit each other, or channels that are not a multiple of `groups`.
    """
    check_operands(x, scale, offset)
    return _group_norm(x, scale, offset, groups, eps, silu, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _group_norm(
    x: Activation, scale: Array, offset: Array, groups: int, eps: float, silu: bool, interpret: bool
) -> Array:
    return _forward(x, scale, offset, groups, eps, silu, interpret)[0]


def _forward(
    x: Activation, scale: Array, offset: Array, groups: int, eps: float, silu: bool, interpret: bool
) -> tuple[Array, Any]:
    known = x.moments
    first = x.parts[0]
    batch, height, width, _ = first.shape
    found: tuple[Array, ...] | None = None
    if any(m is not None for m in known) or not owns_pixels(
        batch * x.channels * first.dtype.itemsize, height * width
    ):
        found = tuple(
            moments(p, interpret=interpret) if m is None else m
            for p, m in zip(x.parts, known, strict=True)
        )
    y, mean, inverse = normalise(
        x.parts, found, scale, offset, groups=groups, eps=eps, silu=silu, interpret=interpret
    )
    return y, (x, scale, offset, mean, inverse)


def _backward(
    groups: int, eps: float, silu: bool, interpret: bool, saved: Any, dy: Array
) -> tuple[Activation, Array, Array]:
    x, scale, offset, mean, inverse = saved
    batch, height, width, channels = dy.shape
    sums = None
    if not owns_pixels(batch * channels * dy.dtype.itemsize, height * width):
        sums, _ = gradient_sums(
            x.parts, dy, scale, offset, mean, inverse, silu=silu, interpret=interpret
        )
    dx, sums = gradient(
        x.parts,
        dy,
        scale,
        offset,
        mean,
        inverse,
        groups=groups,
        silu=silu,
        sums=sums,
        interpret=interpret,
    )
    return Activation(dx, x.zero_moments), *parameter_gradients(sums, scale, offset)


def owns_pixels(bytes_per_pixel: int, pixels: int) -> bool:
    """Whether one launch, whose programs walk twice over all pixels of their groups, beats two that share the pixels of a sample.

    It does where the second walk finds the tensor in registers or cache: small images, or images of which the batch stays in an H200's
    50 MB cache. A long walk by few programs is slow too.
    """
    return pixels <= 256 or (pixels <= 4096 and bytes_per_pixel * pixels <= 24e6)


_group_norm.defvjp(_forward, _backward)
