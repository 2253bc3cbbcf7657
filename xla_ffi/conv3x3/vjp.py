"""The convolution ops as calls of the FFI handlers, with their gradients.

`FUSED_PIXELS` decides whether the forward pass applies the norm inside the convolution or in a
separate kernel before it. In the first case, the norm's gradient kernel recomputes the activation
silu(norm(x)) for the weight gradient; in the second, it is kept (`_keeps_activation`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import (
    Added,
    Parts,
    checked_residual,
    kept_for_backward,
    outline,
)
from jaxunet.ops.group_norm.operands import check_kernel_operands as check_norm_operands
from jaxunet.ops.vocabulary import WithInput, check_copies
from jaxunet.runtime import device
from xla_ffi.checks import check_parts
from xla_ffi.conv3x3.calls import convolve, input_gradient
from xla_ffi.conv3x3.parameter_gradients import parameter_gradients
from xla_ffi.group_norm.vjp import Copies, gradient, normalise, statistics

# Smallest images, in pixels, for which the forward convolutions apply GroupNorm and SiLU
# themselves: a tile is activated once for its nine taps, while the tensor cores work. For smaller
# images, a separate kernel and a convolution without activation are faster together, because the
# activation is then kept for the backward pass. To refit, time steps with tools/gpu/steps.py.
FUSED_PIXELS = 4096
FEW = 8  # most features of the kernel for few features: kFew in dispatch.h


def conv3x3(
    x: Activation,
    kernel: Float[Array, '3 3 channels features'],
    shift: Float[Array, '#batch features'],
    *,
    residual: Activation | None = None,
    shortcut: Float[Array, 'residual_channels features'] | None = None,
) -> Activation:
    """conv(x, kernel) + shift [+ residual, or residual · shortcut].

    See `jaxunet.ops.conv3x3.reference.conv3x3`.

    Raises:
      ValueError: shapes or types that do not fit each other, a shortcut without a residual, or more
        than `MAX_PARTS` parts.
    """
    added = _checked(x, kernel, shift, residual, shortcut)
    return Activation.of(_conv(x.parts, kernel, shift, added))


def norm_silu_conv3x3(
    x: Activation,
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    kernel: Float[Array, '3 3 channels features'],
    shift: Float[Array, '#batch features'],
    *,
    residual: Activation | None = None,
    shortcut: Float[Array, 'residual_channels features'] | None = None,
    groups: int = 32,
    eps: float = 1e-5,
) -> Activation:
    """conv3x3(SiLU(norm(x) · scale + offset)) + shift [+ residual].

    See `jaxunet.ops.conv3x3.reference.norm_silu_conv3x3`.

    Raises:
      ValueError: shapes or types that do not fit each other, a shortcut without a residual,
        channels not a multiple of `groups`, or more than `MAX_PARTS` parts.
    """
    added = _checked(x, kernel, shift, residual, shortcut)
    check_norm_operands(x, scale, offset, groups)
    y, _ = _norm_conv(x, scale, offset, kernel, shift, added, groups, eps, 0)
    return Activation.of(y)


def norm_silu_conv3x3_and_input(
    x: Activation,
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    kernel: Float[Array, '3 3 channels features'],
    shift: Float[Array, '#batch features'],
    *,
    residual: Activation | None = None,
    shortcut: Float[Array, 'residual_channels features'] | None = None,
    groups: int = 32,
    eps: float = 1e-5,
    copies: int = 1,
) -> WithInput[Activation]:
    """`norm_silu_conv3x3` and copies of x for its other readers.

    The norm's backward kernel adds the gradients of the copies, as
    `xla_ffi.group_norm.vjp.group_norm_and_input`.

    Raises:
      ValueError: as `norm_silu_conv3x3`, or `copies` is not 1 to `MAX_COPIES`.
    """
    added = _checked(x, kernel, shift, residual, shortcut)
    check_norm_operands(x, scale, offset, groups)
    check_copies('norm_silu_conv3x3', copies)
    y, passed = _norm_conv(x, scale, offset, kernel, shift, added, groups, eps, copies)
    return WithInput(Activation.of(y), tuple(Activation(parts) for parts in passed))


def _checked(
    x: Activation, kernel: Array, shift: Array, residual: Activation | None, shortcut: Array | None
) -> Added | None:
    """Checks the operands and returns the residual; see `checked_residual` and `check_parts`."""
    added = checked_residual(x, kernel, shift, residual, shortcut)
    check_parts('conv3x3', 'x', x)
    if residual is not None and shortcut is not None:  # other residuals become one array
        check_parts('conv3x3', 'residual', residual)
    return added


# Saved for the backward pass of the plain convolution: the input, the kernel, the outline of the
# shift, and what `kept_for_backward` keeps of the residual.
ConvSaved = tuple[Parts, Array, Array, Added | tuple[()] | None]


@jax.custom_vjp
def _conv(parts: Parts, kernel: Array, shift: Array, added: Added | None) -> Array:
    return convolve(parts, kernel, shift, added, None)


def _conv_forward(
    parts: Parts, kernel: Array, shift: Array, added: Added | None
) -> tuple[Array, ConvSaved]:
    saved = (parts, kernel, outline(shift), kept_for_backward(added))
    return _conv(parts, kernel, shift, added), saved


def _conv_backward(saved: ConvSaved, dy: Array) -> tuple[Parts, Array, Array, Added | None]:
    parts, kernel, shift, added = saved
    dx = input_gradient(dy, kernel, tuple(p.shape[3] for p in parts))
    _, dkernel, dshift, dadded = parameter_gradients(parts, kernel, shift, added, dy)
    return dx, dkernel, dshift, dadded


def _fuses_activation(parts: Parts, features: int) -> bool:
    """Returns True if the convolution applies GroupNorm and SiLU to its input.

    This is for kernels that read a tile once for its nine taps; the implicit GEMM applies them once
    per tap. Without the Hopper kernels, only the kernel for few features is left.
    """
    if device.portable() and features > FEW:
        return False
    tiled = parts[0].dtype != jnp.float32 and all(part.shape[3] % 8 == 0 for part in parts)
    return tiled and parts[0].shape[1] * parts[0].shape[2] >= FUSED_PIXELS


def _keeps_activation() -> bool:
    """Returns True if an activation in memory is kept between forward and backward.

    This saves the norm's gradient kernel from writing it again. On Hopper it costs little memory:
    most weight gradients are computed together (`xla_ffi/weight_gradients`), so the activations of
    their layers are then in memory anyway. Portable kernels recompute it.
    """
    return not device.portable()


class _NormSaved(NamedTuple):
    """The arrays saved for the backward pass of `_norm_conv`.

    Fields:
      shift: its `outline`.
      added: what `kept_for_backward` keeps of the residual.
      mean, inverse: of the channel's group, for every sample and channel.
      active: the convolution's input; None if the convolution has applied the norm itself, or if
        it is not kept.
    """

    x: Activation
    scale: Array
    offset: Array
    kernel: Array
    shift: Array
    added: Added | tuple[()] | None
    mean: Array
    inverse: Array
    active: Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _norm_conv(
    x: Activation,
    scale: Array,
    offset: Array,
    kernel: Array,
    shift: Array,
    added: Added | None,
    groups: int,
    eps: float,
    copies: int,
) -> tuple[Array, Copies]:
    return _norm_conv_forward(x, scale, offset, kernel, shift, added, groups, eps, copies)[0]


def _norm_conv_forward(
    x: Activation,
    scale: Array,
    offset: Array,
    kernel: Array,
    shift: Array,
    added: Added | None,
    groups: int,
    eps: float,
    copies: int,
) -> tuple[tuple[Array, Copies], _NormSaved]:
    if _fuses_activation(x.parts, kernel.shape[3]):
        a, b, mean, inverse = statistics(x, scale, offset, groups=groups, eps=eps)
        active, y = None, convolve(x.parts, kernel, shift, added, (a, b))
    else:
        active, mean, inverse = normalise(x, scale, offset, groups=groups, eps=eps, silu=True)
        y = convolve((active,), kernel, shift, added, None)
    kept = kept_for_backward(added)
    return (y, (x.parts,) * copies), _NormSaved(
        x,
        scale,
        offset,
        kernel,
        outline(shift),
        kept,
        mean,
        inverse,
        active if _keeps_activation() else None,
    )


def _norm_conv_backward(
    groups: int, eps: float, copies: int, saved: _NormSaved, given: tuple[Array, Copies]
) -> tuple[Activation, Array, Array, Array, Array, Added | None]:
    del eps, copies
    (dy, passed), (x, scale, offset, kernel, shift, added, mean, inverse, active) = given, saved
    (dactive,) = input_gradient(dy, kernel, (x.channels,))
    # If the activation was not kept, this launch also writes it for the weight gradient, because
    # activating the strips inside that kernel would halve its speed. If samples share scale and
    # offset, the weight gradient's last launch adds their sums over the samples.
    shared = scale.shape[0] == offset.shape[0] == 1
    found = gradient(
        x.parts,
        dactive,
        scale,
        offset,
        mean,
        inverse,
        groups=groups,
        silu=True,
        activation=active is None,
        added=passed,
        samples=not shared,
    )
    of_norm = found.sums if shared else None
    read = found.active if active is None else (active,)
    others = parameter_gradients(read, kernel, shift, added, dy, of_norm)
    of_scale, of_offset = others.norm if shared else found.norm
    return (
        Activation(found.dx),
        of_scale.astype(scale.dtype),
        of_offset.astype(offset.dtype),
        others.kernel,
        others.shift,
        others.added,
    )


_conv.defvjp(_conv_forward, _conv_backward)
_norm_conv.defvjp(_norm_conv_forward, _norm_conv_backward)
