"""Attention on Hopper (sm_90) as functions of arrays, using the kernels of `hopper_kernels`.

`hopper_plan.supports` says which shapes the kernels accept.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention import hopper_kernels as kernels
from pallas_kernels.attention.hopper_plan import Sizes, sizes


# Jitted, so that equal calls share one trace and one lowering; below too.
@functools.partial(jax.jit, static_argnames='num_heads')
def forward(
    qkv: Float[Array, 'batch tokens packed'], num_heads: int
) -> Float[Array, 'batch tokens channels']:
    """Returns the heads' outputs.

    Raises:
      ValueError: `hopper_plan.supports` refuses qkv; the message says why. Below too.
    """
    p = sizes(qkv, num_heads)
    results = jax.ShapeDtypeStruct((p.batch * p.tokens, p.heads * p.width), qkv.dtype)
    body = functools.partial(kernels.forward, p, False)
    out = kernels.launch(kernels.FORWARD, p, body, results, (_matrix(qkv),), held=1)
    return out.reshape(p.batch, p.tokens, -1)


@functools.partial(jax.jit, static_argnames='num_heads')
def forward_for_training(
    qkv: Float[Array, 'batch tokens packed'], num_heads: int
) -> tuple[
    Float[Array, 'batch tokens channels'],
    Float[Array, 'batch heads 2 tokens'],
    Float[Array, 'batch tokens channels'],
]:
    """Returns the outputs and, for `backward`, two float32 arrays: the two terms of the log-sum-exp
    (`hopper_kernels`), and the outputs again.
    """
    p = sizes(qkv, num_heads)
    matrix = (p.batch * p.tokens, p.heads * p.width)
    results = [
        jax.ShapeDtypeStruct(matrix, qkv.dtype),
        jax.ShapeDtypeStruct((p.batch, p.heads, 2, p.tokens), jnp.float32),
        jax.ShapeDtypeStruct(matrix, jnp.float32),
    ]
    body = functools.partial(kernels.forward, p, True)
    out, lse, exact = kernels.launch(kernels.FORWARD, p, body, results, (_matrix(qkv),), held=1)
    shape = (p.batch, p.tokens, -1)
    return out.reshape(shape), lse, exact.reshape(shape)


@jax.jit
def backward(
    qkv: Float[Array, 'batch tokens packed'],
    exact: Float[Array, 'batch tokens channels'],
    lse: Float[Array, 'batch heads 2 tokens'],
    grad: Float[Array, 'batch tokens channels'],
) -> Float[Array, 'batch tokens packed']:
    """Returns the gradient of qkv, given the gradient of the output.

    Args:
      exact, lse: from `forward_for_training`.
    """
    p = sizes(qkv, lse.shape[1])
    x, d = _matrix(qkv), _matrix(grad)
    delta = _delta(p, _matrix(exact), d)
    dqkv = kernels.launch(
        kernels.BACKWARD,
        p,
        functools.partial(kernels.backward, p),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        (x, d, lse, delta),
        held=2,
        roles=2,
    )
    return dqkv.reshape(qkv.shape)


def _delta(
    p: Sizes, exact: Float[Array, 'rows channels'], grad: Float[Array, 'rows channels']
) -> Float[Array, 'batch heads tokens']:
    """Returns Σ dO·O of each row, float32."""
    return kernels.launch(
        kernels.DELTA,
        p,
        functools.partial(kernels.delta, p),
        jax.ShapeDtypeStruct((p.batch, p.heads, p.tokens), jnp.float32),
        (exact, grad),
        held=0,
    )


def _matrix(x: Float[Array, 'batch tokens _']) -> Float[Array, 'rows _']:
    return x.reshape(-1, x.shape[-1])
