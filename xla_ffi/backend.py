"""The ops of the cuda backend: one signature each, shared with the references."""

from __future__ import annotations

from xla_ffi.attention.vjp import attention
from xla_ffi.conv3x3.vjp import conv3x3, norm_silu_conv3x3
from xla_ffi.group_norm.vjp import group_norm
from xla_ffi.linear.vjp import linear

__all__ = ['attention', 'conv3x3', 'group_norm', 'linear', 'norm_silu_conv3x3']
