"""The attention kernels of Hopper (sm_90) in Pallas Mosaic GPU.

FlashAttention: Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4; Dao 2023, arXiv 2307.08691,
§3.1.

Forward, O = softmax(Q·Kᵀ/√d)·V: a program keeps the largest logit and the sum of weights of each
row so far, and rescales its accumulator when the largest logit grows. Backward recomputes the
weights P from the saved log-sum-exp of each row. With dO the gradient of O:

    dP = dO·Vᵀ,  delta = Σ P·dP = Σ dO·O over each row,  dS = P·(dP − delta),
    dV = Pᵀ·dO,  dK = dSᵀ·Q/√d,  dQ = dS·K/√d

Exponents have base two, and the scale 1/√d is applied to the float32 logits. The log-sum-exp (lse)
is kept as its two terms, the largest logit q·k and log₂ Σ 2^(logit − largest): their sum would lose
precision if logits are large.

A program is one warpgroup. It owns a block of 64 tokens of one head, holds it in shared memory, and
streams the blocks that it needs of the same head through a ring of slots:

    kernel           role   holds    streams   from registers      writes
    forward                 q        k, v      P                   out, lse
    backward_delta          –        –         –                   delta = Σ dO·O of each row
    backward         dq     q, dO    k, v      dS                  dq
                     dkv    k, v     q, dO     Pᵀ, dSᵀ             dk, dv

Each block is one TMA box of 64 rows of a head, at most one swizzle wide, which wgmma can read as it
is or transposed. P and dS are 16-bit left operands in registers; the role dkv computes the logits
transposed, K·Qᵀ, so that Pᵀ and dSᵀ are already in the registers where wgmma needs them. Sums over
the streamed blocks are kept in float32 registers. Both roles run in one launch. Each result is
written by one program, so results are identical from run to run.

    barrier  of       arrives (arrivals)              waits
    ready    held     TMA (1 for each block)          the program, once
    full     a slot   TMA (1 for each of two blocks)  the program

A slot is refilled after the program has read it: Pallas puts a warpgroup barrier before each TMA
load, and wgmma has finished by then, because its results have been read.

The arrays are matrices here: packed arrays (batch · tokens, 3 · heads · width), outputs and their
gradient (batch · tokens, heads · width). Numbers per row (the terms of the log-sum-exp, delta) are
(batch, heads, …, tokens).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from pallas_kernels import hopper_views as views
from pallas_kernels.attention.hopper_plan import BLOCK, K, Q, Sizes, V
from pallas_kernels.jax_modules import mosaic_gpu as plgpu
from pallas_kernels.types import Index, Layout, Ref

FORWARD = 'jaxunet_attention_forward'
DELTA = 'jaxunet_attention_backward_delta'
BACKWARD = 'jaxunet_attention_backward'

LARGEST, LOG_SUM = range(2)  # terms of the log-sum-exp
LN2 = math.log(2)
NT, NN = 'a·bᵀ', 'a·b'  # the products, by BLAS's names

Square = Float[Array, 'rows columns']  # BLOCK × BLOCK
Block = Float[Array, 'rows width']
Row = Float[Array, ' rows']


class Head:
    """A program's place in the grid, and the loads and stores of its head."""

    def __init__(self, sizes: Sizes, roles: int = 1) -> None:
        self.sizes = sizes
        self.role, self.block, self.head, self.sample = sizes.place(
            lax.axis_index('program'), roles
        )

    def part(self, ref: Ref, block: Index, part: int = 0) -> Ref:
        """Returns a block of the head's rows in device memory.

        Args:
          part: Q, K or V for packed arrays; 0 for outputs and their gradient.
        """
        rows = pl.ds(self.sample * self.sizes.tokens + block * BLOCK, BLOCK)
        return ref.at[rows, pl.ds(self.sizes.column(self.head, part), self.sizes.width)]

    def numbers(self, ref: Ref, block: Index, *term: int) -> Ref:
        """Returns the reference to one number for each row of a block."""
        return ref.at[(self.sample, self.head, *term, pl.ds(block * BLOCK, BLOCK))]

    def keys_and_values(self, qkv: Ref) -> Callable[[Index], tuple[Ref, Ref]]:
        """Returns the function that gives `stream` the keys and values of a block."""
        return lambda n: (self.part(qkv, n, K), self.part(qkv, n, V))

    def row_statistics(
        self, lse: Ref, delta: Ref, block: Index, layout: Layout
    ) -> tuple[Row, Row, Row]:
        """Loads both terms of the log-sum-exp, and delta, of a block of queries."""
        refs = [self.numbers(lse, block, term) for term in (LARGEST, LOG_SUM)]
        largest, log_sum, d = (views.load(r, layout) for r in (*refs, self.numbers(delta, block)))
        return largest, log_sum, d

    def weights(self, logits: Square, largest: Row, log_sum: Row, axis: int) -> Square:
        """Recomputes the softmax; `axis` is the axis of the queries in the logits."""
        shifted = (logits - across(largest, axis)) * self.sizes.scale2
        return jnp.exp2(shifted - across(log_sum, axis))

    def stream(
        self,
        blocks: Callable[[Index], tuple[Ref, Ref]],
        slots: tuple[Ref, Ref],
        full: Ref,
        step: Callable[[Index, Ref, Ref, Any], Any],
        carry: PyTree[Array],
    ) -> Any:
        """Runs step(n, first, second, carry) with each pair of blocks in shared memory.

        Args:
          blocks: returns the pair of block n in device memory.
          slots: the rings of the first and of the second blocks.
          full: a barrier for each slot of the rings.

        Returns: the last carry.
        """
        count = self.sizes.blocks

        def fetch(n: Index, slot: Index) -> None:
            for source, ring in zip(blocks(n), slots, strict=True):
                plgpu.copy_gmem_to_smem(source, ring.at[slot], full.at[slot])

        def body(n: Index, carry: PyTree[Array]) -> Any:
            slot = lax.rem(n, jnp.int32(self.sizes.slots))
            plgpu.barrier_wait(full.at[slot])
            carry = step(n, slots[0].at[slot], slots[1].at[slot], carry)
            if count > self.sizes.slots:
                following = n + self.sizes.slots
                pl.when(following < count)(lambda: fetch(following, slot))
            return carry

        for n in range(self.sizes.slots):
            fetch(jnp.int32(n), n)
        if count == 1:
            return body(jnp.int32(0), carry)
        return lax.fori_loop(jnp.int32(0), jnp.int32(count), body, carry)

    def store(self, values: Block, staged: Ref, target: Ref) -> None:
        """Rounds a block and stores it through `staged`, whose contents are no longer needed."""
        staged[...] = values.astype(staged.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, target)

    def zeros(self) -> Block:
        """Returns a float32 accumulator of zeros."""
        return _laid_out(jnp.zeros((BLOCK, self.sizes.width), jnp.float32), plgpu.Layout.WGMMA)


def across(row: Row, axis: int, columns: int = BLOCK) -> Square:
    """Broadcasts one number for each row (axis 0) or column (axis 1) to a matrix."""
    shape = (BLOCK, columns) if axis == 0 else (columns, BLOCK)
    return lax.broadcast_in_dim(row, shape, (axis,))


def products(*operands: tuple[str, Any, Ref]) -> tuple[Array, ...]:
    """Multiplies several pairs of matrices at once, in float32.

    Args:
      operands: `NT` or `NN`; a left matrix, from registers or shared memory; a right one.
    """
    pairs = [(left, right.T if kind == NT else right) for kind, left, right in operands]

    def multiply(*sums: Ref) -> tuple[Array, ...]:
        for total, (left, right) in zip(sums, pairs, strict=True):
            plgpu.wgmma(total, left, right)
        return tuple(total[...] for total in sums)

    shapes = [(left.shape[0], right.shape[1]) for left, right in pairs]
    return pl.run_scoped(multiply, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def _laid_out(value: Array, layout: Layout) -> Array:
    return plgpu.layout_cast(value, layout)


def _rows() -> Layout:
    """Returns the layout of one number for each row of a product."""
    return plgpu.Layout.WGMMA.reduce(1)


def _columns() -> Layout:
    """Returns the layout of one number for each column of a product."""
    return plgpu.Layout.WGMMA.reduce(0)


def forward(sizes: Sizes, training: bool, qkv: Ref, out: Ref, *refs: Ref) -> None:
    """Computes the outputs of a block of queries and, for training, also the log-sum-exp and the
    outputs in float32.
    """
    kept, (q, keys, values, ready, full) = refs[:-5], refs[-5:]
    head = Head(sizes)
    plgpu.copy_gmem_to_smem(head.part(qkv, head.block, Q), q, ready)

    def step(_: Index, k: Ref, v: Ref, carry: tuple[Block, Row, Row]) -> tuple[Block, Row, Row]:
        total, largest, row_sum = carry
        (logits,) = products((NT, q, k))
        new_largest = jnp.maximum(largest, jnp.max(logits, axis=1))
        weights = jnp.exp2((logits - across(new_largest, 0)) * sizes.scale2)
        rescale = jnp.exp2((largest - new_largest) * sizes.scale2)
        row_sum = row_sum * rescale + jnp.sum(weights, axis=1)
        (weighted,) = products((NN, weights.astype(q.dtype), v))
        return total * across(rescale, 0, sizes.width) + weighted, new_largest, row_sum

    carry = (
        head.zeros(),
        _laid_out(jnp.full((BLOCK,), -jnp.inf, jnp.float32), _rows()),
        _laid_out(jnp.zeros((BLOCK,), jnp.float32), _rows()),
    )

    plgpu.barrier_wait(ready)
    total, largest, row_sum = head.stream(
        head.keys_and_values(qkv), (keys, values), full, step, carry
    )
    total = total * across(1.0 / row_sum, 0, sizes.width)
    head.store(total, q, head.part(out, head.block))
    if training:
        lse, exact = kept
        views.store(head.part(exact, head.block), total)
        views.store(head.numbers(lse, head.block, LARGEST), largest)
        views.store(head.numbers(lse, head.block, LOG_SUM), jnp.log(row_sum) * (1 / LN2))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def delta(sizes: Sizes, exact: Ref, grad: Ref, deltas: Ref) -> None:
    """Computes delta of a block of queries, from the outputs in float32."""
    head = Head(sizes)
    out, d = (
        views.load(head.part(ref, head.block), plgpu.Layout.WGMMA).astype(jnp.float32)
        for ref in (exact, grad)
    )
    views.store(head.numbers(deltas, head.block), jnp.sum(out * d, axis=1))


def backward(
    sizes: Sizes, qkv: Ref, grad: Ref, lse: Ref, deltas: Ref, dqkv: Ref, *scratch: Ref
) -> None:
    """Computes dq of a block of queries, or dk and dv of a block of keys."""
    head = Head(sizes, roles=2)
    operands = (head, qkv, grad, lse, deltas, dqkv, *scratch)
    pl.when(head.role == 0)(functools.partial(_dq, *operands))
    pl.when(head.role == 1)(functools.partial(_dkv, *operands))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _dq(
    head: Head,
    qkv: Ref,
    grad: Ref,
    lse: Ref,
    deltas: Ref,
    dqkv: Ref,
    q: Ref,
    d: Ref,
    keys: Ref,
    values: Ref,
    ready: Ref,
    full: Ref,
) -> None:
    plgpu.copy_gmem_to_smem(head.part(qkv, head.block, Q), q, ready)
    plgpu.copy_gmem_to_smem(head.part(grad, head.block), d, ready)
    largest, log_sum, row_delta = head.row_statistics(lse, deltas, head.block, _rows())

    def step(_: Index, k: Ref, v: Ref, dq: Block) -> Block:
        logits, dp = products((NT, q, k), (NT, d, v))
        weights = head.weights(logits, largest, log_sum, 0)
        ds = weights * (dp - across(row_delta, 0))
        (product,) = products((NN, ds.astype(q.dtype), k))
        return dq + product

    plgpu.barrier_wait(ready)
    sources = head.keys_and_values(qkv)
    dq = head.stream(sources, (keys, values), full, step, head.zeros())
    head.store(dq * head.sizes.scale, q, head.part(dqkv, head.block, Q))


def _dkv(
    head: Head,
    qkv: Ref,
    grad: Ref,
    lse: Ref,
    deltas: Ref,
    dqkv: Ref,
    k: Ref,
    v: Ref,
    queries: Ref,
    gradients: Ref,
    ready: Ref,
    full: Ref,
) -> None:
    plgpu.copy_gmem_to_smem(head.part(qkv, head.block, K), k, ready)
    plgpu.copy_gmem_to_smem(head.part(qkv, head.block, V), v, ready)

    def step(n: Index, q: Ref, d: Ref, carry: tuple[Block, Block]) -> tuple[Block, Block]:
        dk, dv = carry
        largest, log_sum, row_delta = head.row_statistics(lse, deltas, n, _columns())
        logits, dp = products((NT, k, q), (NT, v, d))
        weights = head.weights(logits, largest, log_sum, 1)
        ds = weights * (dp - across(row_delta, 1))
        to_dv, to_dk = products((NN, weights.astype(k.dtype), d), (NN, ds.astype(k.dtype), q))
        return dk + to_dk, dv + to_dv

    def sources(n: Index) -> tuple[Ref, Ref]:
        return head.part(qkv, n, Q), head.part(grad, n)

    plgpu.barrier_wait(ready)
    carry = (head.zeros(), head.zeros())
    dk, dv = head.stream(sources, (queries, gradients), full, step, carry)
    head.store(dk * head.sizes.scale, k, head.part(dqkv, head.block, K))
    head.store(dv, v, head.part(dqkv, head.block, V))


def launch(
    name: str,
    sizes: Sizes,
    body: Callable[..., None],
    results: PyTree[jax.ShapeDtypeStruct],
    operands: tuple[Array, ...],
    *,
    held: int,
    roles: int = 1,
) -> Any:
    """Runs a kernel, one warpgroup per program.

    Args:
      body: a function of the references: operands, results, scratch.
      held: number of blocks that a program holds; 0: it uses no shared memory.
      roles: number of roles in the table above.
    """
    scratch: list[Any] = []
    if held:
        dtype = operands[0].dtype

        def blocks(*slots: int) -> Any:
            tiles = plgpu.TilingTransform((8, sizes.width))
            swizzle = plgpu.SwizzleTransform(sizes.width * jnp.dtype(dtype).itemsize)
            return plgpu.SMEM((*slots, BLOCK, sizes.width), dtype, transforms=(tiles, swizzle))

        scratch = [
            *(blocks() for _ in range(held)),
            blocks(sizes.slots),
            blocks(sizes.slots),
            plgpu.Barrier(num_arrivals=held),  # ready
            plgpu.Barrier(num_barriers=sizes.slots, num_arrivals=2),  # full
        ]
    kernel = plgpu.kernel(
        body,
        out_type=results,
        scratch_types=scratch,
        grid=(roles * sizes.blocks * sizes.heads * sizes.batch,),
        grid_names=('program',),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    # Under x64, Python's integers would become int64 and clash with the device's int32 indices.
    with jax.enable_x64(False):
        return kernel(*operands)
