"""The convolution ops on the FFI handlers, with their gradients.

Between forward and backward only raw convolution outputs are kept: the activation silu(norm(x)) is computed again by the weight gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.conv3x3.dispatch import Added, Affine, Parts, project
from pallas_kernels.conv3x3.vjp import check_operands
from pallas_kernels.features import Features
from xla_ffi.group_norm.vjp import gradient, of_moments, of_parameters, statistics


def conv3x3(
    x: Features,
    kernel: Float[Array, '3 3 channels features'],
    shift: Float[Array, '#batch features'],
    *,
    residual: Features | None = None,
    shortcut: Float[Array, 'residual_channels features'] | None = None,
) -> Features:
    """conv(x, kernel) + shift [+ residual, or residual · shortcut]: `reference.conv3x3` on kernels.

    Raises:
      ValueError: shapes or types that do not fit each other, or a shortcut without a residual.
    """
    added = check_operands(x, kernel, shift, residual, shortcut)
    return Features.of(_conv(x.parts, kernel, shift, added))


def norm_silu_conv3x3(
    x: Features,
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    kernel: Float[Array, '3 3 channels features'],
    shift: Float[Array, '#batch features'],
    *,
    residual: Features | None = None,
    shortcut: Float[Array, 'residual_channels features'] | None = None,
    groups: int = 32,
    eps: float = 1e-5,
) -> Features:
    """conv3x3(SiLU(norm(x) · scale + offset)) + shift [+ residual]: `reference.norm_silu_conv3x3` on kernels.

    A producer's moments are taken as a function of its part: the gradient of the part is the whole one, that of the moments is zero.

    Raises:
      ValueError: shapes or types that do not fit each other, a shortcut without a residual, or channels not a multiple of `groups`.
    """
    added = check_operands(x, kernel, shift, residual, shortcut)
    return Features.of(_norm_conv(x, scale, offset, kernel, shift, added, groups, eps))


def _convolve(parts: Parts, kernel: Array, shift: Array, added: Added | None, affine: Affine | None, *, flipped: bool = False) -> Array:
    """conv(act(x), kernel) + shift + added; `flipped`: with kernel[::-1, ::-1], its input and output channels exchanged."""
    first = parts[0]
    extra, shortcut = (added.parts, added.shortcut) if added is not None else ((), None)
    matrix = () if shortcut is None else (shortcut.astype(first.dtype),)
    shape = jax.ShapeDtypeStruct((*first.shape[:3], kernel.shape[2 if flipped else 3]), first.dtype)
    return jax.ffi.ffi_call('jaxunet_conv3x3', shape, vmap_method='sequential')(
        *(*parts, kernel.astype(first.dtype), shift.astype(jnp.float32), *extra, *matrix, *(affine or ())),
        parts=np.int64(len(parts)),
        residuals=np.int64(len(extra)),
        flipped=flipped,
        shortcut=shortcut is not None,
        activation=affine is not None,
    )


def _input_gradient(dy: Array, kernel: Array, widths: tuple[int, ...]) -> Parts:
    """The gradient by each part of the convolution's input."""
    ends = np.cumsum(widths)
    slices = (kernel[:, :, end - width : end] for end, width in zip(ends, widths, strict=True))
    return tuple(_convolve((dy,), part, jnp.zeros((1, part.shape[2]), jnp.float32), None, None, flipped=True) for part in slices)


def _parameter_gradients(parts: Parts, kernel: Array, shift: Array, added: Any, dy: Array, affine: Affine | None) -> tuple[Any, ...]:
    """Gradients of kernel, shift and what was added."""
    of_kernel, of_shift = (*kernel.shape[:3], dy.shape[3]), (dy.shape[0], dy.shape[3])
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (of_kernel, of_shift)]
    call = jax.ffi.ffi_call('jaxunet_conv3x3_weight_gradient', shapes, vmap_method='sequential')
    dkernel, dshift = call(*parts, dy, *(affine or ()), parts=np.int64(len(parts)), activation=affine is not None)
    dshift = jnp.sum(dshift, axis=0, keepdims=True) if shift.shape[0] == 1 else dshift
    return dkernel.astype(kernel.dtype), dshift.astype(shift.dtype), _added_gradient(added, dy)


def _needed(added: Added | None) -> Added | tuple[()] | None:
    """What the gradient of the addition needs: nothing of a plain residual, whose gradient is dy."""
    return () if added is not None and added.shortcut is None else added


def _added_gradient(added: Added | tuple[()] | None, dy: Array) -> Any:
    if added is None:
        return None
    return jax.vjp(project, added)[1](dy)[0] if isinstance(added, Added) else Added((dy,), None)


@jax.custom_vjp
def _conv(parts: Parts, kernel: Array, shift: Array, added: Added | None) -> Array:
    return _convolve(parts, kernel, shift, added, None)


def _conv_forward(parts: Parts, kernel: Array, shift: Array, added: Added | None) -> tuple[Array, Any]:
    # The gradient needs the shift's shape and type only.
    return _conv(parts, kernel, shift, added), (parts, kernel, shift[:, :0], _needed(added))


def _conv_backward(saved: Any, dy: Array) -> tuple[Any, ...]:
    parts, kernel, shift, added = saved
    dx = _input_gradient(dy, kernel, tuple(p.shape[3] for p in parts))
    return dx, *_parameter_gradients(parts, kernel, shift, added, dy, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _norm_conv(
    x: Features, scale: Array, offset: Array, kernel: Array, shift: Array, added: Added | None, groups: int, eps: float
) -> Array:
    return _norm_conv_forward(x, scale, offset, kernel, shift, added, groups, eps)[0]


def _norm_conv_forward(
    x: Features, scale: Array, offset: Array, kernel: Array, shift: Array, added: Added | None, groups: int, eps: float
) -> tuple[Array, Any]:
    norm = statistics(x, scale, offset, groups=groups, eps=eps)
    y = _convolve(x.parts, kernel, shift, added, (norm.a, norm.b))
    return y, (x, scale, offset, kernel, shift[:, :0], _needed(added), norm)


def _norm_conv_backward(groups: int, eps: float, saved: Any, dy: Array) -> tuple[Any, ...]:
    del eps
    x, scale, offset, kernel, shift, added, norm = saved
    (dactive,) = _input_gradient(dy, kernel, (x.channels,))
    found = gradient(x.parts, dactive, scale, offset, norm.mean, norm.inverse, groups=groups, silu=True)
    others = _parameter_gradients(x.parts, kernel, shift, added, dy, (norm.a, norm.b))
    return Features(found.dx, of_moments(x)), *of_parameters(found.sums, scale, offset), *others


_conv.defvjp(_conv_forward, _conv_backward)
_norm_conv.defvjp(_norm_conv_forward, _norm_conv_backward)
