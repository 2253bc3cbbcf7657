"""Dropout whose random numbers cost little: a hash of each element's position.

JAX's generator would take more arithmetic per element than the layers around it. Here it draws two
words per sample once in a step; each block mixes them with its name and with the positions. This is
integer arithmetic, so all backends drop the same elements.
"""

from __future__ import annotations

import math
import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32


def dropout_seeds(keys: Key[Array, ' batch']) -> UInt32[Array, 'batch 2']:
    """Returns the words from which all blocks of a network derive what they drop."""
    return jax.vmap(lambda key: jax.random.bits(key, (2,), 'uint32'))(keys)


def dropout(
    x: Float[Array, 'batch *rest'],
    seeds: UInt32[Array, 'batch 2'],
    rate: float,
    path: tuple[str, ...],
) -> Float[Array, 'batch *rest']:
    """Zeroes each element with probability `rate` and scales the rest by 1 / (1 - rate).

    What a sample loses depends on its own seeds alone, so the result does not depend on how a batch
    is split over devices.

    Args:
      seeds: from `dropout_seeds`.
      rate: below 1; exact to 2⁻³².
      path: the names of the module and its parents; each module drops other elements.
    """
    words = _words(seeds, x.shape[1:], zlib.crc32('/'.join(path).encode()))
    dropped = words < jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    return jnp.where(dropped, jnp.zeros((), x.dtype), x * jnp.asarray(1 / (1 - rate), x.dtype))


def _words(
    seeds: UInt32[Array, 'batch 2'], shape: tuple[int, ...], name: int
) -> UInt32[Array, 'batch *shape']:
    """Returns 32 random bits for every element of each sample, of this shape."""
    ones = (1,) * len(shape)
    first, second = ((seeds[:, i] ^ jnp.uint32(name)).reshape(-1, *ones) for i in range(2))
    position = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(1, *shape)
    return _mix(_mix(position ^ first) + second)


def _mix(word: UInt32[Array, '*shape']) -> UInt32[Array, '*shape']:
    """Mixes each word: every bit of the result depends on all bits of the word.

    This is the finalizer of MurmurHash3, which maps 32 bits to 32 bits one to one (Appleby,
    https://github.com/aappleby/smhasher).
    """
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
