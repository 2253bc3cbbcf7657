"""Calls of the convolution handlers that compute the gradients of parameters.

Float32 gradients from bfloat16 terms (`xla_ffi.conv3x3.calls`) take two calls: with x = h + l and
dy = H + L, one call with twice the channels computes h · H and l · H, another h · L.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution, Parts
from jaxunet.ops.terms import bfloat16_terms
from xla_ffi.call import ffi_call
from xla_ffi.conv3x3.calls import high_and_low, shortcut_gradient, uses_terms
from xla_ffi.conv3x3.split_k import partial_sums, written

PARTIAL_SUMS = 9 * 64 * 64  # per block: 9 taps of 64 input channels by 64 features
PARTIAL_SHIFTS = 512  # rows of partial sums of the shift, besides two rows per sample


class _Gradients(NamedTuple):
    """The results of the handler; `shortcut` and `norm` are () unless requested."""

    kernel: Float[Array, '3 3 channels features']
    shift: Float[Array, '#batch features']
    shortcut: tuple[Float[Array, 'residual_channels features'], ...]
    norm: tuple[Float[Array, '1 channels'], ...]


def parameter_gradients(
    conv: Convolution, dy: Array, sums: Array | None = None
) -> tuple[Convolution, tuple[Array, ...]]:
    """Returns the convolution with the gradients of kernel, shift, residual and shortcut.

    Also returns the gradients of the norm's scale and offset; () without `sums`.

    Args:
      conv: what `kept_for_backward` kept; after a norm, its image is the activation.
      sums: (batch, 2, channels) of the norm's `gradient`; the last launch adds them over the
        samples.
    """
    from_terms = uses_terms((*conv.image.parts, *_projected(conv)), dy.shape[3])
    gradients = (_from_terms if from_terms else _call)(conv, dy, sums)
    residual, shortcut = conv.residual, conv.shortcut
    if residual is not None and shortcut is None:
        residual = Activation.of(dy)
    elif residual is not None and shortcut is not None:
        residual = Activation(shortcut_gradient(dy, shortcut, residual.parts))
        (shortcut,) = gradients.shortcut
    return dataclasses.replace(
        conv,
        kernel=gradients.kernel,
        shift=gradients.shift,
        residual=residual,
        shortcut=shortcut,
    ), gradients.norm


def _projected(conv: Convolution) -> Parts:
    """Returns the parts of a residual that a shortcut projects."""
    return () if conv.residual is None or conv.shortcut is None else conv.residual.parts


def _call(
    conv: Convolution, dy: Array, sums: Array | None, dtype: DTypeLike | None = None
) -> _Gradients:
    """Runs the handler.

    Args:
      dtype: the type of all gradients; None: those of the parameters.
    """
    features, parts, projected = dy.shape[3], conv.image.parts, _projected(conv)
    channels, extra = (sum(part.shape[3] for part in images) for images in (parts, projected))
    norm = () if sums is None else (sums,)
    wanted: list[tuple[tuple[int, ...], DTypeLike]] = [
        ((3, 3, channels, features), dtype or conv.kernel.dtype),
        ((conv.shift.shape[0], features), dtype or conv.shift.dtype),
    ]
    if conv.shortcut is not None:
        wanted.append(((extra, features), dtype or conv.shortcut.dtype))
    wanted += [((1, channels), jnp.float32)] * (2 * len(norm))
    shapes = written(wanted, dy.dtype)
    workspace = _workspace(dy, (9 * channels + extra) * features)
    shapes += [jax.ShapeDtypeStruct((workspace,), jnp.float32)]
    call = ffi_call('jaxunet_conv3x3_weight_gradient', shapes)
    counts = {'parts': np.int64(len(parts)), 'residuals': np.int64(len(projected))}
    results = call(*parts, dy, *projected, *norm, **counts, norm=bool(norm))
    of_kernel, of_shift, *others = (
        gradient.astype(t) for gradient, (_, t) in zip(results[:-1], wanted, strict=True)
    )
    shortcuts = 1 if projected else 0
    return _Gradients(of_kernel, of_shift, tuple(others[:shortcuts]), tuple(others[shortcuts:]))


def _from_terms(conv: Convolution, dy: Array, sums: Array | None) -> _Gradients:
    """Does the same as `_call` for float32 images, by adding the products of their bfloat16 terms.

    XLA sums dy for the gradient of the shift, in full float32 precision: a sum without products
    needs no terms.
    """
    projected = _projected(conv)
    images = high_and_low(conv.image.parts)
    others = high_and_low(projected) if projected else ()
    high, low = bfloat16_terms(dy, 2)

    def product(count: int, dy: Array, sums: Array | None) -> _Gradients:
        image, residual = Activation(images[:count]), Activation(others[:count])
        terms = dataclasses.replace(conv, image=image, residual=residual)
        return _call(terms, dy, sums, jnp.float32)

    large, small = product(2, high, None), product(1, low, sums)

    def total(large: Array, small: Array, t: DTypeLike) -> Array:
        halves = jnp.split(large, 2, axis=-2)  # products of the high and the low terms
        return (halves[0] + (halves[1] + small)).astype(t)

    rows = conv.shift.shape[0]
    shift = jnp.sum(dy, axis=(0, 1, 2) if rows == 1 else (1, 2)).reshape(rows, -1)
    shortcut: tuple[Array, ...] = ()
    kernel = total(large.kernel, small.kernel, conv.kernel.dtype)
    shift = shift.astype(conv.shift.dtype)
    if conv.shortcut is not None:
        shortcut = (total(large.shortcut[0], small.shortcut[0], conv.shortcut.dtype),)
    return _Gradients(kernel, shift, shortcut, small.norm)


def _workspace(dy: Array, weights: int) -> int:
    """Float32 elements of the split-K workspace for `weights` weights, and for sums of dy."""
    of_weights = partial_sums(math.prod(dy.shape[:3]), weights, PARTIAL_SUMS)
    return of_weights + sums_of_dy(dy.shape[0], dy.shape[3])


def sums_of_dy(batch: int, features: int) -> int:
    """Returns the float32 elements of the workspace that the sums of dy take."""
    return (2 * batch + PARTIAL_SHIFTS) * features
