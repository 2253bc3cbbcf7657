"""Multi-head self-attention on the packed qkv projection: the Pallas kernels, differentiable."""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from jaxunet.ops.attention.operands import check_kernel_operands
from jaxunet.ops.checks import MAX_SAMPLES, check_count
from pallas_kernels.attention import triton, triton_backward
from pallas_kernels.attention.tiles import Tiles, default_tiles
from pallas_kernels.checks import check_shard_map


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
      interpret: run the kernels on a CPU, slowly, for tests.
      tiles: the tiles, for tuning; None takes `default_tiles`.

    Raises:
      ValueError: channels that the heads do not divide, heads wider than 256, another type, more
        samples, heads or queries than the kernels take, or a checked `shard_map`.
    """
    check_shard_map('attention')
    width = check_kernel_operands(qkv, num_heads)
    for unit, count in (('samples', qkv.shape[0]), ('heads', num_heads)):  # z and y of the grid
        check_count('attention', 'qkv', unit, count, MAX_SAMPLES)
    return _attention(
        qkv, num_heads, interpret, tiles or default_tiles(qkv.shape[1], width, qkv.dtype)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _attention(qkv: Array, num_heads: int, interpret: bool, tiles: Tiles) -> Array:
    return triton.forward(qkv, num_heads, tiles.forward, interpret=interpret)[0]


def _forward(
    qkv: Array, num_heads: int, interpret: bool, tiles: Tiles
) -> tuple[Array, tuple[Array, Array, Array]]:
    exact = triton_backward.wants_exact(tiles.backward, qkv.shape[1], qkv.dtype)
    out, lse, kept = triton.forward(qkv, num_heads, tiles.forward, exact=exact, interpret=interpret)
    return out, (qkv, kept, lse)


def _backward(
    num_heads: int, interpret: bool, tiles: Tiles, kept: tuple[Array, Array, Array], grad: Array
) -> tuple[Array]:
    del num_heads
    qkv, out, lse = kept
    return (triton_backward.backward(qkv, out, lse, grad, tiles.backward, interpret=interpret),)


_attention.defvjp(_forward, _backward)
