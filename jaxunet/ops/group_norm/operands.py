"""The checks of GroupNorm's operands that every backend makes."""

from __future__ import annotations

from jaxtyping import Array

from jaxunet.ops.activation import Activation
from jaxunet.ops.checks import (
    MAX_SAMPLES,
    check_count,
    check_floating,
    check_image,
    check_kernel_type,
)


def check_operands(x: Activation, scale: Array, offset: Array) -> None:
    """Checks that x, scale and offset fit each other, and that x has pixels.

    Raises:
      ValueError: shapes or types do not fit, or there are no pixels, and so no statistics; the
        message names the operand.
    """
    if not x.parts:
        raise ValueError('group_norm: x: no parts; give at least one array')
    first = x.parts[0]
    check_floating('group_norm', x=first, scale=scale, offset=offset)
    for i, part in enumerate(x.parts):
        check_image('group_norm', f'x.parts[{i}]', part)
        if part.shape[:3] != first.shape[:3]:
            raise ValueError(
                f'group_norm: x.parts[{i}]: shape {list(part.shape)}, but x.parts[0] has '
                f'{list(first.shape[:3])}; parts may differ in channels only'
            )
        if part.dtype != first.dtype:
            raise ValueError(
                f'group_norm: x.parts[{i}]: {part.dtype}, but x.parts[0] is {first.dtype}; '
                f'convert one of them'
            )
    if 0 in first.shape[1:3]:
        raise ValueError(f'group_norm: x: shape {list(first.shape)}: no pixels; give at least one')
    shared, own = [1, x.channels], [first.shape[0], x.channels]
    for name, value in (('scale', scale), ('offset', offset)):
        if list(value.shape) not in (shared, own):
            raise ValueError(
                f'group_norm: {name}: shape {list(value.shape)}; expected {shared} or {own}'
            )


def check_kernel_operands(x: Activation, scale: Array, offset: Array, groups: int) -> None:
    """Checks the operands for a backend's kernels.

    Raises:
      ValueError: as `check_operands` and `group_size`, or the kernels do not take x's type, or this
        many samples or pixels.
    """
    check_operands(x, scale, offset)
    check_kernel_type('group_norm', 'x', x.parts[0])
    check_kernel_sizes(x)
    group_size(x.channels, groups)


def check_kernel_sizes(x: Activation) -> None:
    """Checks that x has no more samples and pixels than a backend's kernels take.

    Raises:
      ValueError: it has more.
    """
    batch, height, width, _ = x.parts[0].shape
    check_count('group_norm', 'x', 'samples', batch, MAX_SAMPLES)
    check_count('group_norm', 'x', 'pixels of a sample', height * width)


def group_size(channels: int, groups: int) -> int:
    """Returns the channels of a group.

    Raises:
      ValueError: `groups` does not divide the channels.
    """
    if groups < 1 or channels % groups:
        raise ValueError(f'group_norm: {channels} channels are not a multiple of {groups} groups')
    return channels // groups
