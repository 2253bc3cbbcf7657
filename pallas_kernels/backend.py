"""The pallas backend, which jaxunet finds by its entry point.

The kernels are written in Mosaic GPU, for Hopper. If this version of JAX lacks what they need, the
backend says so instead of failing to import. XLA runs the calls that the kernels do not take.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.dropout import Dropout, drop
from jaxunet.runtime.plugins import Backend
from pallas_kernels import jax_modules
from pallas_kernels.attention.vjp import attention
from pallas_kernels.conv3x3.vjp import conv3x3, norm_silu_conv3x3
from pallas_kernels.group_norm import vjp as group_norm_kernels


def group_norm(
    x: Activation,
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    *,
    groups: int = 32,
    eps: float = 1e-5,
    silu: bool = False,
    dropout: Dropout | None = None,
) -> Float[Array, 'batch height width channels']:
    """GroupNorm [+ SiLU] [+ dropout]; see `jaxunet.ops.group_norm.reference.group_norm`."""
    y = group_norm_kernels.group_norm(x, scale, offset, groups=groups, eps=eps, silu=silu)
    return y if dropout is None else drop(y, dropout)


BACKEND = Backend(
    name='pallas',
    title='Pallas kernels',
    api=3,
    ops={
        'conv3x3': conv3x3,
        'norm_silu_conv3x3': norm_silu_conv3x3,
        'group_norm': group_norm,
        'attention': attention,
    },
    unavailable=jax_modules.unavailable,
)
