"""Multi-head self-attention on the packed qkv projection, Pallas through Triton (compute capability 8.0 and later).

FlashAttention: Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4; Dao 2023, arXiv 2307.08691, §3.1. Exponents are base two, and the
scale 1/√d is applied to the float32 logits. Only the log-sum-exp of each row is kept for the backward pass, which recomputes the weights;
it is kept as its two terms, the largest logit q·k and log₂ Σ 2^(logit − largest), as their sum would lose digits where logits are large.

Arrays keep the projection's layout, (batch, tokens, 3, heads, width): every kernel reads q, k and v where they are, and writes dq, dk and
dv where the projection's gradient wants them. Each result is written by one program, so results are identical from run to run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.attention.tiles import Tile, power_of_two

FORWARD = 'jaxunet_attention_forward'
BACKWARD = 'jaxunet_attention_backward'
BACKWARD_DQ = 'jaxunet_attention_backward_dq'
BACKWARD_DKV = 'jaxunet_attention_backward_dkv'
DTYPES = ('bfloat16', 'float16', 'float32')
Q, K, V = (
    np.int32(slot) for slot in range(3)
)  # NumPy's, as the interpreter cannot index with a plain int
TOP, TOTAL = (np.int32(slot) for slot in range(2))
ROWS, COLUMNS = (
    ((1,), (1,)),
    ((0,), (0,)),
)  # contract both operands' columns (a·bᵀ), or both operands' rows (aᵀ·b)
PLAIN = ((1,), (0,))  # a·b


class _Head:
    """The arithmetic that all kernels share: what is padding, how rows are read and written, how the logits are scaled."""

    def __init__(self, tokens: int, width: int, dtype: Any, interpret: bool):
        self.tokens, self.width, self.padded_width = tokens, width, power_of_two(width)
        self.dtype = dtype
        self.scale = width**-0.5
        self.scale2 = self.scale * math.log2(math.e)
        # Single tf32 products would lose float32's accuracy; three of them keep it. bfloat16 products are exact in float32.
        self.precision: Any = lax.Precision.DEFAULT
        if dtype == jnp.float32:
            self.precision = (
                lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
            )

    def dot(self, a: Array, b: Array, contract: Any) -> Array:
        return lax.dot_general(
            a, b, (contract, ((), ())), precision=self.precision, preferred_element_type=jnp.float32
        )

    def valid(self, start: Any, rows: int) -> Array | None:
        """Which of these rows are tokens; None where all are, which costs nothing."""
        return start + lax.iota(jnp.int32, rows) < self.tokens if self.tokens % rows else None

    def mask(self, start: Any, rows: int) -> Array | None:
        valid = self.valid(start, rows)
        mask = (
            None if valid is None else lax.broadcast_in_dim(valid, (rows, self.padded_width), (0,))
        )
        if self.width != self.padded_width:
            columns = lax.broadcasted_iota(jnp.int32, (rows, self.padded_width), 1) < self.width
            mask = columns if mask is None else mask & columns
        return mask

    def read(self, ref: Any, start: Any, rows: int, *slot: np.int32) -> Array:
        """Rows of a head, zero beyond its tokens and its width."""
        mask = self.mask(start, rows)
        part = ref.at[(pl.ds(start, rows), *slot, slice(None))]
        return plgpu.load(part) if mask is None else plgpu.load(part, mask=mask, other=0.0)

    def read_row(
        self, ref: Any, start: Any, rows: int, *slot: np.int32, other: float = 0.0
    ) -> Array:
        """One number a row: a term of the log-sum-exp, or delta."""
        mask = self.valid(start, rows)
        part = ref.at[(*slot, pl.ds(start, rows))]
        return plgpu.load(part) if mask is None else plgpu.load(part, mask=mask, other=other)

    def read_norm(self, ref: Any, start: Any, rows: int) -> tuple[Array, Array]:
        """Both terms of the log-sum-exp; ∞ where the query is padding, so that its weights are zero."""
        return self.read_row(ref, start, rows, TOP), self.read_row(
            ref, start, rows, TOTAL, other=math.inf
        )

    def write(self, ref: Any, start: Any, value: Array, *slot: np.int32) -> None:
        rows = value.shape[0]
        plgpu.store(
            ref.at[(pl.ds(start, rows), *slot, slice(None))],
            value.astype(ref.dtype),
            mask=self.mask(start, rows),
        )

    def write_row(self, ref: Any, start: Any, value: Array, *slot: np.int32) -> None:
        rows = value.shape[0]
        plgpu.store(ref.at[(*slot, pl.ds(start, rows))], value, mask=self.valid(start, rows))

    def loop(self, block: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """body(first row, carry) over all blocks of rows."""
        steps = pl.cdiv(self.tokens, block)
        if steps == 1:
            return body(0, carry)
        return lax.fori_loop(0, steps, lambda i, c: body(i * block, c), carry)


def _forward_kernel(
    qkv_ref: Any, out_ref: Any, norm_ref: Any, *exact_ref: Any, head: _Head, tile: Tile
) -> None:
    start = pl.program_id(0) * tile.queries
    q = head.read(qkv_ref, start, tile.queries, Q)

    def step(first: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
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


def _weights(head: _Head, logits: Array, norm: tuple[Array, Array], keys: Array | None) -> Array:
    """The softmax again, from the logits and the log-sum-exp; zero where the key or the query is padding."""
    top, total = norm
    weights = jnp.exp2((logits - top) * head.scale2 - total)
    return weights if keys is None else jnp.where(keys, weights, 0.0)


def _dq_kernel(
    qkv_ref: Any,
    out_ref: Any,
    grad_ref: Any,
    norm_ref: Any,
    dqkv_ref: Any,
    delta_ref: Any,
    *,
    head: _Head,
    tile: Tile,
) -> None:
    """dq of a block of queries, and delta = Σ p·dp of each of its rows for the other kernel."""
    start = pl.program_id(0) * tile.queries
    q = head.read(qkv_ref, start, tile.queries, Q)
    grad = head.read(grad_ref, start, tile.queries)
    top, total = head.read_norm(norm_ref, start, tile.queries)
    # Σ p·dp = Σ dO·O. Summing p·dp itself spares the rounding of O, which matters where one key has nearly all the weight, but
    # takes all keys at once.
    delta = None
    if head.tokens > tile.keys:
        out = head.read(out_ref, start, tile.queries)
        delta = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=1)
        head.write_row(delta_ref, start, delta)

    def step(first: Any, dq: Array) -> Array:
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
    qkv_ref: Any,
    grad_ref: Any,
    norm_ref: Any,
    delta_ref: Any,
    _: Any,
    dqkv_ref: Any,
    *,
    head: _Head,
    tile: Tile,
) -> None:
    """dk and dv of a block of keys, or one of them; the logits are computed transposed, so that the weights enter products as they are."""
    program = pl.program_id(0)
    start = (program if tile.split == 1 else lax.div(program, 2)) * tile.keys

    def compute(slots: tuple[np.int32, ...]) -> None:
        k = head.read(qkv_ref, start, tile.keys, K)
        v = head.read(qkv_ref, start, tile.keys, V) if K in slots else None
        keys = head.valid(start, tile.keys)

        def step(first: Any, sums: dict[str, Array]) -> dict[str, Array]:
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
    qkv_ref: Any, grad_ref: Any, norm_ref: Any, dqkv_ref: Any, *, head: _Head, tile: Tile
) -> None:
    """dq, dk and dv of one head whose keys and values one program holds."""
    k, v = (head.read(qkv_ref, 0, tile.keys, slot) for slot in (K, V))
    keys = head.valid(0, tile.keys)

    def step(first: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
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


def head_width(qkv: Array, num_heads: int) -> int:
    """The width of a head of these packed channels.

    Raises:
      ValueError: the heads do not divide the channels, or the kernels do not take their width or type.
    """
    packed = qkv.shape[-1]
    width, rest = divmod(packed, 3 * num_heads) if num_heads > 0 else (0, 0)
    if rest or not width:
        raise ValueError(f'attention: {packed} packed channels are not 3 x {num_heads} heads')
    if width > 256:
        raise ValueError(
            f'attention: heads of width {width}: the kernels take widths up to 256; use more heads, or the xla backend'
        )
    if qkv.dtype not in DTYPES:
        raise ValueError(
            f'attention: qkv of {qkv.dtype}: the kernels take {", ".join(DTYPES)}; cast it, or use the xla backend'
        )
    return width


def _unpack(qkv: Array, num_heads: int) -> tuple[Array, int]:
    """qkv as (batch, tokens, 3, heads, width), the same bytes; and the width."""
    width = head_width(qkv, num_heads)
    return qkv.reshape(*qkv.shape[:2], 3, num_heads, width), width


def _specs(rows: int, width: int) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Blocks that show a program its head whole: of the packed arrays, the outputs, the log-sum-exp and delta."""
    width = power_of_two(width)
    packed = pl.BlockSpec((None, rows, 3, None, width), lambda i, h, b: (b, 0, 0, h, 0))
    single = pl.BlockSpec((None, rows, None, width), lambda i, h, b: (b, 0, h, 0))
    norm = pl.BlockSpec((None, None, 2, rows), lambda i, h, b: (b, h, 0, 0))
    delta = pl.BlockSpec((None, None, rows), lambda i, h, b: (b, h, 0))
    return packed, single, norm, delta


def _call(
    kernel: Any, name: str, grid: tuple[int, ...], tile: Tile, interpret: bool, **kwargs: Any
) -> Callable[..., Any]:
    params = plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)
    return pl.pallas_call(
        kernel, name=name, grid=grid, interpret=interpret, compiler_params=params, **kwargs
    )


@functools.partial(
    jax.jit, static_argnames=('num_heads', 'tile', 'exact', 'interpret')
)  # equal calls share one trace and one lowering
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
    """The heads' outputs; of each row of logits the log-sum-exp, base two, in float32, as two terms; the outputs for `backward`.

    Args:
      exact: the outputs for `backward` are float32, see `wants_exact`; otherwise they are the outputs.

    Raises:
      ValueError: channels that the heads do not divide, heads wider than 256, or a type not in DTYPES.
    """
    parts, width = _unpack(qkv, num_heads)
    batch, tokens, *_ = parts.shape
    blocks = pl.cdiv(tokens, tile.queries)
    packed, single, norm_spec, _ = _specs(
        max(blocks * tile.queries, pl.cdiv(tokens, tile.keys) * tile.keys), width
    )
    shape = (batch, tokens, num_heads, width)
    results = [
        jax.ShapeDtypeStruct(shape, qkv.dtype),
        jax.ShapeDtypeStruct((batch, num_heads, 2, tokens), jnp.float32),
    ]
    out, norm, *kept = _call(
        functools.partial(
            _forward_kernel, head=_Head(tokens, width, qkv.dtype, interpret), tile=tile
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
    """Whether the backward pass takes Σ p·dp from the outputs, whose rounding to 16 bits shows where one key has most weight."""
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
    """The gradient of qkv from that of the output, and what `forward` kept; `tile` is one kernel's, or those of the two (dq, dk and dv)."""
    num_heads = norm.shape[1]
    parts, width = _unpack(qkv, num_heads)
    batch, tokens, *_ = parts.shape
    head = _Head(tokens, width, qkv.dtype, interpret)
    out, grad = (x.reshape(batch, tokens, num_heads, width) for x in (out, grad))
    dqkv = jax.ShapeDtypeStruct(parts.shape, qkv.dtype)
    if isinstance(tile, Tile):
        if tile.keys < tokens:
            raise ValueError(
                f'attention: tile keys={tile.keys}: the one-kernel backward holds all {tokens} tokens'
            )
        packed, single, norm_spec, _ = _specs(
            max(tile.keys, pl.cdiv(tokens, tile.queries) * tile.queries), width
        )
        return _call(
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
    packed, single, norm_spec, delta_spec = _specs(rows, width)
    with_dq, delta = _call(
        functools.partial(_dq_kernel, head=head, tile=first),
        BACKWARD_DQ,
        (pl.cdiv(tokens, first.queries), num_heads, batch),
        first,
        interpret,
        in_specs=[packed, single, single, norm_spec],
        out_specs=[packed, delta_spec],
        out_shape=[dqkv, jax.ShapeDtypeStruct((batch, num_heads, tokens), jnp.float32)],
    )(parts, out, grad, norm)
    # The second kernel writes its two thirds into the same array.
    return _call(
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
