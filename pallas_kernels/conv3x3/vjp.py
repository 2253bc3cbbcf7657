"""The convolution ops on the Pallas kernels, with their gradients.

Between forward and backward only raw convolution outputs are kept: the backward pass recomputes the
activation silu(norm(x)) for the weight gradient.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution, kept_for_backward, kernel_operands
from jaxunet.ops.group_norm import reference as norm_reference
from jaxunet.ops.group_norm.operands import Statistics
from jaxunet.ops.group_norm.operands import check_kernel_operands as check_norm_operands
from pallas_kernels import jax_modules
from pallas_kernels.checks import check_not_empty, check_shard_map
from pallas_kernels.conv3x3 import dispatch
from pallas_kernels.group_norm import dispatch as norm_dispatch
from pallas_kernels.group_norm.parameters import parameter_gradients


def conv3x3(conv: Convolution) -> Activation:
    """conv(x, kernel) + shift [+ residual, or residual · shortcut].

    See `jaxunet.ops.conv3x3.reference.conv3x3`. Products accumulate in float32. A product of
    float32 numbers is computed as three products of bfloat16 terms.

    Raises:
      ValueError: as `kernel_operands`, no samples or pixels, or a checked `shard_map`.
      UserError: the kernels do not run here; below too.
    """
    check_shard_map('conv3x3')
    conv = kernel_operands(conv)
    check_not_empty('conv3x3', 'x', conv.image.parts[0])
    jax_modules.check_runs()
    return Activation.of(_conv(conv))


def norm_silu_conv3x3(conv: Convolution) -> Activation:
    """conv3x3(SiLU(norm(x) · scale + offset)) + shift [+ residual].

    See `jaxunet.ops.conv3x3.reference.norm_silu_conv3x3`.

    Raises:
      ValueError: as `conv3x3`, or channels not a multiple of the norm's groups.
    """
    check_shard_map('norm_silu_conv3x3')
    conv = kernel_operands(conv, norm=True)
    x, norm = conv.image, conv.required_norm
    check_norm_operands(x, norm)
    check_not_empty('norm_silu_conv3x3', 'x', x.parts[0])
    if not norm_dispatch.supports('the norm of norm_silu_conv3x3', x.parts, norm.groups):
        active = norm_reference.group_norm(x, norm, silu=True)
        return Activation.of(_conv(conv.of(active)))
    return Activation.of(_norm_conv(conv))


@jax.custom_vjp
def _conv(conv: Convolution) -> Array:
    return _conv_forward(conv)[0]


def _conv_forward(conv: Convolution) -> tuple[Array, Convolution]:
    return dispatch.forward(conv), kept_for_backward(conv)


def _conv_backward(conv: Convolution, dy: Array) -> tuple[Convolution]:
    dx = dispatch.input_gradient(dy, conv.kernel, tuple(p.shape[-1] for p in conv.image.parts))
    return (dataclasses.replace(_parameter_gradients(conv, dy), image=Activation(dx)),)


def _parameter_gradients(conv: Convolution, dy: Array) -> Convolution:
    """Returns the convolution with the gradients of kernel, shift, residual and shortcut."""
    kernel = dispatch.weight_gradient(conv.image.parts, dy).astype(conv.kernel.dtype)
    shift = fold(dispatch.shift_gradient(dy), conv.shift)
    residual, shortcut = conv.residual, conv.shortcut
    if residual is not None and shortcut is None:
        residual = Activation.of(dy)
    elif residual is not None:
        residual, shortcut = jax.vjp(dispatch.project, residual, shortcut)[1](dy)
    return dataclasses.replace(
        conv, kernel=kernel, shift=shift, residual=residual, shortcut=shortcut
    )


@jax.custom_vjp
def _norm_conv(conv: Convolution) -> Array:
    return _norm_conv_forward(conv)[0]


def _norm_conv_forward(conv: Convolution) -> tuple[Array, tuple[Convolution, Statistics]]:
    parts, norm = conv.image.parts, conv.required_norm
    if dispatch.fuses_activation(parts[0]):
        affine, stats = norm_dispatch.affine(parts, norm)
        y = dispatch.forward(conv, affine)
    else:
        active, stats = norm_dispatch.normalise(parts, norm, silu=True)
        y = dispatch.forward(conv.of(active))
    return y, (kept_for_backward(conv), stats)


def _norm_conv_backward(saved: tuple[Convolution, Statistics], dy: Array) -> tuple[Convolution]:
    conv, stats = saved
    parts, norm = conv.image.parts, conv.required_norm
    (dactive,) = dispatch.input_gradient(dy, conv.kernel, (conv.image.channels,))
    sums, active = norm_dispatch.gradient_sums(
        parts, dactive, norm, stats, silu=True, activation=True
    )
    assert active is not None, 'asked for with activation=True'
    dx = norm_dispatch.gradient(parts, dactive, norm, stats, sums, silu=True)
    of_norm = parameter_gradients(sums, norm)
    gradients = _parameter_gradients(conv.of(active), dy)
    return (dataclasses.replace(gradients, image=Activation(dx), norm=of_norm),)


def fold(
    per_sample: Float[Array, 'batch channels'], like: Float[Array, '#batch _']
) -> Float[Array, '#batch channels']:
    """Returns a per-sample gradient, summed over the batch if the parameter is shared."""
    value = (
        per_sample
        if like.shape[0] == per_sample.shape[0]
        else jnp.sum(per_sample, axis=0, keepdims=True)
    )
    return value.astype(like.dtype)


_conv.defvjp(_conv_forward, _conv_backward)
_norm_conv.defvjp(_norm_conv_forward, _norm_conv_backward)
