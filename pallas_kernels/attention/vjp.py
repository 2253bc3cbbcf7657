"""Multi-head self-attention on the packed qkv projection: the Pallas kernels, differentiable."""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from jaxunet.ops.attention import reference
from jaxunet.ops.attention.operands import check_kernel_operands
from pallas_kernels.attention import dispatch
from pallas_kernels.checks import check_not_empty, check_shard_map


def attention(
    qkv: Float[Array, 'batch tokens packed'], *, num_heads: int
) -> Float[Array, 'batch tokens channels']:
    """softmax(q·kᵀ/√d)·v for each head; see `jaxunet.ops.attention.reference.attention`, which runs
    the calls that the kernels do not take.

    Logits, softmax and sums are in float32. Differentiable once in reverse mode; the backward pass
    recomputes the weights from the saved log-sum-exp. `hopper_kernels` explains the algorithm.

    Args:
      qkv: for the kernels, bfloat16 or float16, a multiple of 64 tokens, heads of width 32 or 64.

    Raises:
      ValueError: channels that the heads do not divide, heads wider than 256, another type than
        the vocabulary's, no samples or tokens, more queries than the kernels accept, or a checked
        `shard_map`.
      UserError: the kernels do not run here.
    """
    check_shard_map('attention')
    check_kernel_operands(qkv, num_heads)
    check_not_empty('attention', 'qkv', qkv)
    if not dispatch.supports(qkv, num_heads):
        return reference.attention(qkv, num_heads=num_heads)
    return _attention(qkv, num_heads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(qkv: Array, num_heads: int) -> Array:
    return dispatch.forward(qkv, num_heads)


def _forward(qkv: Array, num_heads: int) -> tuple[Array, dispatch.Kept]:
    return dispatch.forward_for_training(qkv, num_heads)


def _backward(num_heads: int, kept: dispatch.Kept, grad: Array) -> tuple[Array]:
    del num_heads
    return (dispatch.backward(kept, grad),)


_attention.defvjp(_forward, _backward)
