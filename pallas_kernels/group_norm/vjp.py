"""GroupNorm, optionally followed by SiLU, as calls of the kernels, with its gradient.

There are two launches each way: a reduction over the pixels, then the kernel that writes the
result.
"""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.group_norm import reference
from jaxunet.ops.group_norm.operands import check_kernel_operands
from pallas_kernels.checks import check_not_empty, check_shard_map
from pallas_kernels.group_norm import dispatch
from pallas_kernels.group_norm.parameters import parameter_gradients


def group_norm(
    x: Activation,
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    *,
    groups: int = 32,
    eps: float = 1e-5,
    silu: bool = False,
) -> Float[Array, 'batch height width channels']:
    """act(norm(x) · scale + offset), act = SiLU or identity.

    See `jaxunet.ops.group_norm.reference.group_norm`, which runs the calls that the kernels do not
    take. Wu & He 2018, arXiv 1803.08494.

    Raises:
      ValueError: shapes or types that do not fit each other, no samples, channels that are not a
        multiple of `groups`, or a checked `shard_map`.
      UserError: the kernels do not run here.
    """
    check_shard_map('group_norm')
    check_kernel_operands(x, scale, offset, groups)
    check_not_empty('group_norm', 'x', x.parts[0])
    if not dispatch.takes('group_norm', x.parts, groups):
        return reference.group_norm(x, scale, offset, groups=groups, eps=eps, silu=silu)
    return _group_norm(x, scale, offset, groups, eps, silu)


# Saved for the backward pass: x, scale, offset, and the groups' mean and inverse deviation.
Saved = tuple[Activation, Array, Array, Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _group_norm(
    x: Activation, scale: Array, offset: Array, groups: int, eps: float, silu: bool
) -> Array:
    return _forward(x, scale, offset, groups, eps, silu)[0]


def _forward(
    x: Activation, scale: Array, offset: Array, groups: int, eps: float, silu: bool
) -> tuple[Array, Saved]:
    y, mean, inverse = dispatch.normalise(x.parts, scale, offset, groups=groups, eps=eps, silu=silu)
    return y, (x, scale, offset, mean, inverse)


def _backward(
    groups: int, eps: float, silu: bool, saved: Saved, dy: Array
) -> tuple[Activation, Array, Array]:
    del eps
    x, scale, offset, mean, inverse = saved
    norm = (scale, offset, mean, inverse)
    sums, _ = dispatch.gradient_sums(x.parts, dy, norm, silu=silu)
    dx = dispatch.gradient(x.parts, dy, norm, sums, groups=groups, silu=silu)
    return Activation(dx), *parameter_gradients(sums, scale, offset)


_group_norm.defvjp(_forward, _backward)
