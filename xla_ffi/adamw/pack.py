"""Packs many gradients in one launch; see `jaxunet.ops.adamw.packed`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxunet.ops.adamw.operands import gradient_leaves
from jaxunet.ops.adamw.packed import room
from xla_ffi.call import ffi_call
from xla_ffi.checks import check_arrays

PACKED = (jnp.dtype('float32'), jnp.dtype('bfloat16'))


def pack(arrays: Sequence[Array], dtype: DTypeLike = jnp.float32) -> Float[Array, ' elements']:
    """Joins float32, bfloat16 and float16 arrays; see `jaxunet.ops.adamw.packed.joined`.

    The result is float32 or bfloat16, rounded to nearest even. Not differentiable.

    Raises:
      ValueError: another dtype, an array of another type, no arrays, or more than `MAX_ARRAYS`.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in PACKED:
        raise ValueError(f'pack: dtype: expected float32 or bfloat16, found {dtype}')
    leaves = gradient_leaves(list(arrays))
    check_arrays('pack', 'gradients', len(leaves))
    size = sum(room(leaf.size) for leaf in leaves)
    call = ffi_call('jaxunet_pack', jax.ShapeDtypeStruct((size,), dtype))
    packed: Array = call(*leaves, tensors=np.int64(len(leaves)))
    return packed
