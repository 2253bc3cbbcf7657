"""Runs a command with dropout from JAX's generator in every block, as in commits up to 22e3724.

    python tests/support/earlier_dropout.py jaxunet.train FLAGS

A run that began with such a commit then continues with the numbers that it would have had.
"""

from __future__ import annotations

import runpy
import sys
import zlib

import jax
import jax.numpy as jnp

from jaxunet.model import blocks, encoder
from jaxunet.ops.dropout import Dropout
from jaxunet.ops.group_norm import reference


def block_dropout(words, rate, path):
    """Like `jaxunet.model.dropout.block_dropout`, but the words are those of a key per sample."""
    keys = jax.random.wrap_key_data(words)
    keys = jax.vmap(lambda key: jax.random.fold_in(key, zlib.crc32('/'.join(path).encode())))(keys)
    return Dropout(jax.random.key_data(keys), rate)


def drop(x, dropout):
    """Like `jaxunet.ops.dropout.drop`, with the keys of `block_dropout`."""
    keys, rate = jax.random.wrap_key_data(dropout.seeds), dropout.rate
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(keep, x * jnp.asarray(1 / (1 - rate), x.dtype), jnp.zeros((), x.dtype))


if __name__ == '__main__':
    encoder.dropout_seeds = jax.random.key_data
    blocks.block_dropout = block_dropout
    reference.drop = drop
    del sys.argv[0]
    del sys.path[0]  # the folder of this file
    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
