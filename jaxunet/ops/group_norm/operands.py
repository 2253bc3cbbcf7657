"""The parameters of a GroupNorm, and the checks of its operands that every backend makes."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.checks import (
    MAX_SAMPLES,
    check_count,
    check_floating,
    check_image,
    check_kernel_type,
)

# a and b of norm(x) · scale + offset = a · x + b, for each sample, in float32.
Affine = tuple[Float[Array, 'batch channels'], Float[Array, 'batch channels']]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """The parameters of a GroupNorm: norm(x) · scale + offset. A tree of the two arrays.

    Fields:
      scale, offset: (1, channels), or (batch, channels) for a scale-shift norm.
      groups: divides the channels.
      eps: added to the variance.
    """

    scale: Array
    offset: Array
    groups: int = dataclasses.field(default=32, metadata={'static': True})
    eps: float = dataclasses.field(default=1e-5, metadata={'static': True})

    def with_gradients(self, scale: Array, offset: Array) -> Norm:
        """Returns the gradients of the parameters, in the types of the parameters."""
        return dataclasses.replace(
            self, scale=scale.astype(self.scale.dtype), offset=offset.astype(self.offset.dtype)
        )


class Statistics(NamedTuple):
    """The statistics of the group of every channel, for each sample, in float32.

    Fields:
      inverse: 1 / sqrt(variance + eps).
    """

    mean: Float[Array, 'batch channels']
    inverse: Float[Array, 'batch channels']


def check_operands(x: Activation, norm: Norm) -> None:
    """Checks that x and the parameters fit each other, and that x has pixels.

    Raises:
      ValueError: shapes or types do not fit, or there are no pixels, and so no statistics; the
        message names the operand.
    """
    if not x.parts:
        raise ValueError('group_norm: x: no parts; give at least one array')
    first = x.parts[0]
    check_floating('group_norm', x=first, scale=norm.scale, offset=norm.offset)
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
    for name, value in (('scale', norm.scale), ('offset', norm.offset)):
        if list(value.shape) not in (shared, own):
            raise ValueError(
                f'group_norm: {name}: shape {list(value.shape)}; expected {shared} or {own}'
            )


def check_kernel_operands(x: Activation, norm: Norm) -> None:
    """Checks the operands for a backend's kernels.

    Raises:
      ValueError: as `check_operands` and `group_size`, or the kernels do not take x's type, or this
        many samples or pixels.
    """
    check_operands(x, norm)
    check_kernel_type('group_norm', 'x', x.parts[0])
    check_kernel_sizes(x)
    group_size(x.channels, norm.groups)


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
