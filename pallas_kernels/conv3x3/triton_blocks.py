"""What the portable convolution kernels share: masked blocks, taps as shifts of the pixel index, dots, tile checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
SMALLEST_DOT = 16
"""The least extent of each axis of a dot; an axis with fewer channels is joined with the nine taps."""
TAPS = 9


def check_block(field: str, value: int) -> None:
    if value < SMALLEST_DOT or value & (value - 1):
        raise ValueError(
            f'Tile.{field}={value}: Triton needs a power of two of at least {SMALLEST_DOT}'
        )


def check_launch(num_warps: int, num_stages: int) -> None:
    if num_warps not in {1, 2, 4, 8, 16}:
        raise ValueError(f'Tile.num_warps={num_warps}: use 1, 2, 4, 8 or 16')
    if num_stages < 1:
        raise ValueError(f'Tile.num_stages={num_stages}: use at least 1')


def shape_class(channels: Sequence[int], features: int, pixels: int) -> str:
    """What the table of tiles calls a convolution of parts of `channels` channels → `features`; pixels are batch · height · width."""
    return f'{pixels} pixels, {"+".join(map(str, channels))} to {features}'


def dot_size(n: int) -> int:
    """The least power of two ≥ n that a dot takes."""
    return max(SMALLEST_DOT, pl.next_power_of_2(n))


def folds(channels: int) -> bool:
    """Whether so few channels share one axis with the nine taps."""
    return channels < SMALLEST_DOT


def split_pixel(pixel: Array, height: int, width: int) -> tuple[Array, Array, Array]:
    """(sample, row, column) of a pixel counted over the whole batch."""
    return (
        jax.lax.div(pixel, height * width),
        jax.lax.rem(jax.lax.div(pixel, width), height),
        jax.lax.rem(pixel, width),
    )


def tap_offset(tap: Array | int) -> tuple[Any, Any]:
    """(rows, columns) from an output pixel to the input pixel that tap 0..8 reads."""
    if isinstance(tap, int):
        return tap // 3 - 1, tap % 3 - 1
    return jax.lax.div(tap, 3) - 1, jax.lax.rem(tap, 3) - 1


def inside(row: Array, column: Array, height: int, width: int) -> Array:
    """Mask of the pixels that are in the image."""
    return (row >= 0) & (row < height) & (column >= 0) & (column < width)


def below(index: Array, size: int, reach: int) -> Array | None:
    """Mask of index < size, or None where `reach`, the indices' exclusive upper bound, makes it needless."""
    return None if reach <= size else index < size


def every(*masks: Array | None) -> Array | None:
    """The masks' conjunction; None stands for all true, which costs nothing."""
    found = None
    for mask in masks:
        if mask is not None:
            found = mask if found is None else found & mask
    return found


def as_column(mask: Array | None) -> Array | None:
    return None if mask is None else mask[:, None]


def load(ref: Any, rows: Array, columns: Array, mask: Array | None) -> Array:
    """ref[rows, columns], zero where masked out."""
    return plgpu.load(ref.at[rows, columns], mask=mask, other=None if mask is None else 0.0)


def affine_silu(x: Array, a: Array, b: Array) -> Array:
    """SiLU(a · x + b) in float32."""
    y = a * x.astype(jnp.float32) + b
    return y / (1.0 + jnp.exp(-y))


def activated(parts: Sequence[Array], affine: tuple[Array, Array]) -> tuple[Array, ...]:
    """`affine_silu` of each part, in its own type; a and b have the channels of all parts."""
    ends = [sum(part.shape[-1] for part in parts[: i + 1]) for i in range(len(parts))]
    found = []
    for part, end in zip(parts, ends, strict=True):
        a, b = (
            value[:, None, None, end - part.shape[-1] : end].astype(jnp.float32) for value in affine
        )
        found.append(affine_silu(part, a, b).astype(part.dtype))
    return tuple(found)


def dot(a: Array, b: Array, contract: tuple[int, int], interpret: bool) -> Array:
    """The product of two blocks over one axis of each, in float32.

    Products of 16-bit numbers are exact in float32. One TF32 product would not keep float32's accuracy; three do.
    """
    precision = (
        None if a.dtype != jnp.float32 or interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    )
    numbers = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(
        a, b, numbers, precision=precision, preferred_element_type=jnp.float32
    )


class Launch(NamedTuple):
    """How many programs a kernel has, of how many warps, with loads how many steps ahead."""

    programs: int
    num_warps: int
    num_stages: int
    interpret: bool


def call(
    name: str,
    body: Callable[[Sequence[Any]], None],
    operands: Sequence[Array],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    launch: Launch,
) -> Array:
    """Runs `body` on the references of operands and result in each program; it sees them whole."""

    def kernel(*refs: Any) -> None:
        body(refs)

    # The GPU kernel is called what the Python function is.
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
