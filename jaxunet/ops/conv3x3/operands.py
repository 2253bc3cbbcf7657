"""The operands of the convolution ops as kernels take them, and the checks of every backend."""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.checks import check_count, check_floating, check_image, check_kernel_type

Image = Float[Array, 'batch height width _']
Parts = tuple[Image, ...]
# a and b of SiLU(a · x + b): GroupNorm and SiLU, applied to a tile while it is in shared memory.
Affine = tuple[Float[Array, 'batch channels'], Float[Array, 'batch channels']]


class Added(NamedTuple):
    """The residual that the epilogue adds: one part as it is, or several through a 1×1 shortcut."""

    parts: Parts
    shortcut: Float[Array, 'residual_channels features'] | None


def check_operands(
    x: Activation, kernel: Array, shift: Array, residual: Activation | None, shortcut: Array | None
) -> None:
    """Checks that the operands of a convolution op fit each other.

    Raises:
      ValueError: shapes or types do not fit, or a shortcut has no residual; names the operand.
    """
    if not x.parts:
        raise ValueError('conv3x3: x: no parts; give at least one array')
    check_image('conv3x3', 'x', x.parts[0])
    check_floating('conv3x3', x=x.parts[0], kernel=kernel, shift=shift, shortcut=shortcut)
    batch, height, width, _ = x.parts[0].shape
    others = () if residual is None else residual.parts
    for name, parts in (('x', x.parts), ('residual', others)):
        for i, part in enumerate(parts):
            fits = part.ndim == 4 and part.shape[:3] == (batch, height, width) and part.shape[3]
            if not fits or part.dtype != x.dtype:
                raise ValueError(
                    f'conv3x3: {name}.parts[{i}] is {part.dtype}{list(part.shape)}; '
                    f'expected {x.dtype}[{batch}, {height}, {width}, channels]'
                )
    if kernel.ndim != 4 or kernel.shape[:3] != (3, 3, x.channels) or not kernel.shape[3]:
        raise ValueError(
            f'conv3x3: kernel: shape {list(kernel.shape)}; expected [3, 3, {x.channels}, features]'
        )
    features = kernel.shape[3]
    if shift.shape not in ((1, features), (batch, features)):
        raise ValueError(
            f'conv3x3: shift: shape {list(shift.shape)}; expected [1 or {batch}, {features}]'
        )
    if residual is None:
        if shortcut is not None:
            raise ValueError('conv3x3: a shortcut needs a residual to be applied to')
    elif shortcut is None:
        if residual.channels != features:
            raise ValueError(
                f'conv3x3: residual: {residual.channels} channels; expected {features}, '
                f'or a shortcut'
            )
    elif shortcut.shape != (residual.channels, features):
        raise ValueError(
            f'conv3x3: shortcut: shape {list(shortcut.shape)}; '
            f'expected [{residual.channels}, {features}]'
        )


def checked_residual(
    x: Activation, kernel: Array, shift: Array, residual: Activation | None, shortcut: Array | None
) -> Added | None:
    """Checks the operands and returns the residual as kernels take it.

    Raises:
      ValueError: as `check_operands`, or the kernels do not take x's type or this many pixels.
    """
    check_operands(x, kernel, shift, residual, shortcut)
    check_kernel_type('conv3x3', 'x', x.parts[0])
    check_count('conv3x3', 'x', 'pixels', math.prod(x.parts[0].shape[:3]))
    if residual is None:
        return None
    if shortcut is None:
        return Added((residual.value,), None)
    return Added(residual.parts, shortcut)


def kept_for_backward(added: Added | None) -> Added | tuple[()] | None:
    """Returns the operands that the gradient of the addition reads.

    This is empty, (), for a residual without a shortcut: its gradient is dy.
    """
    return () if added is not None and added.shortcut is None else added


def outline(parameter: Array) -> Array:
    """Returns an empty array with a parameter's first axis and type: shape (rows, 0).

    The backward pass reads shape and type from it without keeping the values.
    """
    return parameter[:, :0]
