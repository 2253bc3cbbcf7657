"""The group_norm ops as functions of named inputs, for parity tests of every backend."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from jaxunet.ops.activation import Activation
from jaxunet.ops.dropout import Dropout
from jaxunet.ops.group_norm.cases import Case
from jaxunet.ops.group_norm.operands import Norm
from support.parity import draw


def inputs(case: Case, dtype: str, batch: int):
    found = {
        f'x{i}': (draw((batch, case.height, case.width, c), dtype, offset=case.mean), dtype)
        for i, c in enumerate(case.parts)
    }
    affine = (batch if case.per_sample else 1, case.channels)
    return found | {
        'scale': (draw(affine, 'float32', offset=1.0), 'float32'),
        'offset': (draw(affine, 'float32'), 'float32'),
    }


@functools.cache
def with_dropout(group_norm, rate: float):
    """Returns the op with dropout from fixed seeds, the same for every backend and type."""

    def call(x: Activation, norm: Norm, **options):
        words = np.random.default_rng(0).integers(2**32, size=(x.parts[0].shape[0], 2))
        dropout = Dropout(jnp.asarray(words.astype(np.uint32)), rate)
        return group_norm(x, norm, dropout=dropout, **options)

    return call


@functools.cache  # so that equal references are known to be equal
def op(group_norm, case: Case, **options):
    """Returns the op as a function of named arrays."""

    def call(**arrays):
        x = Activation(tuple(arrays[f'x{i}'] for i in range(len(case.parts))))
        norm = Norm(arrays['scale'], arrays['offset'], case.groups)
        return group_norm(x, norm, silu=case.silu, **options)

    return call
