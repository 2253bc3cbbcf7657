"""The ops of the pallas backend, for this process's device: one signature each, shared with the references."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels import device
from pallas_kernels.attention import vjp as attention_kernels
from pallas_kernels.conv3x3.vjp import conv3x3, norm_silu_conv3x3
from pallas_kernels.features import Features
from pallas_kernels.group_norm import vjp as group_norm_kernels

__all__ = ['attention', 'conv3x3', 'group_norm', 'norm_silu_conv3x3']


def group_norm(
    x: Features,
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    *,
    groups: int = 32,
    eps: float = 1e-5,
    silu: bool = False,
) -> Float[Array, 'batch height width channels']:
    """GroupNorm [+ SiLU]; see `pallas_kernels.group_norm.reference.group_norm`."""
    return group_norm_kernels.group_norm(x, scale, offset, groups=groups, eps=eps, silu=silu, interpret=device.interpreted())


def attention(qkv: Float[Array, 'batch tokens packed'], *, num_heads: int) -> Float[Array, 'batch tokens channels']:
    """Multi-head attention on packed qkv; see `pallas_kernels.attention.reference.attention`."""
    return attention_kernels.attention(qkv, num_heads=num_heads, interpret=device.interpreted())
