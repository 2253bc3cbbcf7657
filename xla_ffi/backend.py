"""The ops of the cuda backend: one signature each, shared with the references."""

from __future__ import annotations

import functools

from xla_ffi.attention.vjp import attention
from xla_ffi.conv3x3.vjp import conv3x3, norm_silu_conv3x3
from xla_ffi.group_norm.vjp import group_norm

# Beside this backend's norms alone: XLA's would expect a gradient to pass through the moments.
conv3x3_with_moments = functools.partial(conv3x3, moments=True)
norm_silu_conv3x3_with_moments = functools.partial(norm_silu_conv3x3, moments=True)

__all__ = ['attention', 'conv3x3', 'conv3x3_with_moments', 'group_norm', 'norm_silu_conv3x3', 'norm_silu_conv3x3_with_moments']
