"""Random-looking bits from counters, the same in numpy, in JAX and in the CUDA kernels."""

from __future__ import annotations

from typing import TypeVar, cast

import numpy as np
from jaxtyping import Array

Words = TypeVar('Words', bound=Array | np.ndarray)


def mix_bits(words: Words) -> Words:
    """Mixes each word of an array of uint32: every bit then depends on all bits of its word.

    This is the finalizer of MurmurHash3, which maps 32 bits to 32 bits one to one (Appleby,
    https://github.com/aappleby/smhasher). `mix_bits` in xla_ffi/group_norm/dropout.cuh is the same.
    """
    x: Array | np.ndarray = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return cast(Words, x ^ (x >> np.uint32(16)))
