"""The checks of attention's operands: those of every backend, and those of the kernels."""

from __future__ import annotations

import math

from jaxtyping import Array, Shaped

from jaxunet.ops.checks import check_count, check_floating, check_kernel_type

MAX_HEAD_WIDTH = 256  # channels; the kernels hold a tile of whole rows of a head in shared memory


def head_width(qkv: Shaped[Array, '...'], num_heads: int) -> int:
    """Returns the channels of a head, packed / (3 · num_heads).

    Raises:
      ValueError: qkv has another rank or no floating-point type, or the heads do not divide the
        packed channels.
    """
    if qkv.ndim != 3:
        raise ValueError(
            f'attention: qkv: shape {list(qkv.shape)}; expected [batch, tokens, packed]'
        )
    check_floating('attention', qkv=qkv)
    packed = qkv.shape[-1]
    if num_heads < 1 or not packed or packed % (3 * num_heads):
        raise ValueError(f'attention: {packed} packed channels are not 3 x {num_heads} heads')
    return packed // (3 * num_heads)


def check_kernel_operands(qkv: Shaped[Array, '...'], num_heads: int) -> int:
    """Returns the channels of a head, for a backend's kernels.

    Raises:
      ValueError: as `head_width`, or the kernels do not take this width or type, or this
        many queries.
    """
    width = head_width(qkv, num_heads)
    if width > MAX_HEAD_WIDTH:
        raise ValueError(
            f'attention: heads of width {width}: the kernels take widths up to {MAX_HEAD_WIDTH}; '
            f'use more heads, or the xla backend'
        )
    check_kernel_type('attention', 'qkv', qkv)
    check_count('attention', 'qkv', 'queries of all heads', num_heads * math.prod(qkv.shape[:2]))
    return width
