"""The pallas backend, which jaxunet finds by its entry point.

The kernels depend on the device of this process: Mosaic GPU on Hopper for what it
supports, Triton otherwise, and interpreted Triton in tests on a CPU. If this version of JAX lacks
one of them, the backend says so instead of failing to import (`pallas_kernels.jax_modules`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.runtime import device
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.plugins import Backend
from pallas_kernels import jax_modules
from pallas_kernels.attention import vjp as attention_kernels
from pallas_kernels.group_norm import vjp as group_norm_kernels

if jax_modules.missing(jax_modules.TRITON) is None:
    from pallas_kernels.conv3x3.vjp import conv3x3, norm_silu_conv3x3


def group_norm(
    x: Activation,
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    *,
    groups: int = 32,
    eps: float = 1e-5,
    silu: bool = False,
) -> Float[Array, 'batch height width channels']:
    """GroupNorm [+ SiLU]; see `jaxunet.ops.group_norm.reference.group_norm`."""
    return group_norm_kernels.group_norm(
        x, scale, offset, groups=groups, eps=eps, silu=silu, interpret=device.interpreted()
    )


def attention(
    qkv: Float[Array, 'batch tokens packed'], *, num_heads: int
) -> Float[Array, 'batch tokens channels']:
    """Multi-head attention on packed qkv; see `jaxunet.ops.attention.reference.attention`."""
    return attention_kernels.attention(qkv, num_heads=num_heads, interpret=device.interpreted())


def unavailable() -> str | None:
    """Says what this machine, or this version of JAX, lacks for the kernels; None if they run."""
    try:
        target = device.target()
    except device.UnsupportedDeviceError as error:
        return str(error)
    lacks = jax_modules.missing(jax_modules.TRITON)
    if lacks is None and target is device.Target.HOPPER:
        lacks = jax_modules.missing(jax_modules.MOSAIC)
    return lacks


def _ops() -> dict[str, Callable[..., Any]]:
    """Returns the kernels by op; without Triton, convolutions are functions that say so."""
    if (lacks := jax_modules.missing(jax_modules.TRITON)) is None:
        return {
            'conv3x3': conv3x3,
            'norm_silu_conv3x3': norm_silu_conv3x3,
            'group_norm': group_norm,
            'attention': attention,
        }

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UserError(f'backend=pallas: {lacks}')

    refused = dict.fromkeys(('conv3x3', 'norm_silu_conv3x3'), refuse)
    return {**refused, 'group_norm': group_norm, 'attention': attention}


BACKEND = Backend(
    name='pallas',
    title='Pallas kernels',
    api=1,
    ops=_ops(),
    unavailable=unavailable,
)
