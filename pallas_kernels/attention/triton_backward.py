"""The backward kernels of attention in Triton; `triton` has the formulas and work division."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.attention.tiles import Tile
from pallas_kernels.attention.triton_head import (
    NN,
    NT,
    TN,
    Head,
    K,
    Q,
    V,
    head_blocks,
    launch,
    unpack,
)
from pallas_kernels.types import Index, Ref

BACKWARD = 'jaxunet_attention_backward'
BACKWARD_DQ = 'jaxunet_attention_backward_dq'
BACKWARD_DKV = 'jaxunet_attention_backward_dkv'


def _weights(head: Head, logits: Array, lse: tuple[Array, Array], keys: Array | None) -> Array:
    """Recomputes the softmax from the logits and the log-sum-exp; zero for padding.

    Args:
      keys: the mask of the keys that exist, broadcastable to the logits; None: all do.
    """
    largest, log_sum = lse
    weights = jnp.exp2((logits - largest) * head.scale2 - log_sum)
    return weights if keys is None else jnp.where(keys, weights, 0.0)


def _transposed_weights(
    head: Head, k: Array, q: Array, lse: tuple[Array, Array], keys: Array | None
) -> Array:
    """Returns Pᵀ for tiles of keys and queries. `keys`: the mask of the keys; None: all exist."""
    largest, log_sum = lse
    return _weights(
        head,
        head.dot(k, q, NT),
        (largest[None, :], log_sum[None, :]),
        None if keys is None else keys[:, None],
    )


def _dq_kernel(
    qkv_ref: Ref,
    out_ref: Ref,
    grad_ref: Ref,
    lse_ref: Ref,
    dqkv_ref: Ref,
    delta_ref: Ref,
    *,
    head: Head,
    tile: Tile,
) -> None:
    """Computes dq of a block of queries, and delta of each row for `_dkv_kernel`."""
    start = pl.program_id(0) * tile.queries
    q = head.read(qkv_ref, start, tile.queries, Q)
    grad = head.read(grad_ref, start, tile.queries)
    largest, log_sum = head.read_lse(lse_ref, start, tile.queries)
    # delta = Σ P·dP = Σ dO·O. Summing P·dP avoids the rounding error of O, which matters if one key
    # has nearly all the weight, but needs all keys at once.
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
            head.dot(q, k, NT),
            (largest[:, None], log_sum[:, None]),
            None if keys is None else keys[None, :],
        )
        dp = head.dot(grad, head.read(qkv_ref, first, tile.keys, V), NT)
        row_delta = jnp.sum(weights * dp, axis=1) if delta is None else delta
        if delta is None:
            head.write_row(delta_ref, start, row_delta)
        return dq + head.dot((weights * (dp - row_delta[:, None])).astype(head.dtype), k, NN)

    dq = head.loop(tile.keys, step, jnp.zeros((tile.queries, head.padded_width), jnp.float32))
    head.write(dqkv_ref, start, dq * head.scale, Q)


def _dkv_kernel(
    qkv_ref: Ref,
    grad_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    _: Ref,
    dqkv_ref: Ref,
    *,
    head: Head,
    tile: Tile,
) -> None:
    """Computes dk and dv of a block of keys, or only one of them with `tile.split` = 2.

    The logits are computed transposed, so that Pᵀ and dSᵀ can be operands of the products without a
    transpose.
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
            lse = head.read_lse(lse_ref, first, tile.queries)
            weights = _transposed_weights(head, k, q, lse, keys)
            found = {}
            if V in slots:
                found['dv'] = sums['dv'] + head.dot(weights.astype(head.dtype), grad, NN)
            if v is not None:
                delta = head.read_row(delta_ref, first, tile.queries)
                ds = (weights * (head.dot(v, grad, NT) - delta[None, :])).astype(head.dtype)
                found['dk'] = sums['dk'] + head.dot(ds, q, NN)
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
    qkv_ref: Ref, grad_ref: Ref, lse_ref: Ref, dqkv_ref: Ref, *, head: Head, tile: Tile
) -> None:
    """Computes dq, dk and dv of one head; the program holds all its keys and values."""
    k, v = (head.read(qkv_ref, 0, tile.keys, slot) for slot in (K, V))
    keys = head.valid(0, tile.keys)

    def step(first: Index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = carry
        q = head.read(qkv_ref, first, tile.queries, Q)
        grad = head.read(grad_ref, first, tile.queries)
        lse = head.read_lse(lse_ref, first, tile.queries)
        weights = _transposed_weights(head, k, q, lse, keys)
        dv = dv + head.dot(weights.astype(head.dtype), grad, NN)
        dp = head.dot(v, grad, NT)
        ds = (weights * (dp - jnp.sum(weights * dp, axis=0)[None, :])).astype(head.dtype)
        dk = dk + head.dot(ds, q, NN)
        head.write(dqkv_ref, first, head.dot(ds, k, TN) * head.scale, Q)
        return dk, dv

    zero = jnp.zeros((tile.keys, head.padded_width), jnp.float32)
    dk, dv = head.loop(tile.queries, step, (zero, zero))
    head.write(dqkv_ref, 0, dk * head.scale, K)
    head.write(dqkv_ref, 0, dv, V)


def wants_exact(tile: Tile | tuple[Tile, Tile], tokens: int, dtype: DTypeLike) -> bool:
    """Returns True if `backward` needs the outputs in float32.

    It does if it computes Σ p·dp from 16-bit outputs: if one key has most of the weight, their
    rounding error is large relative to the result.
    """
    return not isinstance(tile, Tile) and tile[0].keys < tokens and jnp.dtype(dtype) != jnp.float32


@functools.partial(jax.jit, static_argnames=('tile', 'interpret'))
def backward(
    qkv: Float[Array, 'batch tokens packed'],
    out: Float[Array, 'batch tokens channels'],
    lse: Float[Array, 'batch heads 2 tokens'],
    grad: Float[Array, 'batch tokens channels'],
    tile: Tile | tuple[Tile, Tile],
    *,
    interpret: bool = False,
) -> Float[Array, 'batch tokens packed']:
    """Returns the gradient of qkv, given the gradient of the output.

    Args:
      out, lse: what `triton.forward` returned for `backward`.
      tile: one kernel's tile, or the tiles of two kernels (dq; dk and dv).

    Raises:
      ValueError: as `triton.forward`, or a one-kernel tile that does not hold all keys.
    """
    num_heads = lse.shape[1]
    parts, width = unpack(qkv, num_heads)
    batch, tokens, *_ = parts.shape
    head = Head(tokens, width, qkv.dtype, interpret)
    out, grad = (x.reshape(batch, tokens, num_heads, width) for x in (out, grad))
    if isinstance(tile, Tile):
        dqkv = _backward_in_one_kernel(parts, grad, lse, tile, head)
    else:
        dqkv = _backward_in_two_kernels(parts, out, grad, lse, tile, head)
    return dqkv.reshape(qkv.shape)


# The operands below are split by heads: `parts` is (batch, tokens, 3, heads, width), `out` and
# `grad` are (batch, tokens, heads, width).
def _backward_in_one_kernel(parts: Array, grad: Array, lse: Array, tile: Tile, head: Head) -> Array:
    batch, tokens, _, num_heads, width = parts.shape
    if tile.keys < tokens:
        raise ValueError(
            f'attention: tile keys={tile.keys}: the one-kernel backward holds all {tokens} tokens'
        )
    packed, single, lse_spec, _ = head_blocks(
        max(tile.keys, pl.cdiv(tokens, tile.queries) * tile.queries), width
    )
    return launch(
        functools.partial(_backward_kernel, head=head, tile=tile),
        BACKWARD,
        (1, num_heads, batch),
        tile,
        head.interpret,
        in_specs=[packed, single, lse_spec],
        out_specs=packed,
        out_shape=jax.ShapeDtypeStruct(parts.shape, parts.dtype),
    )(parts, grad, lse)


def _backward_in_two_kernels(
    parts: Array, out: Array, grad: Array, lse: Array, tiles: tuple[Tile, Tile], head: Head
) -> Array:
    batch, tokens, _, num_heads, width = parts.shape
    dqkv = jax.ShapeDtypeStruct(parts.shape, parts.dtype)
    dq_tile, dkv_tile = tiles
    rows = max(pl.cdiv(tokens, n) * n for t in tiles for n in (t.queries, t.keys))
    packed, single, lse_spec, delta_spec = head_blocks(rows, width)
    with_dq, delta = launch(
        functools.partial(_dq_kernel, head=head, tile=dq_tile),
        BACKWARD_DQ,
        (pl.cdiv(tokens, dq_tile.queries), num_heads, batch),
        dq_tile,
        head.interpret,
        in_specs=[packed, single, single, lse_spec],
        out_specs=[packed, delta_spec],
        out_shape=[dqkv, jax.ShapeDtypeStruct((batch, num_heads, tokens), jnp.float32)],
    )(parts, out, grad, lse)
    # The second kernel writes the other two thirds (dk, dv) of the same array.
    return launch(
        functools.partial(_dkv_kernel, head=head, tile=dkv_tile),
        BACKWARD_DKV,
        (pl.cdiv(tokens, dkv_tile.keys) * dkv_tile.split, num_heads, batch),
        dkv_tile,
        head.interpret,
        in_specs=[packed, single, lse_spec, delta_spec, packed],
        out_specs=packed,
        out_shape=dqkv,
        input_output_aliases={4: 0},
    )(parts, grad, lse, delta, with_dq)
