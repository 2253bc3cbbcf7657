"""Multi-head self-attention on the packed qkv projection: Triton kernels (sm_80 and later).

FlashAttention: Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4; Dao 2023, arXiv 2307.08691,
§3.1. `tiles` chooses the tiles, and one or two kernels for the backward pass.

Forward, O = softmax(Q·Kᵀ/√d)·V: a program owns a block of queries of one head (grid: query blocks ×
heads × batch). It iterates over blocks of keys, keeps the largest logit and the sum of weights of
each row so far, and rescales its float32 accumulator when the largest logit grows. Triton pipelines
the loads of K and V over `stages` steps.

Backward recomputes the weights P from the saved log-sum-exp of each row. With dO the gradient of O:

    dP = dO·Vᵀ,  delta = Σ P·dP = Σ dO·O over each row,  dS = P·(dP − delta),
    dV = Pᵀ·dO,  dK = dSᵀ·Q/√d,  dQ = dS·K/√d

Short sequences take one kernel: a program holds all keys of a head and iterates over blocks of
queries. Longer ones take two:

    kernel         a program owns    walks over    reads (and lse)   writes
    backward       all keys          queries       q, k, v, dO       dq, dk, dv
    backward_dq    queries           keys          q, k, v, O, dO    dq, delta
    backward_dkv   keys              queries       q, k, v, dO,      dk, dv (split = 2: one
                                                   delta             of them)

Exponents have base two, and the scale 1/√d is applied to the float32 logits. The log-sum-exp (lse)
is kept as its two terms, the largest logit q·k and log₂ Σ 2^(logit − largest): their sum would lose
precision if logits are large.

Arrays keep the projection's layout, (batch, tokens, 3, heads, width): every kernel reads q, k and
v, and writes dq, dk and dv, in place, without transposes. Each result is written by one program, so
results are identical from run to run.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.attention.tiles import Tile
from pallas_kernels.attention.triton_head import (
    LARGEST,
    LOG_SUM,
    NN,
    NT,
    Head,
    K,
    Q,
    V,
    head_blocks,
    launch,
    unpack,
)
from pallas_kernels.types import Index, Ref

FORWARD = 'jaxunet_attention_forward'


def _forward_kernel(
    qkv_ref: Ref, out_ref: Ref, lse_ref: Ref, *exact_ref: Ref, head: Head, tile: Tile
) -> None:
    """Computes the outputs of a block of queries, and their log-sum-exp."""
    start = pl.program_id(0) * tile.queries
    q = head.read(qkv_ref, start, tile.queries, Q)

    def step(first: Index, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, largest, row_sum = carry
        logits = head.dot(q, head.read(qkv_ref, first, tile.keys, K), NT)
        valid = head.valid(first, tile.keys)
        if valid is not None:
            logits = jnp.where(valid[None, :], logits, -jnp.inf)
        new_largest = jnp.maximum(largest, jnp.max(logits, axis=1))
        weights = jnp.exp2((logits - new_largest[:, None]) * head.scale2)
        rescale = jnp.exp2((largest - new_largest) * head.scale2)
        row_sum = row_sum * rescale + jnp.sum(weights, axis=1)
        v = head.read(qkv_ref, first, tile.keys, V)
        return (
            out * rescale[:, None] + head.dot(weights.astype(head.dtype), v, NN),
            new_largest,
            row_sum,
        )

    carry = (
        jnp.zeros((tile.queries, head.padded_width), jnp.float32),
        jnp.full((tile.queries,), -jnp.inf, jnp.float32),
        jnp.zeros((tile.queries,), jnp.float32),
    )
    out, largest, row_sum = head.loop(tile.keys, step, carry)
    out = out / row_sum[:, None]
    for ref in (out_ref, *exact_ref):
        head.write(ref, start, out)
    head.write_row(lse_ref, start, largest, LARGEST)
    head.write_row(lse_ref, start, jnp.log2(row_sum), LOG_SUM)


# Jitted, so that equal calls share one trace and one lowering.
@functools.partial(jax.jit, static_argnames=('num_heads', 'tile', 'exact', 'interpret'))
def forward(
    qkv: Float[Array, 'batch tokens packed'],
    num_heads: int,
    tile: Tile,
    *,
    exact: bool = False,
    interpret: bool = False,
) -> tuple[
    Float[Array, 'batch tokens channels'],
    Float[Array, 'batch heads 2 tokens'],
    Float[Array, 'batch tokens channels'],
]:
    """Runs the forward kernel.

    Args:
      exact: return the outputs for `backward` in float32, see `triton_backward.wants_exact`.

    Returns: the heads' outputs; the two terms of the base-two log-sum-exp of each row of logits,
      float32; the outputs for `backward`, which without `exact` are the same array.

    Raises:
      ValueError: channels that the heads do not divide, heads wider than 256, or another type.
    """
    parts, width = unpack(qkv, num_heads)
    batch, tokens, *_ = parts.shape
    blocks = pl.cdiv(tokens, tile.queries)
    packed, single, lse_spec, _ = head_blocks(
        max(blocks * tile.queries, pl.cdiv(tokens, tile.keys) * tile.keys), width
    )
    shape = (batch, tokens, num_heads, width)
    results = [
        jax.ShapeDtypeStruct(shape, qkv.dtype),
        jax.ShapeDtypeStruct((batch, num_heads, 2, tokens), jnp.float32),
    ]
    out, lse, *kept = launch(
        functools.partial(
            _forward_kernel, head=Head(tokens, width, qkv.dtype, interpret), tile=tile
        ),
        FORWARD,
        (blocks, num_heads, batch),
        tile,
        interpret,
        in_specs=[packed],
        out_specs=[single, lse_spec, *([single] if exact else [])],
        out_shape=[*results, *([jax.ShapeDtypeStruct(shape, jnp.float32)] if exact else [])],
    )(parts)
    flat = (batch, tokens, num_heads * width)
    return out.reshape(flat), lse, (kept[0] if exact else out).reshape(flat)
