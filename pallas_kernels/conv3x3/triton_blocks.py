"""Shared by the portable convolution kernels: masked tiles, taps, dots, launches, checks.

A mask may be None, which means all true and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.jax_modules import triton as plgpu
from pallas_kernels.types import Ref

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
SMALLEST_DOT = 16  # smallest axis of a dot; fewer channels share an axis with the taps
TAPS = 9
# Most bytes of shared memory for a program's loads in flight, for tiles worth timing: Hopper's 227
# KiB minus Triton's own use.
LOAD_BYTES = 220 * 1024


def check_block(field: str, value: int) -> None:
    """Raises ValueError unless a tile's block is a power of two ≥ 16."""
    if value < SMALLEST_DOT or value & (value - 1):
        raise ValueError(
            f'Tile.{field}={value}: Triton needs a power of two of at least {SMALLEST_DOT}'
        )


def check_launch(num_warps: int, num_stages: int) -> None:
    """Raises ValueError unless Triton accepts these warps and stages."""
    if num_warps not in {1, 2, 4, 8, 16}:
        raise ValueError(f'Tile.num_warps={num_warps}: use 1, 2, 4, 8 or 16')
    if num_stages < 1:
        raise ValueError(f'Tile.num_stages={num_stages}: use at least 1')


def shape_class(channels: Sequence[int], features: int, pixels: int) -> str:
    """Returns the name of a convolution's shape in the table of tiles.

    Args:
      channels: of each part.
      pixels: batch · height · width.
    """
    return f'{pixels} pixels, {"+".join(map(str, channels))} to {features}'


def dot_size(n: int) -> int:
    """Returns the smallest power of two ≥ n that a dot accepts."""
    return max(SMALLEST_DOT, pl.next_power_of_2(n))


def folds(channels: int) -> bool:
    """Returns True if there are so few channels that they share an axis with the nine taps."""
    return channels < SMALLEST_DOT


def split_pixel(pixel: Array, height: int, width: int) -> tuple[Array, Array, Array]:
    """Returns sample, row and column of a pixel that is counted over the whole batch."""
    return (
        jax.lax.div(pixel, height * width),
        jax.lax.rem(jax.lax.div(pixel, width), height),
        jax.lax.rem(pixel, width),
    )


def tap_offset(tap: Array | int) -> tuple[Array | int, Array | int]:
    """Returns the rows and columns from an output pixel to the input pixel that tap 0..8 reads."""
    if isinstance(tap, int):
        return tap // 3 - 1, tap % 3 - 1
    return jax.lax.div(tap, 3) - 1, jax.lax.rem(tap, 3) - 1


def inside(row: Array, column: Array, height: int, width: int) -> Array:
    """Returns the mask of the pixels that are in the image."""
    return (row >= 0) & (row < height) & (column >= 0) & (column < width)


def below(index: Array, size: int, reach: int) -> Array | None:
    """Returns the mask index < size; None if size holds `reach`, an exclusive bound of index."""
    return None if reach <= size else index < size


def every(*masks: Array | None) -> Array | None:
    """Returns the conjunction of masks."""
    found = None
    for mask in masks:
        if mask is not None:
            found = mask if found is None else found & mask
    return found


def as_column(mask: Array | None) -> Array | None:
    """Returns the mask (n,) as (n, 1)."""
    return None if mask is None else mask[:, None]


def load(ref: Ref, rows: Array, columns: Array, mask: Array | None) -> Array:
    """Loads ref[rows, columns], zero where masked out."""
    return plgpu.load(ref.at[rows, columns], mask=mask, other=None if mask is None else 0.0)


def dot(a: Array, b: Array, contract: tuple[int, int], interpret: bool) -> Array:
    """Multiplies two tiles over one axis of each, in float32.

    Products of 16-bit numbers are exact in float32. A single TF32 product would lose float32's
    accuracy; three keep it.
    """
    precision = (
        None if a.dtype != jnp.float32 or interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    )
    numbers = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(
        a, b, numbers, precision=precision, preferred_element_type=jnp.float32
    )


class Launch(NamedTuple):
    """The launch of a kernel.

    Fields:
      programs: size of the grid.
      num_warps: warps of a program.
      num_stages: depth of its load pipeline.
      interpret: run on the CPU, for tests.
    """

    programs: int
    num_warps: int
    num_stages: int
    interpret: bool


def call(
    name: str,
    body: Callable[[Sequence[Ref]], None],
    operands: Sequence[Array],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    launch: Launch,
) -> Array:
    """Runs `body` in each program, on the whole references of operands and result."""

    def kernel(*refs: Ref) -> None:
        body(refs)

    # The GPU kernel takes the name of the Python function.
    kernel.__name__ = kernel.__qualname__ = name
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        grid=(launch.programs,),
        compiler_params=plgpu.CompilerParams(
            num_warps=launch.num_warps, num_stages=launch.num_stages
        ),
        interpret=launch.interpret,
        name=name,
    )(*operands)
