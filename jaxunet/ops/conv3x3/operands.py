"""The operands of the convolution ops as kernels take them, and the checks that every backend makes."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation

Image = Float[Array, 'batch height width _']
Parts = tuple[Image, ...]
Affine = tuple[Float[Array, 'batch channels'], Float[Array, 'batch channels']]


class Added(NamedTuple):
    """What is added to a convolution: one part as it is, or several through a 1×1 convolution."""

    parts: Parts
    shortcut: Float[Array, 'residual_channels features'] | None


def check_operands(
    x: Activation, kernel: Array, shift: Array, residual: Activation | None, shortcut: Array | None
) -> Added | None:
    """What the convolution's last step adds, once everything fits; ValueError where it does not."""
    batch, height, width, _ = x.parts[0].shape
    others = () if residual is None else residual.parts
    for name, parts in (('x', x.parts), ('residual', others)):
        for i, part in enumerate(parts):
            if part.shape[:3] != (batch, height, width) or part.dtype != x.dtype:
                expected = f'{x.dtype}[{batch}, {height}, {width}, channels]'
                raise ValueError(
                    f'conv3x3: {name}.parts[{i}] is {part.dtype}{list(part.shape)}; expected {expected}'
                )
    if kernel.ndim != 4 or kernel.shape[:3] != (3, 3, x.channels):
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
        return None
    if shortcut is None:
        if residual.channels != features:
            raise ValueError(
                f'conv3x3: residual: {residual.channels} channels; expected {features}, or a shortcut'
            )
        return Added((residual.value,), None)
    if shortcut.shape != (residual.channels, features):
        raise ValueError(
            f'conv3x3: shortcut: shape {list(shortcut.shape)}; expected [{residual.channels}, {features}]'
        )
    return Added(residual.parts, shortcut)


def needed(added: Added | None) -> Added | tuple[()] | None:
    """What the gradient of the addition needs: nothing of a plain residual, whose gradient is dy."""
    return () if added is not None and added.shortcut is None else added


def outline(parameter: Array) -> Array:
    """An empty array that remembers a parameter's first axis and type: shape (rows, 0)."""
    return parameter[:, :0]
