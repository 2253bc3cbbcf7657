"""Converts many float32 arrays to 16 bits in one launch, instead of one launch per layer."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from xla_ffi.call import ffi_call
from xla_ffi.checks import check_arrays

NARROW = (jnp.dtype('bfloat16'), jnp.dtype('float16'))


def narrow(arrays: Sequence[Array], dtype: DTypeLike) -> tuple[Array, ...]:
    """Converts float32 arrays of any shapes to bfloat16 or float16, rounding to nearest even.

    The values equal those of `astype`. Not differentiable.

    Raises:
      ValueError: another dtype, no arrays or more than `MAX_ARRAYS`, or an array that is not
        float32.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in NARROW:
        raise ValueError(f'narrow: dtype: expected bfloat16 or float16, found {dtype}')
    if not arrays:
        raise ValueError('narrow: no arrays')
    if other := [array.dtype for array in arrays if array.dtype != jnp.float32]:
        raise ValueError(f'narrow: expected float32, found {other[0]}')
    check_arrays('narrow', 'arrays', len(arrays))
    call = ffi_call(
        'jaxunet_narrow', [jax.ShapeDtypeStruct(array.shape, dtype) for array in arrays]
    )
    return tuple(call(*arrays, tensors=np.int64(len(arrays))))
