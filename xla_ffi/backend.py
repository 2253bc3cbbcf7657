"""The cuda backend, which jaxunet finds by its entry point."""

from __future__ import annotations

from jaxunet.ops.vocabulary import FusedUpdate
from jaxunet.runtime.plugins import Backend
from xla_ffi import unavailable
from xla_ffi.adamw.narrow import narrow
from xla_ffi.adamw.pack import pack
from xla_ffi.adamw.update import adamw, sum_of_squares
from xla_ffi.attention.vjp import attention
from xla_ffi.conv3x3.upsampled import upsample_conv3x3
from xla_ffi.conv3x3.vjp import conv3x3, norm_silu_conv3x3, norm_silu_conv3x3_and_input
from xla_ffi.group_norm.vjp import group_norm, group_norm_and_input
from xla_ffi.linear.vjp import linear
from xla_ffi.projections.vjp import project
from xla_ffi.weight_gradients.grouping import grouped_if_faster

BACKEND = Backend(
    name='cuda',
    title='CUDA kernels',
    api=5,
    ops={
        'conv3x3': conv3x3,
        'upsample_conv3x3': upsample_conv3x3,
        'norm_silu_conv3x3': norm_silu_conv3x3,
        'norm_silu_conv3x3_and_input': norm_silu_conv3x3_and_input,
        'group_norm': group_norm,
        'group_norm_and_input': group_norm_and_input,
        'attention': attention,
        'linear': linear,
        'project': project,
        'adamw': FusedUpdate(sum_of_squares, adamw, narrow, pack, updates_copies=True),
    },
    unavailable=unavailable,
    transform_gradients=grouped_if_faster,
)
