"""The forward 3×3 convolution on Hopper (sm_90): supported shapes, tiles, the kernel's operands.

`hopper_kernel` contains the kernel and explains its pipeline.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxunet.ops.terms import bfloat16_terms
from pallas_kernels import tile_table
from pallas_kernels.conv3x3 import hopper_kernel, hopper_tiles
from pallas_kernels.conv3x3.activation import activated
from pallas_kernels.conv3x3.hopper_plan import Plan, plan
from pallas_kernels.conv3x3.schedule import CHUNK, TAPS, Tile
from pallas_kernels.hopper_grid import ceil_div
from pallas_kernels.types import Shaped

Image = Float[Array, 'batch height width _']


def supports(
    parts: Sequence[Shaped],
    kernel: Shaped,
    *,
    residual: Shaped | Sequence[Shaped] | None = None,
    shortcut: Shaped | None = None,
    affine: tuple[Shaped, Shaped] | None = None,
    flipped: bool = False,
    tile: Tile | None = None,
    out_dtype: DTypeLike | None = None,
) -> str | None:
    """Returns None if `forward` supports these operands, else the reason, from shapes and types."""
    shape, dtype = parts[0].shape, jnp.dtype(parts[0].dtype)
    channels, features = _channels(parts), kernel.shape[-2 if flipped else -1]
    total = sum(channels)
    expected = (3, 3, features, total) if flipped else (3, 3, total, features)
    others = _parts(residual)
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f'x: expected bfloat16, float16 or float32, found {dtype}'
    if any(
        len(part.shape) != 4 or part.shape[:-1] != shape[:-1] or part.dtype != dtype
        for part in (*parts, *others)
    ):
        found = ', '.join(f'{part.shape} {part.dtype}' for part in (*parts, *others))
        return f'x and residual: expected parts that agree in all but channels, found {found}'
    if kernel.shape != expected or kernel.dtype != dtype:
        return f'kernel: expected {expected} in {dtype}, found {kernel.shape} in {kernel.dtype}'
    # A tensor map's rows must be multiples of 16 bytes; a float32 is read as its bfloat16 terms.
    if any(c % 8 for c in (*channels, *_channels(others), features)):
        return (
            f'channels: expected multiples of 8, found {channels} and {_channels(others)} '
            f'-> {features}'
        )
    if 0 in (*shape, total, features):
        return f'x: found an empty array, {shape} -> {features} channels'
    problem = _residual_problem(others, shortcut, features, dtype)
    if problem is not None:
        return problem
    if affine is not None and any(
        a.shape != (shape[0], total) or a.dtype != jnp.float32 for a in affine
    ):
        return (
            f'affine: expected two float32 {(shape[0], total)}, '
            f'found {[(a.shape, str(a.dtype)) for a in affine]}'
        )
    if out_dtype is not None and jnp.dtype(out_dtype) not in (dtype, jnp.float32):
        return f'out_dtype: expected {dtype} or float32, found {jnp.dtype(out_dtype)}'
    if tile is None:
        return None  # every shape has a tile
    return _plan(
        parts, features, others, shortcut, affine, flipped, tile, out_dtype
    ).schedule.problem()


def _residual_problem(
    others: tuple[Shaped, ...], shortcut: Shaped | None, features: int, dtype: jnp.dtype
) -> str | None:
    """Returns the reason why `forward` does not support the channels of the residual, or None."""
    channels = _channels(others)
    if shortcut is None and others and channels != (features,):
        return (
            f'residual: expected one array of {features} channels without a shortcut, '
            f'found {channels}'
        )
    expected = (sum(channels), features)
    if shortcut is not None and (shortcut.shape != expected or shortcut.dtype != dtype):
        return (
            f'shortcut: expected {expected} in {dtype}, found {shortcut.shape} in {shortcut.dtype}'
        )
    return None


def candidates(
    parts: Sequence[Shaped],
    kernel: Shaped,
    *,
    residual: Shaped | Sequence[Shaped] | None = None,
    shortcut: Shaped | None = None,
    affine: tuple[Shaped, Shaped] | None = None,
    flipped: bool = False,
    out_dtype: DTypeLike | None = None,
    limit: int = 12,
) -> list[Tile]:
    """Returns at most `limit` tiles worth timing for these operands, best guess first."""
    features, others = kernel.shape[-2 if flipped else -1], _parts(residual)
    return hopper_tiles.candidates(
        lambda tile: _plan(parts, features, others, shortcut, affine, flipped, tile, out_dtype),
        limit,
    )


def default_tile(parts: Sequence[Shaped], kernel: Shaped, **options: Any) -> Tile:
    """Returns the tile for shapes in no table: the first of `candidates`; same arguments."""
    return candidates(parts, kernel, **options, limit=1)[0]


def shape_class(
    parts: Sequence[Shaped],
    kernel: Shaped,
    *,
    residual: Shaped | Sequence[Shaped] | None = None,
    shortcut: Shaped | None = None,
    affine: tuple[Shaped, Shaped] | None = None,
    flipped: bool = False,
    out_dtype: DTypeLike | None = None,
) -> str:
    """Returns the name of these operands in the table of tiles."""
    channels, others = ('+'.join(map(str, _channels(x))) for x in (parts, _parts(residual)))
    added = f', {others} added' if shortcut is None else f', {others} projected'
    end = '' if out_dtype is None or out_dtype == parts[0].dtype else f', to {jnp.dtype(out_dtype)}'
    options = (', activated' if affine is not None else '') + (', flipped' if flipped else '')
    image = 'x'.join(map(str, parts[0].shape[:-1]))
    features = kernel.shape[-2 if flipped else -1]
    return f'{image}, {channels} to {features}{added if others else ""}{options}{end}'


def choose_tile(parts: Sequence[Shaped], kernel: Shaped, **options: Any) -> Tile:
    """Returns the tile measured on this device for these operands, else `default_tile`; same
    arguments.
    """
    tile = tile_table.measured(
        Tile, 'conv3x3/hopper', parts[0].dtype, shape_class(parts, kernel, **options)
    )
    return tile or default_tile(parts, kernel, **options)


def forward(
    parts: tuple[Image, ...],
    kernel: Float[Array, '3 3 _ _'],
    shift: Float[Array, '#batch features'],
    *,
    residual: Image | tuple[Image, ...] | None = None,
    shortcut: Float[Array, 'residual_channels features'] | None = None,
    affine: tuple[Float[Array, 'batch channels'], Float[Array, 'batch channels']] | None = None,
    flipped: bool = False,
    tile: Tile | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, 'batch height width features']:
    """conv3x3(act(x)) + shift + residual [· shortcut]: NHWC, stride 1, zero padding 1 after act.

    Products accumulate in float32, and sums are rounded once. float32 operands multiply as three
    bfloat16 products (about 16 bits).

    Args:
      parts: x, joined along channels; each part is read where it is. bfloat16, float16 or float32.
      kernel: of x's dtype, (3, 3, C, F); flipped: (3, 3, F, C).
      shift: float32; a bias (1, F), or a bias plus a time shift per sample (B, F).
      residual: of x's dtype; several parts if a shortcut projects it.
      shortcut: a 1×1 convolution of the residual, of x's dtype.
      affine: float32 (a, b): act(x) = SiLU(a · x + b), rounded to x's dtype; None: act(x) = x.
      flipped: convolve with `dispatch.flip(kernel)` without a copy: the input gradient of the
        convolution with `kernel`.
      tile: None takes `choose_tile`.
      out_dtype: None = x's dtype; or float32.

    Raises:
      ValueError: `supports` refuses the operands; the message says why.
    """
    parts, others = tuple(parts), _parts(residual)
    options: dict[str, Any] = {
        'residual': others,
        'shortcut': shortcut,
        'affine': affine,
        'flipped': flipped,
        'out_dtype': out_dtype,
    }
    reason = supports(parts, kernel, tile=tile, **options)
    if reason:
        raise ValueError(f'conv3x3 on Hopper: {reason}')
    return _forward(
        parts,
        kernel,
        shift,
        others,
        shortcut,
        affine,
        flipped=flipped,
        tile=tile or choose_tile(parts, kernel, **options),
        out_dtype=jnp.dtype(out_dtype or parts[0].dtype),
    )


# Jitted, so that equal calls share one trace and one lowering.
@functools.partial(jax.jit, static_argnames=('flipped', 'tile', 'out_dtype'))
def _forward(
    parts: tuple[Array, ...],
    kernel: Array,
    shift: Array,
    others: tuple[Array, ...],
    shortcut: Array | None,
    affine: tuple[Array, Array] | None,
    *,
    flipped: bool,
    tile: Tile,
    out_dtype: jnp.dtype,
) -> Array:
    dtype, features = parts[0].dtype, kernel.shape[-2 if flipped else -1]
    if affine is not None and dtype == jnp.float32:
        # A float32 must be split into bfloat16 terms after the activation.
        parts, affine = activated(parts, affine), None
    p = _plan(parts, features, others, shortcut, affine, flipped, tile, out_dtype)

    split = dtype == jnp.float32
    halves = _halves if split else list
    inputs = halves(parts)
    taps = kernel.reshape(TAPS, *kernel.shape[2:])
    matrices = [_weights(taps, flipped, p.outputs_first, split)]
    if shortcut is not None:
        inputs += halves(others)
        matrices.append(_weights(shortcut[None], False, p.outputs_first, split))
    elif others:
        inputs += bfloat16_terms(others[0], 3) if split else others
        columns = ceil_div(tile.features, CHUNK) * CHUNK
        matrices.append(jnp.eye(tile.features, columns, dtype=matrices[0].dtype)[None])
    missing = p.schedule.feature_tiles * tile.features - features
    shift = jnp.pad(shift.astype(jnp.float32), ((0, 0), (0, missing)))
    activation = [] if affine is None else [_padded(vector, _channels(parts)) for vector in affine]
    images = [x.reshape(*x.shape[:2], 1, *x.shape[2:]) for x in inputs]

    y = hopper_kernel.call(
        p, _silu if activation else None, out_dtype, [*images, *matrices, shift, *activation]
    )
    return y.reshape(*y.shape[:2], *y.shape[3:])


def _parts(residual: Shaped | Sequence[Shaped] | None) -> tuple[Shaped, ...]:
    """Returns a residual as a tuple of arrays: none, one or several."""
    if residual is None:
        return ()
    return tuple(residual) if isinstance(residual, Sequence) else (residual,)


def _channels(parts: Sequence[Shaped]) -> tuple[int, ...]:
    return tuple(part.shape[-1] for part in parts)


def _plan(
    parts: Sequence[Shaped],
    features: int,
    others: Sequence[Shaped],
    shortcut: Shaped | None,
    affine: tuple[Shaped, Shaped] | None,
    flipped: bool,
    tile: Tile,
    out_dtype: DTypeLike | None,
) -> Plan:
    batch, height, width, _ = parts[0].shape
    return plan(
        (batch, height, width),
        _channels(parts),
        features,
        tile,
        residual=_channels(others),
        shortcut=shortcut is not None,
        split=parts[0].dtype == jnp.float32,
        flipped=flipped,
        activated=affine is not None and parts[0].dtype != jnp.float32,
        itemsize=jnp.dtype(out_dtype or parts[0].dtype).itemsize,
    )


def _halves(parts: Sequence[Image]) -> list[Image]:
    """Returns the high halves of all parts, then the low ones."""
    pairs = [bfloat16_terms(part, 2) for part in parts]
    return [high for high, _ in pairs] + [low for _, low in pairs]


def _weights(
    matrices: Float[Array, 'taps rows columns'],
    outputs_first: bool,
    wanted_first: bool,
    split: bool,
) -> Array:
    """Returns the weights in the order in which the kernel reads them.

    Args:
      outputs_first, wanted_first: True if output channels come first: in `matrices`, and in the
        order that the kernel needs.
      split: concatenate them for the high, high and low halves of x.
    """
    if wanted_first and not outputs_first:
        matrices = jnp.swapaxes(matrices, 1, 2)
    if not split:
        return matrices
    high, low = bfloat16_terms(matrices, 2)
    return jnp.concatenate([high, low, high], axis=2 if wanted_first else 1)


def _silu(x: Array) -> Array:
    """Returns x · sigmoid(x) = h + h · tanh(h), h = x / 2: one special-function instruction."""
    half = x * 0.5
    return half + half * jnp.tanh(half)


def _padded(
    vector: Float[Array, 'batch channels'], widths: Sequence[int]
) -> Float[Array, 'batch _']:
    """Appends zeros to each part, up to whole chunks."""
    if not any(width % CHUNK for width in widths):
        return vector
    ends = itertools.accumulate(widths)
    parts = [
        jnp.pad(vector[:, end - width : end], ((0, 0), (0, -width % CHUNK)))
        for width, end in zip(widths, ends, strict=True)
    ]
    return jnp.concatenate(parts, axis=-1)
