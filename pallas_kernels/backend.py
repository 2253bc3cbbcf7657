"""The pallas backend, which jaxunet finds by its entry point.

The kernels are written in Mosaic GPU, for Hopper. If this version of JAX lacks what they need, the
backend says so instead of failing to import. XLA runs the calls that the kernels do not take.
"""

from __future__ import annotations

from jaxunet.runtime.plugins import Backend
from pallas_kernels import jax_modules
from pallas_kernels.attention.vjp import attention
from pallas_kernels.conv3x3.vjp import conv3x3, norm_silu_conv3x3
from pallas_kernels.group_norm.vjp import group_norm

BACKEND = Backend(
    name='pallas',
    title='Pallas kernels',
    api=5,
    ops={
        'conv3x3': conv3x3,
        'norm_silu_conv3x3': norm_silu_conv3x3,
        'group_norm': group_norm,
        'attention': attention,
    },
    unavailable=jax_modules.unavailable,
)
