"""The convolution ops as calls of the FFI handlers, with their gradients.

`FUSED_PIXELS` decides whether the forward pass applies the norm inside the convolution or in a
separate kernel before it. In the first case, the norm's gradient kernel recomputes the activation
silu(norm(x)) for the weight gradient; in the second, it is kept (`_keeps_activation`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution, Parts, kept_for_backward, kernel_operands
from jaxunet.ops.group_norm.operands import Statistics
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


def conv3x3(conv: Convolution) -> Activation:
    """conv(x, kernel) + shift [+ residual, or residual · shortcut].

    See `jaxunet.ops.conv3x3.reference.conv3x3`.

    Raises:
      ValueError: as `kernel_operands`, or more than `MAX_PARTS` parts.
    """
    return Activation.of(_conv(_checked(conv)))


def norm_silu_conv3x3(conv: Convolution) -> Activation:
    """conv3x3(SiLU(norm(x) · scale + offset)) + shift [+ residual].

    See `jaxunet.ops.conv3x3.reference.norm_silu_conv3x3`.

    Raises:
      ValueError: as `conv3x3`, or channels not a multiple of the norm's groups.
    """
    y, _ = _norm_conv(_checked(conv, norm=True), 0)
    return Activation.of(y)


def norm_silu_conv3x3_and_input(conv: Convolution, *, copies: int = 1) -> WithInput[Activation]:
    """`norm_silu_conv3x3` and copies of x for its other readers.

    The norm's backward kernel adds the gradients of the copies, as
    `xla_ffi.group_norm.vjp.group_norm_and_input`.

    Raises:
      ValueError: as `norm_silu_conv3x3`, or `copies` is not 1 to `MAX_COPIES`.
    """
    conv = _checked(conv, norm=True)
    check_copies('norm_silu_conv3x3', copies)
    y, passed = _norm_conv(conv, copies)
    return WithInput(Activation.of(y), tuple(Activation(parts) for parts in passed))


def _checked(conv: Convolution, *, norm: bool = False) -> Convolution:
    """Checks the operands; see `kernel_operands` and `check_parts`."""
    conv = kernel_operands(conv, norm=norm)
    check_parts('conv3x3', 'x', conv.image)
    if conv.residual is not None:  # without a shortcut, it is one array
        check_parts('conv3x3', 'residual', conv.residual)
    if norm:
        check_norm_operands(conv.image, conv.required_norm)
    return conv


@jax.custom_vjp
def _conv(conv: Convolution) -> Array:
    return convolve(conv)


def _conv_forward(conv: Convolution) -> tuple[Array, Convolution]:
    return _conv(conv), kept_for_backward(conv)


def _conv_backward(conv: Convolution, dy: Array) -> tuple[Convolution]:
    dx = input_gradient(dy, conv.kernel, tuple(p.shape[3] for p in conv.image.parts))
    gradients, _ = parameter_gradients(conv, dy)
    return (dataclasses.replace(gradients, image=Activation(dx)),)


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
    """The arrays that are saved for the backward pass of `_norm_conv`.

    Fields:
      conv: what `kept_for_backward` keeps.
      active: the convolution's input; None if the convolution has applied the norm itself, or if
        it is not kept.
    """

    conv: Convolution
    stats: Statistics
    active: Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _norm_conv(conv: Convolution, copies: int) -> tuple[Array, Copies]:
    return _norm_conv_forward(conv, copies)[0]


def _norm_conv_forward(conv: Convolution, copies: int) -> tuple[tuple[Array, Copies], _NormSaved]:
    x, norm = conv.image, conv.required_norm
    if _fuses_activation(x.parts, conv.kernel.shape[3]):
        affine, stats = statistics(x, norm)
        active, y = None, convolve(conv, affine)
    else:
        active, stats = normalise(x, norm, silu=True)
        y = convolve(conv.of(active))
    kept = active if _keeps_activation() else None
    return (y, (x.parts,) * copies), _NormSaved(kept_for_backward(conv), stats, kept)


def _norm_conv_backward(
    copies: int, saved: _NormSaved, given: tuple[Array, Copies]
) -> tuple[Convolution]:
    del copies
    (dy, passed), (conv, stats, active) = given, saved
    x, norm = conv.image, conv.required_norm
    (dactive,) = input_gradient(dy, conv.kernel, (x.channels,))
    # If the activation was not kept, this launch also writes it for the weight gradient, because
    # activating the strips inside that kernel would halve its speed. If samples share scale and
    # offset, the weight gradient's last launch adds their sums over the samples.
    shared = norm.scale.shape[0] == norm.offset.shape[0] == 1
    of_input = gradient(
        x.parts,
        dactive,
        norm,
        stats,
        silu=True,
        rounded=True,
        activation=active is None,
        added=passed,
        samples=not shared,
    )
    if active is None:
        (active,) = of_input.active
    gradients, rows = parameter_gradients(conv.of(active), dy, of_input.sums if shared else None)
    of_norm = norm.with_gradients(*rows) if shared else of_input.norm
    return (dataclasses.replace(gradients, image=Activation(of_input.dx), norm=of_norm),)


_conv.defvjp(_conv_forward, _conv_backward)
_norm_conv.defvjp(_norm_conv_forward, _norm_conv_backward)
