"""The functional ops with named operands, for their tests on every backend."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxunet.ops import functional as kernels
from jaxunet.ops.dropout import Dropout

IMAGE, TOKENS = (8, 2, 2, 8), (8, 3, 24)
# The operands with a batch in front; the others are weights.
BATCHED = {
    'x': IMAGE,
    'part': IMAGE,
    'residual': IMAGE,
    'tokens': TOKENS,
    'rows': (8, 8),
    'short': (8, 3, 8),
    'seeds': (8, 2),
}
WEIGHTS = {
    'kernel': (3, 3, 8, 8),
    'wide': (3, 3, 16, 8),
    'scale': (16,),
    'offset': (16,),
    'bias': (8,),
    'shortcut': (8, 8),
    'matrix': (24, 8),
}


def dropped(x: jax.Array, rows: jax.Array, bias: jax.Array, seeds: jax.Array, *, backend: str):
    """GroupNorm with dropout, whose seeds are the bits of floating-point numbers."""
    words = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(seeds), jnp.uint32)
    return kernels.group_norm(
        x, rows, bias, groups=2, silu=True, dropout=Dropout(words, 0.25), backend=backend
    )


OPS: dict[str, tuple[tuple[str, ...], Callable[..., jax.Array]]] = {
    'conv3x3': (('x', 'kernel', 'rows'), kernels.conv3x3),
    'upsample_conv3x3': (('x', 'kernel', 'rows'), kernels.upsample_conv3x3),
    'norm_silu_conv3x3': (
        ('x', 'part', 'scale', 'offset', 'wide', 'bias', 'residual', 'shortcut'),
        lambda x, part, *weights, backend: kernels.norm_silu_conv3x3(
            [x, part],
            *weights[:4],
            residual=weights[4],
            shortcut=weights[5],
            groups=4,
            backend=backend,
        ),
    ),
    'group_norm': (
        ('x', 'rows', 'bias'),
        lambda *a, backend: kernels.group_norm(*a, groups=2, silu=True, backend=backend),
    ),
    'group_norm with dropout': (('x', 'rows', 'bias', 'seeds'), dropped),
    'attention': (
        ('tokens',),
        lambda qkv, backend: kernels.attention(qkv, num_heads=2, backend=backend),
    ),
    'linear': (
        ('tokens', 'matrix', 'bias', 'short'),
        lambda *a, backend: kernels.linear(*a[:3], residual=a[3], backend=backend),
    ),
    'project': (
        ('rows', 'shortcut', 'bias'),
        lambda x, kernel, bias, backend: jnp.concatenate(
            kernels.project(x, [kernel, kernel[:, :3]], [bias, bias[:3]], backend=backend), axis=1
        ),
    ),
}
CUDA = pytest.param('cuda', marks=pytest.mark.extension)
WITH_ADAMW = ['xla', CUDA]
