"""GroupNorm, optionally followed by SiLU, as calls of the kernels, with its gradient.

There are two launches each way: a reduction over the pixels, then the kernel that writes the
result.
"""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.dropout import Dropout, drop
from jaxunet.ops.group_norm import reference
from jaxunet.ops.group_norm.operands import Norm, Statistics, check_kernel_operands
from pallas_kernels.checks import check_not_empty, check_shard_map
from pallas_kernels.group_norm import dispatch
from pallas_kernels.group_norm.parameters import parameter_gradients


def group_norm(
    x: Activation, norm: Norm, *, silu: bool = False, dropout: Dropout | None = None
) -> Float[Array, 'batch height width channels']:
    """act(norm(x) · scale + offset), act = SiLU or identity, then dropout, which XLA computes.

    See `jaxunet.ops.group_norm.reference.group_norm`, which runs the calls that the kernels do not
    take. Wu & He 2018, arXiv 1803.08494.

    Raises:
      ValueError: shapes or types that do not fit each other, no samples, channels that are not a
        multiple of the groups, or a checked `shard_map`.
      UserError: the kernels do not run here.
    """
    check_shard_map('group_norm')
    check_kernel_operands(x, norm)
    check_not_empty('group_norm', 'x', x.parts[0])
    if not dispatch.supports('group_norm', x.parts, norm.groups):
        return reference.group_norm(x, norm, silu=silu, dropout=dropout)
    y = _group_norm(x, norm, silu)
    return y if dropout is None else drop(y, dropout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _group_norm(x: Activation, norm: Norm, silu: bool) -> Array:
    return _forward(x, norm, silu)[0]


def _forward(
    x: Activation, norm: Norm, silu: bool
) -> tuple[Array, tuple[Activation, Norm, Statistics]]:
    y, stats = dispatch.normalise(x.parts, norm, silu=silu)
    return y, (x, norm, stats)


def _backward(
    silu: bool, saved: tuple[Activation, Norm, Statistics], dy: Array
) -> tuple[Activation, Norm]:
    x, norm, stats = saved
    sums, _ = dispatch.gradient_sums(x.parts, dy, norm, stats, silu=silu)
    dx = dispatch.gradient(x.parts, dy, norm, stats, sums, silu=silu)
    return Activation(dx), parameter_gradients(sums, norm)


_group_norm.defvjp(_forward, _backward)
