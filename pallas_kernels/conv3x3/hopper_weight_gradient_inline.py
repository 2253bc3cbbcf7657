"""Two steps of the Hopper weight gradient that Pallas cannot express, in the Mosaic GPU dialect.

`jax.experimental.mosaic.gpu` and `jaxlib.mlir` are not stable, so the weight gradient uses them
only in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.jax_modules import arith, ir, nvvm
from pallas_kernels.jax_modules import mosaic as mgpu
from pallas_kernels.jax_modules import mosaic_gpu as plgpu
from pallas_kernels.jax_modules import mosaic_utils as utils

# The layout of wgmma's accumulator, with one float32 per register. With pairs (plgpu.Layout.WGMMA),
# the compiler would split them before every wgmma.
ACCUMULATOR = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))),
    warp_dims=(-8,),
    lane_dims=(-4, -3),
    vector_dim=-1,
)
Registers: TypeAlias = mgpu.FragmentedArray  # an array in the registers of a warpgroup
SWIZZLE = plgpu.SwizzleTransform(128)


def tap_strides(columns: int, block: int) -> list[int]:
    """Returns the strides of x in a stage, seen as (image row, tap, 8 pixels, channel).

    The next tap begins one pixel later, so taps overlap.

    Args:
      columns: pixels of an image row in the stage.
      block: channels of a pixel.
    """
    return [columns * block, block, block, 1]


def multiply_taps(
    rows: int, columns: int, block: int, taps: int, products: Sequence[tuple[int, int]]
) -> Callable[..., Array]:
    """Returns a function of (row, column, x stage, dy stage, accumulator) for one strip.

    It adds dyᵀ · [x, x one pixel later, …], for `taps` taps, to the accumulator (block, taps ·
    block), and waits for the products. It reads x from the given row and column of its stage on.
    The stage of x has shape (halves, ≥ rows + row, columns, block), that of dy (halves, rows, 8,
    block), both 128-byte swizzled.

    Args:
      products: pairs (half of x, half of dy) to multiply.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            *[plgpu.Layout.WG_SPLAT(())] * 2,
            plgpu.RefType((SWIZZLE,)),
            plgpu.RefType((SWIZZLE,)),
            ACCUMULATOR,
        ),
        return_type=plgpu.ShapeDtypeStruct((block, taps * block), jnp.float32, layout=ACCUMULATOR),
    )
    def step(
        _: object, row: Registers, column: Registers, x: ir.Value, dy: ir.Value, total: Registers
    ) -> Registers:
        x_type = ir.MemRefType(x.type)
        # K tiles are 8 pixels and N tiles one tap. They overlap, which slices cannot express.
        strides = ir.StridedLayoutAttr.get(0, tap_strides(columns, block))
        shifted = ir.MemRefType.get(
            (rows, taps, 8, block), x_type.element_type, strides, x_type.memory_space
        )
        first_row, first_column = (
            arith.index_cast(ir.IndexType.get(), index.registers.item()) for index in (row, column)
        )
        accumulator = mgpu.WGMMAAccumulator.from_registers(total)
        for x_half, dy_half in products:
            box = mgpu.memref_slice(x, (x_half, mgpu.ds(first_row, rows), mgpu.ds(first_column, 8)))
            # (1, rows, 8, block) -> (1, rows, block, 8): M and K of the left operand.
            left = mgpu.memref_transpose(
                mgpu.memref_unsqueeze(mgpu.memref_slice(dy, dy_half), 0), (0, 1, 3, 2)
            )
            accumulator = mgpu.wgmma(
                accumulator, left, utils.ptr_as_memref(utils.memref_ptr(box), shifted)
            )
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(0)
        return accumulator.value

    return step


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACCUMULATOR))
def store_transposed(_: object, target: ir.Value, value: Registers) -> None:
    """Writes valueᵀ to device memory.

    Eight lanes hold eight adjacent elements of a row of valueᵀ, a whole sector of 32 bytes.
    """
    value.store_untiled(mgpu.memref_transpose(target, (1, 0)), optimized=False)
