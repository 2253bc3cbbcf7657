"""Packs many gradients in one launch; see `jaxunet.ops.adamw.packed`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxunet.ops.adamw.operands import gradient_leaves
from jaxunet.ops.adamw.packed import room
from xla_ffi.call import ffi_call
from xla_ffi.checks import check_arrays


def pack(arrays: Sequence[Array]) -> Float[Array, ' elements']:
    """Joins float32, bfloat16 and float16 arrays; see `jaxunet.ops.adamw.packed.joined`.

    Not differentiable.

    Raises:
      ValueError: an array of another type, no arrays, or more than `MAX_ARRAYS`.
    """
    leaves = gradient_leaves(list(arrays))
    check_arrays('pack', 'gradients', len(leaves))
    size = sum(room(leaf.size) for leaf in leaves)
    call = ffi_call('jaxunet_pack', jax.ShapeDtypeStruct((size,), jnp.float32))
    packed: Array = call(*leaves, tensors=np.int64(len(leaves)))
    return packed
