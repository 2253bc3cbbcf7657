"""Results of the weight gradients' handlers: the gradients, and a workspace for their splits.

The pixels are divided among splits, whose partial sums stay in the workspace until they are added
(`xla_ffi/conv3x3/split_k.h`). With a smaller workspace, a kernel splits the pixels less.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxunet.runtime import device

MULTIPROCESSORS = 132  # assumed if the GPU is unknown: an H100 or H200 SXM


def partial_sums(pixels: int, weights: int, of_block: int) -> int:
    """Returns the workspace size, in float32 elements, for the gradients of `weights` weights.

    It holds at least the gradients themselves, which stay float32 until the splits have been added.
    A block's share is at least 64 pixels.

    Args:
      of_block: the elements that one block writes; the workspace fits one block per multiprocessor.
    """
    most = of_block * device.multiprocessors(MULTIPROCESSORS)
    return max(min(weights * -(-pixels // 64), most), weights)


def written(
    gradients: Iterable[tuple[tuple[int, ...], DTypeLike]], dtype: DTypeLike
) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and types of the gradients as the kernels write them: float32 or the type
    of x.

    XLA converts them to any other type of the parameters.

    Args:
      gradients: shapes and wanted types.
      dtype: the type of x.
    """
    return [
        jax.ShapeDtypeStruct(shape, t if t in (jnp.float32, dtype) else jnp.float32)
        for shape, t in gradients
    ]
