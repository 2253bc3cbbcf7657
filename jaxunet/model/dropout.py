"""The random words of the residual blocks' dropout.

One call of JAX's generator in a step draws two words per sample. Each block mixes its own name into
them; `jaxunet.ops.dropout` makes the random bits of every element from the words.
"""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, UInt32

from jaxunet.ops.dropout import Dropout


def dropout_seeds(keys: Key[Array, ' batch']) -> UInt32[Array, 'batch 2']:
    """Returns the words from which all blocks of a network derive what they drop."""
    return jax.vmap(lambda key: jax.random.bits(key, (2,), 'uint32'))(keys)


def block_dropout(seeds: UInt32[Array, 'batch 2'], rate: float, path: tuple[str, ...]) -> Dropout:
    """Returns the dropout of one block.

    Args:
      seeds: from `dropout_seeds`.
      rate: as `Dropout.rate`.
      path: the names of the module and its parents; each module drops other elements.
    """
    return Dropout(seeds ^ jnp.uint32(zlib.crc32('/'.join(path).encode())), rate)
