"""Shared by the Triton attention kernels: loads, stores, masks and products of a head, launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxunet.ops.attention.operands import check_kernel_operands
from pallas_kernels.attention.tiles import Tile, dot_size
from pallas_kernels.jax_modules import triton as plgpu
from pallas_kernels.types import Index, Ref

Axes = tuple[tuple[int], tuple[int]]  # the axes that a product contracts
Carry = TypeVar('Carry')

# Slots of the packed arrays, and of the log-sum-exp. NumPy integers, because the interpreter cannot
# index with a plain int.
Q, K, V = (np.int32(slot) for slot in range(3))
LARGEST, LOG_SUM = (np.int32(slot) for slot in range(2))
# The products by BLAS's names: T, an operand is transposed; N, it is not.
NT: Axes = ((1,), (1,))  # a·bᵀ
TN: Axes = ((0,), (0,))  # aᵀ·b
NN: Axes = ((1,), (0,))  # a·b


class Head:
    """The tokens of one head as a kernel sees them: padding, masked loads and stores, products.

    Fields:
      padded_width: the width rounded up to a power of two; the columns beyond `width` are zero.
      scale: 1/√width, the factor of the logits.
      scale2: `scale` · log₂(e), for exponents of base two.
    """

    def __init__(self, tokens: int, width: int, dtype: DTypeLike, interpret: bool) -> None:
        self.tokens, self.width, self.padded_width = tokens, width, dot_size(width)
        self.dtype, self.interpret = dtype, interpret
        self.scale = width**-0.5
        self.scale2 = self.scale * math.log2(math.e)
        # A single tf32 product would lose float32's accuracy; three keep it. Products of 16-bit
        # numbers are exact in float32.
        self.precision: lax.Precision | lax.DotAlgorithmPreset = lax.Precision.DEFAULT
        if dtype == jnp.float32:
            self.precision = (
                lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
            )

    def dot(self, a: Array, b: Array, contract: Axes) -> Array:
        """Multiplies two tiles over one axis of each (`NT`, `TN` or `NN`), in float32."""
        return lax.dot_general(
            a, b, (contract, ((), ())), precision=self.precision, preferred_element_type=jnp.float32
        )

    def valid(self, start: Index, rows: int) -> Array | None:
        """Returns the mask of the rows that are tokens; None, which costs nothing, if all are."""
        return start + lax.iota(jnp.int32, rows) < self.tokens if self.tokens % rows else None

    def mask(self, start: Index, rows: int) -> Array | None:
        """Returns the mask of the elements of a tile of rows that exist; None if all do."""
        valid = self.valid(start, rows)
        mask = (
            None if valid is None else lax.broadcast_in_dim(valid, (rows, self.padded_width), (0,))
        )
        if self.width != self.padded_width:
            columns = lax.broadcasted_iota(jnp.int32, (rows, self.padded_width), 1) < self.width
            mask = columns if mask is None else mask & columns
        return mask

    def read(self, ref: Ref, start: Index, rows: int, *slot: np.int32) -> Array:
        """Loads rows of the head, zero beyond its tokens and its width."""
        mask = self.mask(start, rows)
        part = ref.at[(pl.ds(start, rows), *slot, slice(None))]
        return plgpu.load(part) if mask is None else plgpu.load(part, mask=mask, other=0.0)

    def read_row(
        self, ref: Ref, start: Index, rows: int, *slot: np.int32, other: float = 0.0
    ) -> Array:
        """Loads one number per row: a term of the log-sum-exp, or delta."""
        mask = self.valid(start, rows)
        part = ref.at[(*slot, pl.ds(start, rows))]
        return plgpu.load(part) if mask is None else plgpu.load(part, mask=mask, other=other)

    def read_lse(self, ref: Ref, start: Index, rows: int) -> tuple[Array, Array]:
        """Loads both terms of the log-sum-exp; ∞ for padding, so that its weights are zero."""
        largest = self.read_row(ref, start, rows, LARGEST)
        return largest, self.read_row(ref, start, rows, LOG_SUM, other=math.inf)

    def write(self, ref: Ref, start: Index, value: Array, *slot: np.int32) -> None:
        """Stores rows of the head in the type of `ref`."""
        rows = value.shape[0]
        plgpu.store(
            ref.at[(pl.ds(start, rows), *slot, slice(None))],
            value.astype(ref.dtype),
            mask=self.mask(start, rows),
        )

    def write_row(self, ref: Ref, start: Index, value: Array, *slot: np.int32) -> None:
        """Stores one number per row."""
        rows = value.shape[0]
        plgpu.store(ref.at[(*slot, pl.ds(start, rows))], value, mask=self.valid(start, rows))

    def loop(self, block: int, body: Callable[[Index, Carry], Carry], carry: Carry) -> Carry:
        """Runs body(first row, carry) over all blocks of rows; a single block is not a loop."""
        steps = pl.cdiv(self.tokens, block)
        if steps == 1:
            return body(0, carry)
        return lax.fori_loop(0, steps, lambda i, c: body(i * block, c), carry)


def unpack(qkv: Array, num_heads: int) -> tuple[Array, int]:
    """Returns a view of qkv as (batch, tokens, 3, heads, width), and the width."""
    width = check_kernel_operands(qkv, num_heads)
    return qkv.reshape(*qkv.shape[:2], 3, num_heads, width), width


def head_blocks(
    rows: int, width: int
) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Returns the block specs that give a program its whole head, padded to `rows` rows.

    Their order: packed arrays, outputs, log-sum-exp, delta.
    """
    width = dot_size(width)
    packed = pl.BlockSpec((None, rows, 3, None, width), lambda i, h, b: (b, 0, 0, h, 0))
    single = pl.BlockSpec((None, rows, None, width), lambda i, h, b: (b, 0, h, 0))
    lse = pl.BlockSpec((None, None, 2, rows), lambda i, h, b: (b, h, 0, 0))
    delta = pl.BlockSpec((None, None, rows), lambda i, h, b: (b, h, 0))
    return packed, single, lse, delta


def launch(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    tile: Tile,
    interpret: bool,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Returns the call of a kernel on a grid; `kwargs` are those of `pallas_call`."""
    params = plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)
    return pl.pallas_call(
        kernel, name=name, grid=grid, interpret=interpret, compiler_params=params, **kwargs
    )
