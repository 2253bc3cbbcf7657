"""The pallas backend, which jaxunet finds by its entry point.

The kernels depend on the device of this process: Mosaic GPU on Hopper for what it supports,
Triton otherwise, and interpreted Triton in tests on a CPU. If this version of JAX lacks what they
need, the backend says so instead of failing to import. On Hopper without Triton, the calls that
need it say so (`pallas_kernels.jax_modules`).
"""

from __future__ import annotations

from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.dropout import Dropout, drop
from jaxunet.runtime import device
from jaxunet.runtime.plugins import Backend
from pallas_kernels import jax_modules
from pallas_kernels.attention import vjp as attention_kernels
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
    y = group_norm_kernels.group_norm(
        x, scale, offset, groups=groups, eps=eps, silu=silu, interpret=device.interpreted()
    )
    return y if dropout is None else drop(y, dropout)


def attention(
    qkv: Float[Array, 'batch tokens packed'], *, num_heads: int
) -> Float[Array, 'batch tokens channels']:
    """Multi-head attention on packed qkv; see `jaxunet.ops.attention.reference.attention`."""
    return attention_kernels.attention(qkv, num_heads=num_heads, interpret=device.interpreted())


def unavailable() -> str | None:
    """Says what this machine, or this version of JAX, lacks for the kernels; None if they run."""
    try:
        hopper = device.target() is device.Target.HOPPER
    except device.UnsupportedDeviceError as error:
        return str(error)
    return jax_modules.missing(jax_modules.MOSAIC if hopper else jax_modules.TRITON)


def incomplete() -> str | None:
    """Says what this version of JAX lacks for some calls; None if all of them run."""
    return jax_modules.missing(jax_modules.TRITON)


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
    unavailable=unavailable,
    incomplete=incomplete,
)
