"""The convolution ops on the Pallas kernels, with their gradients.

Between forward and backward only raw convolution outputs are kept: the backward pass recomputes the
activation silu(norm(x)) for the weight gradient.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Added, Parts, checked_residual, kept_for_backward, outline
from jaxunet.ops.group_norm import reference as norm_reference
from jaxunet.ops.group_norm.operands import check_kernel_operands as check_norm_operands
from pallas_kernels import jax_modules
from pallas_kernels.checks import check_not_empty, check_shard_map
from pallas_kernels.conv3x3 import dispatch
from pallas_kernels.group_norm import dispatch as norm_dispatch
from pallas_kernels.group_norm.parameters import parameter_gradients


def conv3x3(
    x: Activation,
    kernel: Float[Array, '3 3 channels features'],
    shift: Float[Array, '#batch features'],
    *,
    residual: Activation | None = None,
    shortcut: Float[Array, 'residual_channels features'] | None = None,
) -> Activation:
    """conv(x, kernel) + shift [+ residual, or residual · shortcut].

    See `jaxunet.ops.conv3x3.reference.conv3x3`. Products accumulate in float32. A product of
    float32 numbers is computed as three products of bfloat16 terms.

    Raises:
      ValueError: shapes or types that do not fit each other, no samples or pixels, a shortcut
        without a residual, or a checked `shard_map`.
      UserError: the kernels do not run here; below too.
    """
    check_shard_map('conv3x3')
    added = checked_residual(x, kernel, shift, residual, shortcut)
    check_not_empty('conv3x3', 'x', x.parts[0])
    jax_modules.check_runs()
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
      ValueError: shapes or types that do not fit each other, no samples, a shortcut without a
        residual, channels not a multiple of `groups`, or a checked `shard_map`.
    """
    check_shard_map('norm_silu_conv3x3')
    added = checked_residual(x, kernel, shift, residual, shortcut)
    check_norm_operands(x, scale, offset, groups)
    check_not_empty('norm_silu_conv3x3', 'x', x.parts[0])
    if not norm_dispatch.takes('the norm of norm_silu_conv3x3', x.parts, groups):
        active = norm_reference.group_norm(x, scale, offset, groups=groups, eps=eps, silu=True)
        return Activation.of(_conv((active,), kernel, shift, added))
    return Activation.of(_norm_conv(x, scale, offset, kernel, shift, added, groups, eps))


# Saved for the backward pass of the plain convolution: the input, the kernel, the outline of the
# shift, and what `kept_for_backward` keeps of the residual.
ConvSaved = tuple[Parts, Array, Array, Added | tuple[()] | None]


@jax.custom_vjp
def _conv(parts: Parts, kernel: Array, shift: Array, added: Added | None) -> Array:
    return _conv_forward(parts, kernel, shift, added)[0]


def _conv_forward(
    parts: Parts, kernel: Array, shift: Array, added: Added | None
) -> tuple[Array, ConvSaved]:
    saved = (parts, kernel, outline(shift), kept_for_backward(added))
    return dispatch.forward(parts, kernel, shift, added), saved


def _conv_backward(saved: ConvSaved, dy: Array) -> tuple[Parts, Array, Array, Added | None]:
    parts, kernel, shift, added = saved
    dx = dispatch.input_gradient(dy, kernel, tuple(p.shape[-1] for p in parts))
    return dx, *_parameter_gradients(parts, kernel, shift, added, dy)


def _parameter_gradients(
    parts: Parts, kernel: Array, shift: Array, added: Added | tuple[()] | None, dy: Array
) -> tuple[Array, Array, Added | None]:
    """Returns the gradients of kernel, shift and residual; `parts` are the convolution's input."""
    dkernel = dispatch.weight_gradient(parts, dy).astype(kernel.dtype)
    return (
        dkernel,
        fold(dispatch.shift_gradient(dy), shift),
        added_gradient(added, dy),
    )


def added_gradient(added: Added | tuple[()] | None, dy: Array) -> Added | None:
    """Returns the gradient of the residual, from what `kept_for_backward` kept of it."""
    if added is None:
        return None
    if not isinstance(added, Added):
        return Added((dy,), None)
    _, pull = jax.vjp(dispatch.project, added)
    return cast(Added, pull(dy)[0])


class _NormSaved(NamedTuple):
    """The arrays saved for the backward pass of `_norm_conv`.

    Fields:
      shift: its `outline`.
      added: what `kept_for_backward` keeps of the residual.
      mean, inverse: of the channel's group, for every sample and channel.
    """

    x: Activation
    scale: Array
    offset: Array
    kernel: Array
    shift: Array
    added: Added | tuple[()] | None
    mean: Array
    inverse: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _norm_conv(
    x: Activation,
    scale: Array,
    offset: Array,
    kernel: Array,
    shift: Array,
    added: Added | None,
    groups: int,
    eps: float,
) -> Array:
    return _norm_conv_forward(x, scale, offset, kernel, shift, added, groups, eps)[0]


def _norm_conv_forward(
    x: Activation,
    scale: Array,
    offset: Array,
    kernel: Array,
    shift: Array,
    added: Added | None,
    groups: int,
    eps: float,
) -> tuple[Array, _NormSaved]:
    if dispatch.fuses_activation(x.parts[0]):
        a, b, mean, inverse = norm_dispatch.affine(x.parts, scale, offset, groups=groups, eps=eps)
        y = dispatch.forward(x.parts, kernel, shift, added, (a, b))
    else:
        active, mean, inverse = norm_dispatch.normalise(
            x.parts, scale, offset, groups=groups, eps=eps, silu=True
        )
        y = dispatch.forward((active,), kernel, shift, added)
    kept = kept_for_backward(added)
    return y, _NormSaved(x, scale, offset, kernel, outline(shift), kept, mean, inverse)


def _norm_conv_backward(
    groups: int, eps: float, saved: _NormSaved, dy: Array
) -> tuple[Activation, Array, Array, Array, Array, Added | None]:
    del eps
    x, scale, offset, kernel, shift, added, mean, inverse = saved
    (dactive,) = dispatch.input_gradient(dy, kernel, (x.channels,))
    norm = (scale, offset, mean, inverse)
    sums, active = norm_dispatch.gradient_sums(x.parts, dactive, norm, silu=True, activation=True)
    assert active is not None, 'asked for with activation=True'
    dx = norm_dispatch.gradient(x.parts, dactive, norm, sums, groups=groups, silu=True)
    of_norm = parameter_gradients(sums, scale, offset)
    others = _parameter_gradients((active,), kernel, shift, added, dy)
    return Activation(dx), *of_norm, *others


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
