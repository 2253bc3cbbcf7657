"""Multi-head self-attention on the packed qkv projection: the Pallas kernels, differentiable."""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from jaxunet.ops.attention.operands import check_kernel_operands
from jaxunet.ops.checks import MAX_SAMPLES, check_count
from pallas_kernels.attention import dispatch
from pallas_kernels.attention.tiles import Tiles
from pallas_kernels.checks import check_not_empty, check_shard_map


def attention(
    qkv: Float[Array, 'batch tokens packed'],
    *,
    num_heads: int,
    interpret: bool = False,
    tiles: Tiles | None = None,
) -> Float[Array, 'batch tokens channels']:
    """softmax(q·kᵀ/√d)·v for each head; see `jaxunet.ops.attention.reference.attention`.

    Logits, softmax and sums are in float32. Differentiable once in reverse mode; the backward pass
    recomputes the weights from the saved log-sum-exp. `pallas_kernels.attention.triton` explains
    the algorithm.

    Args:
      qkv: bfloat16, float16 or float32; any number of tokens; heads of width 1 to 256. Widths that
        are powers of two from 16 on run without padding.
      interpret: run the Triton kernels on a CPU, slowly, for tests.
      tiles: run the Triton kernels on these tiles, for tuning; None: `dispatch.choose` chooses.

    Raises:
      ValueError: channels that the heads do not divide, heads wider than 256, another type, no
        samples or tokens, more samples, heads or queries than the kernels accept, or a checked
        `shard_map`.
      UserError: this version of JAX lacks what the kernels need.
    """
    check_shard_map('attention')
    check_kernel_operands(qkv, num_heads)
    check_not_empty('attention', 'qkv', qkv)
    for unit, count in (('samples', qkv.shape[0]), ('heads', num_heads)):  # the grid's z and y
        check_count('attention', 'qkv', unit, count, MAX_SAMPLES)
    return _attention(
        qkv, num_heads, interpret, tiles or dispatch.choose(qkv, num_heads, interpret=interpret)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _attention(qkv: Array, num_heads: int, interpret: bool, tiles: Tiles | None) -> Array:
    return dispatch.forward(qkv, num_heads, tiles, interpret=interpret)


def _forward(
    qkv: Array, num_heads: int, interpret: bool, tiles: Tiles | None
) -> tuple[Array, dispatch.Kept]:
    return dispatch.forward_for_training(qkv, num_heads, tiles, interpret=interpret)


def _backward(
    num_heads: int, interpret: bool, tiles: Tiles | None, kept: dispatch.Kept, grad: Array
) -> tuple[Array]:
    del num_heads
    return (dispatch.backward(kept, grad, tiles, interpret=interpret),)


_attention.defvjp(_forward, _backward)
