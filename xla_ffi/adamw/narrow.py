"""Many float32 arrays in 16 bits, in one launch: a UNet narrows the weights of some 100 layers in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

NARROW = (jnp.dtype('bfloat16'), jnp.dtype('float16'))


def narrow(arrays: Sequence[Array], dtype: Any) -> tuple[Array, ...]:
    """float32 arrays of any shapes as bfloat16 or float16, rounded to nearest even as `astype` does; not differentiated.

    Raises:
      ValueError: another dtype, no arrays, or an array that is not float32.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in NARROW:
        raise ValueError(f'narrow: dtype: expected bfloat16 or float16, found {dtype}')
    if not arrays:
        raise ValueError('narrow: no arrays')
    if other := [array.dtype for array in arrays if array.dtype != jnp.float32]:
        raise ValueError(f'narrow: expected float32, found {other[0]}')
    call = jax.ffi.ffi_call(
        'jaxunet_narrow', [jax.ShapeDtypeStruct(array.shape, dtype) for array in arrays]
    )
    return tuple(call(*arrays, tensors=np.int64(len(arrays))))
