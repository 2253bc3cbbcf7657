"""The operands of the convolution ops, and the checks that every backend makes."""

from __future__ import annotations

import dataclasses
import math

import jax
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.checks import check_count, check_floating, check_image, check_kernel_type
from jaxunet.ops.group_norm.operands import Norm

Image = Float[Array, 'batch height width _']
Parts = tuple[Image, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolution:
    """A 3×3 convolution: conv(act(image), kernel) + shift [+ residual, or residual · shortcut].

    Stride 1; zero padding of one pixel after act. A tree of its arrays.

    Fields:
      image: (batch, height, width, channels); x in formulas and errors.
      norm: act is SiLU(GroupNorm(image)); None: act is the identity.
      kernel: (3, 3, channels, features).
      shift: (1, features) is a bias; (batch, features) adds an embedding of each sample to it.
      residual: (batch, height, width, features), or other channels with a shortcut.
      shortcut: (channels of the residual, features), a 1×1 convolution.
    """

    image: Activation
    norm: Norm | None = None
    kernel: Array
    shift: Array
    residual: Activation | None = None
    shortcut: Array | None = None

    def of(self, image: Float[Array, 'batch height width channels']) -> Convolution:
        """Returns the convolution of another image, to which norm and SiLU have been applied."""
        return dataclasses.replace(self, image=Activation.of(image), norm=None)

    @property
    def required_norm(self) -> Norm:
        """The norm of an op that has one.

        Raises:
          ValueError: there is none.
        """
        if self.norm is None:
            raise ValueError('norm_silu_conv3x3: norm: expected a Norm, found None')
        return self.norm


def check_operands(conv: Convolution, *, norm: bool = False) -> None:
    """Checks that the operands of a convolution op fit each other, but for those of the norm.

    Args:
      norm: the op applies a norm.

    Raises:
      ValueError: shapes or types do not fit, or a shortcut has no residual; names the operand. Or
        a norm is given to an op that applies none.
    """
    x, kernel, shift, shortcut = conv.image, conv.kernel, conv.shift, conv.shortcut
    if conv.norm is not None and not norm:
        raise ValueError('conv3x3: norm: expected None; norm_silu_conv3x3 applies a norm')
    if not x.parts:
        raise ValueError('conv3x3: x: no parts; give at least one array')
    check_image('conv3x3', 'x', x.parts[0])
    check_floating('conv3x3', x=x.parts[0], kernel=kernel, shift=shift, shortcut=shortcut)
    batch, height, width, _ = x.parts[0].shape
    residual = Activation(()) if conv.residual is None else conv.residual
    for name, parts in (('x', x.parts), ('residual', residual.parts)):
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
    if conv.residual is None:
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


def kernel_operands(conv: Convolution, *, norm: bool = False) -> Convolution:
    """Checks the operands and returns them as kernels take them.

    A residual without a shortcut becomes one array.

    Raises:
      ValueError: as `check_operands`, or the kernels do not take x's type or this many pixels.
    """
    check_operands(conv, norm=norm)
    check_kernel_type('conv3x3', 'x', conv.image.parts[0])
    check_count('conv3x3', 'x', 'pixels', math.prod(conv.image.parts[0].shape[:3]))
    if conv.residual is None or conv.shortcut is not None:
        return conv
    return dataclasses.replace(conv, residual=Activation.of(conv.residual.value))


def kept_for_backward(conv: Convolution) -> Convolution:
    """Returns what the gradients read: of the shift, its `outline`.

    A residual without a shortcut has no parts then, because its gradient is dy.
    """
    added = conv.residual is not None and conv.shortcut is None
    residual = Activation(()) if added else conv.residual
    return dataclasses.replace(conv, shift=outline(conv.shift), residual=residual)


def outline(parameter: Array) -> Array:
    """Returns an empty array with a parameter's first axis and type: shape (rows, 0).

    The backward pass reads shape and type from it without keeping the values.
    """
    return parameter[:, :0]
