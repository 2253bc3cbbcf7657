"""Multi-head self-attention on the packed qkv projection: Triton kernels (sm_80 and later).

FlashAttention: Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4; Dao 2023, arXiv 2307.08691,
§3.1.

Forward: a program owns a block of queries of one head (grid: query blocks × heads × batch). It
walks over blocks of keys, keeps the largest logit and the sum of weights of each row so far, and
rescales its float32 accumulator when the largest logit grows. Triton pipelines the loads of K and V
over `stages` steps.

Backward recomputes the weights from the saved log-sum-exp of each row. Short sequences take one
kernel: a program holds all keys of a head and walks over blocks of queries. Longer ones take two:
one whose programs own queries and write dq, one whose programs own keys and write dk and dv.

Exponents have base two, and the scale 1/√d is applied to the float32 logits. The log-sum-exp is
kept as its two terms, the largest logit q·k and log₂ Σ 2^(logit − largest): their sum would lose
digits where logits are large.

Arrays keep the projection's layout, (batch, tokens, 3, heads, width): every kernel reads q, k and
v, and writes dq, dk and dv, in place, without transposes. Each result is written by one program, so
results are identical from run to run.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxunet.ops.attention.operands import check_kernel_operands
from pallas_kernels.attention.tiles import Tile
from pallas_kernels.attention.triton_head import (
    COLUMNS,
    PLAIN,
    ROWS,
    TOP,
    TOTAL,
    Head,
    K,
    Q,
    V,
    head_blocks,
    launch,
)
from pallas_kernels.types import Index, Ref

FORWARD = 'jaxunet_attention_forward'
BACKWARD = 'jaxunet_attention_backward'
BACKWARD_DQ = 'jaxunet_attention_backward_dq'
BACKWARD_DKV = 'jaxunet_attention_backward_dkv'


def _forward_kernel(
    qkv_ref: Ref, out_ref: Ref, norm_ref: Ref, *exact_ref: Ref, head: Head, tile: Tile
) -> None:
    """Computes the outputs of a block of queries, and their log-sum-exp."""
    start = pl.program_id(0) * tile.queries
    q = head.read(qkv_ref, start, tile.queries, Q)

    def step(first: Index, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, top, total = carry
        logits = head.dot(q, head.read(qkv_ref, first, tile.keys, K), ROWS)
        valid = head.valid(first, tile.keys)
        if valid is not None:
            logits = jnp.where(valid[None, :], logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        weights = jnp.exp2((logits - new_top[:, None]) * head.scale2)
        shrink = jnp.exp2((top - new_top) * head.scale2)
        total = total * shrink + jnp.sum(weights, axis=1)
        v = head.read(qkv_ref, first, tile.keys, V)
        return (
            out * shrink[:, None] + head.dot(weights.astype(head.dtype), v, PLAIN),
            new_top,
            total,
        )

    carry = (
        jnp.zeros((tile.queries, head.padded_width), jnp.float32),
        jnp.full((tile.queries,), -jnp.inf, jnp.float32),
        jnp.zeros((tile.queries,), jnp.float32),
    )
    out, top, total = head.loop(tile.keys, step, carry)
    out = out / total[:, None]
    for ref in (out_ref, *exact_ref):
        head.write(ref, start, out)
    head.write_row(norm_ref, start, top, TOP)
    head.write_row(norm_ref, start, jnp.log2(total), TOTAL)


def _weights(head: Head, logits: Array, norm: tuple[Array, Array], keys: Array | None) -> Array:
    """Recomputes the softmax from the logits and the log-sum-exp; zero for padding.

    Args:
      keys: the mask of the keys that exist, broadcastable to the logits; None: all do.
    """
    top, total = norm
    weights = jnp.exp2((logits - top) * head.scale2 - total)
    return weights if keys is None else jnp.where(keys, weights, 0.0)


def _dq_kernel(
    qkv_ref: Ref,
    out_ref: Ref,
    grad_ref: Ref,
    norm_ref: Ref,
    dqkv_ref: Ref,
    delta_ref: Ref,
    *,
    head: Head,
    tile: Tile,
) -> None:
    """Computes dq of a block of queries, and delta = Σ p·dp of each row for the other kernel."""
    start = pl.program_id(0) * tile.queries
    q = head.read(qkv_ref, start, tile.queries, Q)
    grad = head.read(grad_ref, start, tile.queries)
    top, total = head.read_norm(norm_ref, start, tile.queries)
    # Σ p·dp = Σ dO·O. Summing p·dp itself avoids the rounding of O, which matters where one key has
    # nearly all the weight, but needs all keys at once.
    delta = None
    if head.tokens > tile.keys:
        out = head.read(out_ref, start, tile.queries)
        delta = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=1)
        head.write_row(delta_ref, start, delta)

    def step(first: Index, dq: Array) -> Array:
        k = head.read(qkv_ref, first, tile.keys, K)
        keys = head.valid(first, tile.keys)
        weights = _weights(
            head,
            head.dot(q, k, ROWS),
            (top[:, None], total[:, None]),
            None if keys is None else keys[None, :],
        )
        slope = head.dot(grad, head.read(qkv_ref, first, tile.keys, V), ROWS)
        row = jnp.sum(weights * slope, axis=1) if delta is None else delta
        if delta is None:
            head.write_row(delta_ref, start, row)
        return dq + head.dot((weights * (slope - row[:, None])).astype(head.dtype), k, PLAIN)

    dq = head.loop(tile.keys, step, jnp.zeros((tile.queries, head.padded_width), jnp.float32))
    head.write(dqkv_ref, start, dq * head.scale, Q)


def _dkv_kernel(
    qkv_ref: Ref,
    grad_ref: Ref,
    norm_ref: Ref,
    delta_ref: Ref,
    _: Ref,
    dqkv_ref: Ref,
    *,
    head: Head,
    tile: Tile,
) -> None:
    """Computes dk and dv of a block of keys, or with `tile.split` = 2 one of them.

    The logits are computed transposed, so that the weights enter the products as they are.
    """
    program = pl.program_id(0)
    start = (program if tile.split == 1 else lax.div(program, 2)) * tile.keys

    def compute(slots: tuple[np.int32, ...]) -> None:
        k = head.read(qkv_ref, start, tile.keys, K)
        v = head.read(qkv_ref, start, tile.keys, V) if K in slots else None
        keys = head.valid(start, tile.keys)

        def step(first: Index, sums: dict[str, Array]) -> dict[str, Array]:
            q = head.read(qkv_ref, first, tile.queries, Q)
            grad = head.read(grad_ref, first, tile.queries)
            top, total = head.read_norm(norm_ref, first, tile.queries)
            weights = _weights(
                head,
                head.dot(k, q, ROWS),
                (top[None, :], total[None, :]),
                None if keys is None else keys[:, None],
            )
            found = {}
            if V in slots:
                found['dv'] = sums['dv'] + head.dot(weights.astype(head.dtype), grad, PLAIN)
            if v is not None:
                delta = head.read_row(delta_ref, first, tile.queries)
                slope = (weights * (head.dot(v, grad, ROWS) - delta[None, :])).astype(head.dtype)
                found['dk'] = sums['dk'] + head.dot(slope, q, PLAIN)
            return found

        zero = jnp.zeros((tile.keys, head.padded_width), jnp.float32)
        sums = head.loop(
            tile.queries,
            step,
            {name: zero for name, slot in (('dk', K), ('dv', V)) if slot in slots},
        )
        if 'dk' in sums:
            head.write(dqkv_ref, start, sums['dk'] * head.scale, K)
        if 'dv' in sums:
            head.write(dqkv_ref, start, sums['dv'], V)

    if tile.split == 1:
        compute((K, V))
    else:
        pl.when(lax.rem(program, 2) == 0)(lambda: compute((K,)))
        pl.when(lax.rem(program, 2) == 1)(lambda: compute((V,)))


def _backward_kernel(
    qkv_ref: Ref, grad_ref: Ref, norm_ref: Ref, dqkv_ref: Ref, *, head: Head, tile: Tile
) -> None:
    """Computes dq, dk and dv of one head; the program holds all its keys and values."""
    k, v = (head.read(qkv_ref, 0, tile.keys, slot) for slot in (K, V))
    keys = head.valid(0, tile.keys)

    def step(first: Index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = carry
        q = head.read(qkv_ref, first, tile.queries, Q)
        grad = head.read(grad_ref, first, tile.queries)
        top, total = head.read_norm(norm_ref, first, tile.queries)
        weights = _weights(
            head,
            head.dot(k, q, ROWS),
            (top[None, :], total[None, :]),
            None if keys is None else keys[:, None],
        )
        dv = dv + head.dot(weights.astype(head.dtype), grad, PLAIN)
        slope = head.dot(v, grad, ROWS)
        slope = (weights * (slope - jnp.sum(weights * slope, axis=0)[None, :])).astype(head.dtype)
        dk = dk + head.dot(slope, q, PLAIN)
        head.write(dqkv_ref, first, head.dot(slope, k, COLUMNS) * head.scale, Q)
        return dk, dv

    zero = jnp.zeros((tile.keys, head.padded_width), jnp.float32)
    dk, dv = head.loop(tile.queries, step, (zero, zero))
    head.write(dqkv_ref, 0, dk * head.scale, K)
    head.write(dqkv_ref, 0, dv, V)


def _unpack(qkv: Array, num_heads: int) -> tuple[Array, int]:
    """Returns qkv as (batch, tokens, 3, heads, width), the same bytes; and the width."""
    width = check_kernel_operands(qkv, num_heads)
    return qkv.reshape(*qkv.shape[:2], 3, num_heads, width), width


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
      exact: return the outputs for `backward` in float32, see `wants_exact`.

    Returns: the heads' outputs; the two terms of the log-sum-exp of each row of logits, base two,
      float32; the outputs for `backward`, which without `exact` are the outputs.

    Raises:
      ValueError: channels that the heads do not divide, heads wider than 256, or another type.
    """
    parts, width = _unpack(qkv, num_heads)
    batch, tokens, *_ = parts.shape
    blocks = pl.cdiv(tokens, tile.queries)
    packed, single, norm_spec, _ = head_blocks(
        max(blocks * tile.queries, pl.cdiv(tokens, tile.keys) * tile.keys), width
    )
    shape = (batch, tokens, num_heads, width)
    results = [
        jax.ShapeDtypeStruct(shape, qkv.dtype),
        jax.ShapeDtypeStruct((batch, num_heads, 2, tokens), jnp.float32),
    ]
    out, norm, *kept = launch(
        functools.partial(
            _forward_kernel, head=Head(tokens, width, qkv.dtype, interpret), tile=tile
        ),
        FORWARD,
        (blocks, num_heads, batch),
        tile,
        interpret,
        in_specs=[packed],
        out_specs=[single, norm_spec, *([single] if exact else [])],
        out_shape=[*results, *([jax.ShapeDtypeStruct(shape, jnp.float32)] if exact else [])],
    )(parts)
    flat = (batch, tokens, num_heads * width)
    return out.reshape(flat), norm, (kept[0] if exact else out).reshape(flat)


def wants_exact(tile: Tile | tuple[Tile, Tile], tokens: int, dtype: DTypeLike) -> bool:
    """Returns whether `backward` needs the outputs in float32.

    It does if it computes Σ p·dp from 16-bit outputs: where one key has most of the weight, their
    rounding is large relative to the result.
    """
    return not isinstance(tile, Tile) and tile[0].keys < tokens and jnp.dtype(dtype) != jnp.float32


@functools.partial(jax.jit, static_argnames=('tile', 'interpret'))
def backward(
    qkv: Float[Array, 'batch tokens packed'],
    out: Float[Array, 'batch tokens channels'],
    norm: Float[Array, 'batch heads 2 tokens'],
    grad: Float[Array, 'batch tokens channels'],
    tile: Tile | tuple[Tile, Tile],
    *,
    interpret: bool = False,
) -> Float[Array, 'batch tokens packed']:
    """Returns the gradient of qkv, given that of the output.

    Args:
      out, norm: what `forward` returned for `backward`.
      tile: one kernel's tile, or those of two kernels (dq; dk and dv).

    Raises:
      ValueError: as `forward`, or a one-kernel tile that does not hold all keys.
    """
    num_heads = norm.shape[1]
    parts, width = _unpack(qkv, num_heads)
    batch, tokens, *_ = parts.shape
    head = Head(tokens, width, qkv.dtype, interpret)
    out, grad = (x.reshape(batch, tokens, num_heads, width) for x in (out, grad))
    dqkv = jax.ShapeDtypeStruct(parts.shape, qkv.dtype)
    if isinstance(tile, Tile):
        if tile.keys < tokens:
            raise ValueError(
                f'attention: tile keys={tile.keys}: '
                f'the one-kernel backward holds all {tokens} tokens'
            )
        packed, single, norm_spec, _ = head_blocks(
            max(tile.keys, pl.cdiv(tokens, tile.queries) * tile.queries), width
        )
        return launch(
            functools.partial(_backward_kernel, head=head, tile=tile),
            BACKWARD,
            (1, num_heads, batch),
            tile,
            interpret,
            in_specs=[packed, single, norm_spec],
            out_specs=packed,
            out_shape=dqkv,
        )(parts, grad, norm).reshape(qkv.shape)

    first, second = tile
    rows = max(pl.cdiv(tokens, n) * n for t in tile for n in (t.queries, t.keys))
    packed, single, norm_spec, delta_spec = head_blocks(rows, width)
    with_dq, delta = launch(
        functools.partial(_dq_kernel, head=head, tile=first),
        BACKWARD_DQ,
        (pl.cdiv(tokens, first.queries), num_heads, batch),
        first,
        interpret,
        in_specs=[packed, single, single, norm_spec],
        out_specs=[packed, delta_spec],
        out_shape=[dqkv, jax.ShapeDtypeStruct((batch, num_heads, tokens), jnp.float32)],
    )(parts, out, grad, norm)
    # The second kernel writes the other two thirds (dk, dv) of the same array.
    return launch(
        functools.partial(_dkv_kernel, head=head, tile=second),
        BACKWARD_DKV,
        (pl.cdiv(tokens, second.keys) * second.split, num_heads, batch),
        second,
        interpret,
        in_specs=[packed, single, norm_spec, delta_spec, packed],
        out_specs=packed,
        out_shape=dqkv,
        input_output_aliases={4: 0},
    )(parts, grad, norm, delta, with_dq).reshape(qkv.shape)
