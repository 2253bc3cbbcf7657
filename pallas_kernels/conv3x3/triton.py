"""The portable 3×3 convolution (sm_80, sm_89, sm_90): an implicit GEMM in Pallas through Triton.

It supports every shape. A program computes `block_pixels` consecutive pixels (over batch, height
and width together) × `block_features` outputs. The K axis runs over taps and channels; a tap is a
shift of the pixel index, and its reads outside the image are masked to zero. Triton pipelines the
loads of K over `num_stages` steps. The epilogue adds shift and residual.

With few channels, the tensor cores would mostly compute padding, so the channels share an axis with
the nine taps:
- A part with fewer than 16 channels has one K axis for taps and channels (3 channels fill 27 of
  32), read as a gather.
- With fewer than 16 features, x is read once instead of nine times: one kernel forms all taps'
  products, (9 F, pixels) in float32, and another adds up each pixel's terms from its neighbours.

The activation SiLU(a · x + b) is fused only where x is read once. Otherwise every tap would
recompute it, which costs more than one elementwise pass before the convolution.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import tile_table
from pallas_kernels.conv3x3.activation import activated
from pallas_kernels.conv3x3.triton_blocks import (
    DTYPES,
    TAPS,
    Launch,
    call,
    dot_size,
    shape_class,
)
from pallas_kernels.conv3x3.triton_kernel import (
    SUM_PIXELS,
    Problem,
    forward_program,
    products_program,
    sum_program,
)
from pallas_kernels.conv3x3.triton_tiles import Tile, default_tile, gathers
from pallas_kernels.types import Shaped

NAME = 'jaxunet_conv3x3_triton_forward'
PRODUCTS_NAME = 'jaxunet_conv3x3_triton_products'


def supports(parts: Sequence[Shaped], kernel: Shaped) -> str | None:
    """Returns None if `forward` accepts these operands, else the problem and what to do."""
    if not parts:
        return 'parts: none given; pass at least one array (batch, height, width, channels)'
    first = parts[0]
    for i, part in enumerate(parts):
        if (
            len(part.shape) != 4
            or part.shape[:3] != first.shape[:3]
            or part.dtype != first.dtype
            or 0 in part.shape
        ):
            return (
                f'parts[{i}]: {part.dtype}{list(part.shape)} beside parts[0] '
                f'{first.dtype}{list(first.shape)}; '
                'parts are non-empty NHWC arrays of one dtype that differ in channels only'
            )
    if first.dtype not in DTYPES:
        return f'parts: dtype {first.dtype}; use float32, bfloat16 or float16'
    channels = sum(part.shape[-1] for part in parts)
    if len(kernel.shape) != 4 or kernel.shape[:3] != (3, 3, channels) or kernel.shape[3] == 0:
        return (
            f'kernel: shape {list(kernel.shape)}; expected [3, 3, {channels}, features], '
            f'{channels} being the channels of all parts'
        )
    if kernel.dtype != first.dtype:
        return f'kernel: dtype {kernel.dtype}, but parts are {first.dtype}; cast one of them'
    return None


def forward(
    parts: tuple[Float[Array, 'batch height width _'], ...],
    kernel: Float[Array, '3 3 channels features'],
    shift: Float[Array, '#batch features'],
    *,
    residual: Float[Array, 'batch height width features'] | None = None,
    affine: tuple[Float[Array, 'batch channels'], Float[Array, 'batch channels']] | None = None,
    tile: Tile | None = None,
    out_dtype: DTypeLike | None = None,
    interpret: bool = False,
) -> Float[Array, 'batch height width features']:
    """conv3x3(act(x)) + shift [+ residual], with zero padding after act.

    Products and sums are in float32, rounded once.

    Args:
      parts: x, joined along channels; each part is read where it is. float32, bfloat16 or float16.
      kernel: HWIO, of x's dtype.
      shift: float32; a bias (1, F), or a bias plus a time shift per sample (batch, F).
      residual: added in float32.
      affine: float32 a and b over the channels of all parts: act(x) = SiLU(a · x + b); None: act is
        the identity.
      tile: None = the tile measured on this device, else `default_tile`.
      out_dtype: None = x's dtype.
      interpret: run on the CPU, for tests.

    Raises:
      ValueError: see `supports`; or shift, residual or affine of another shape.
    """
    problem = supports(parts, kernel)
    batch, height, width, _ = parts[0].shape if parts else (0, 0, 0, 0)
    channels, features = tuple(part.shape[-1] for part in parts), kernel.shape[-1]
    if problem is None and shift.shape not in {(1, features), (batch, features)}:
        problem = (
            f'shift: shape {list(shift.shape)}; expected [1, {features}] or [{batch}, {features}]'
        )
    if (
        problem is None
        and residual is not None
        and residual.shape != (batch, height, width, features)
    ):
        problem = (
            f'residual: shape {list(residual.shape)}; '
            f'expected [{batch}, {height}, {width}, {features}]'
        )
    for name, value in zip('ab', affine or (), strict=False):
        if problem is None and value.shape != (batch, sum(channels)):
            problem = (
                f'affine {name}: shape {list(value.shape)}; expected [{batch}, {sum(channels)}]'
            )
    if problem is not None:
        raise ValueError(f'conv3x3 (triton): {problem}')
    dtype, pixels = parts[0].dtype, batch * height * width
    tile = tile or tile_table.measured(
        Tile, 'conv3x3/triton', dtype, shape_class(channels, features, pixels)
    )
    tile = tile or default_tile(channels, features, pixels, dtype.itemsize)
    return _launch(
        parts, kernel, shift, residual, affine, tile, jnp.dtype(out_dtype or dtype), interpret
    )


# Jitted, so that equal calls share one trace and one lowering.
@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def _launch(
    parts: tuple[Array, ...],
    kernel: Array,
    shift: Array,
    residual: Array | None,
    affine: tuple[Array, Array] | None,
    tile: Tile,
    out_dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    (batch, height, width, _), features = parts[0].shape, kernel.shape[-1]
    channels, pixels = tuple(part.shape[-1] for part in parts), batch * height * width
    if affine is not None and not gathers(channels, features):
        parts, affine = activated(parts, affine), None
    p = Problem(
        batch,
        height,
        width,
        channels,
        features,
        shift.shape[0],
        affine is not None,
        residual is not None,
        tile,
        interpret,
    )
    inputs = [
        *(part.reshape(pixels, part.shape[-1]) for part in parts),
        kernel.reshape(TAPS * p.total, features),
    ]
    inputs += [value.astype(jnp.float32) for value in affine or ()]
    around = [shift.astype(jnp.float32)] + (
        [] if residual is None else [residual.reshape(pixels, features)]
    )
    run = _launch_products_and_sum if gathers(channels, features) else _launch_forward
    return run(p, inputs, around, out_dtype).reshape(batch, height, width, features)


# The two variants, on matrices; `inputs`: parts, kernel, a and b; `around`: shift and residual.
def _launch_forward(
    p: Problem, inputs: list[Array], around: list[Array], out_dtype: jnp.dtype
) -> Array:
    programs = pl.cdiv(p.pixels, p.tile.block_pixels) * pl.cdiv(p.features, p.tile.block_features)
    return call(
        NAME,
        functools.partial(forward_program, p),
        inputs + around,
        (p.pixels, p.features),
        out_dtype,
        Launch(programs, p.tile.num_warps, p.tile.num_stages, p.interpret),
    )


def _launch_products_and_sum(
    p: Problem, inputs: list[Array], around: list[Array], out_dtype: jnp.dtype
) -> Array:
    size = TAPS * p.features
    columns = pl.cdiv(size, min(p.tile.block_features, dot_size(size)))
    programs = pl.cdiv(p.pixels, p.tile.block_pixels) * columns
    products = call(
        PRODUCTS_NAME,
        functools.partial(products_program, p),
        inputs,
        (size, p.pixels),
        jnp.float32,
        Launch(programs, p.tile.num_warps, p.tile.num_stages, p.interpret),
    )
    return call(
        NAME,
        functools.partial(sum_program, p),
        [products, *around],
        (p.pixels, p.features),
        out_dtype,
        Launch(pl.cdiv(p.pixels, SUM_PIXELS), 4, 1, p.interpret),
    )
