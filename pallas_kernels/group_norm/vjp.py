"""GroupNorm, optionally followed by SiLU, as calls of the kernels, with its gradient.

The Hopper kernels take two launches each way: a reduction over the pixels, then the kernel that
writes the result. The Triton kernels take one launch if `owns_pixels` holds.
"""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.group_norm.operands import check_kernel_sizes, check_operands
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
    interpret: bool = False,
) -> Float[Array, 'batch height width channels']:
    """act(norm(x) · scale + offset), act = SiLU or identity.

    See `jaxunet.ops.group_norm.reference.group_norm`. Wu & He 2018, arXiv 1803.08494.

    Raises:
      ValueError: shapes or types that do not fit each other, no samples, channels that are not a
        multiple of `groups`, or a checked `shard_map`.
      UserError: this version of JAX lacks what the kernels need.
    """
    check_shard_map('group_norm')
    check_operands(x, scale, offset)
    check_not_empty('group_norm', 'x', x.parts[0])
    check_kernel_sizes(x)
    return _group_norm(x, scale, offset, groups, eps, silu, interpret)


# Saved for the backward pass: x, scale, offset, and the groups' mean and inverse deviation.
Saved = tuple[Activation, Array, Array, Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _group_norm(
    x: Activation, scale: Array, offset: Array, groups: int, eps: float, silu: bool, interpret: bool
) -> Array:
    return _forward(x, scale, offset, groups, eps, silu, interpret)[0]


def _forward(
    x: Activation, scale: Array, offset: Array, groups: int, eps: float, silu: bool, interpret: bool
) -> tuple[Array, Saved]:
    first = x.parts[0]
    batch, height, width, _ = first.shape
    y, mean, inverse = dispatch.normalise(
        x.parts,
        scale,
        offset,
        groups=groups,
        eps=eps,
        silu=silu,
        owns=owns_pixels(batch * x.channels * first.dtype.itemsize, height * width),
        interpret=interpret,
    )
    return y, (x, scale, offset, mean, inverse)


def _backward(
    groups: int, eps: float, silu: bool, interpret: bool, saved: Saved, dy: Array
) -> tuple[Activation, Array, Array]:
    x, scale, offset, mean, inverse = saved
    batch, height, width, channels = dy.shape
    norm = (scale, offset, mean, inverse)
    dx, sums = dispatch.gradient(
        x.parts,
        dy,
        norm,
        groups=groups,
        silu=silu,
        owns=owns_pixels(batch * channels * dy.dtype.itemsize, height * width),
        interpret=interpret,
    )
    return Activation(dx), *parameter_gradients(sums, scale, offset)


def owns_pixels(bytes_per_pixel: int, pixels: int) -> bool:
    """Returns True if one launch of the Triton kernels is faster than two.

    In one launch, a program reads all pixels of its groups twice. That is faster if the second read
    finds the tensor in registers or in the L2 cache, and there are few pixels. The limits are in
    pixels, and in bytes of the whole batch: about half of an H200's 50 MB of L2, which x and y
    share. To refit, time `both_triton` of `pallas_kernels.group_norm.tune` on either side of the
    limits.

    Args:
      bytes_per_pixel: of all channels of all samples.
      pixels: height · width.
    """
    return pixels <= 256 or (pixels <= 4096 and bytes_per_pixel * pixels <= 24e6)


_group_norm.defvjp(_forward, _backward)
