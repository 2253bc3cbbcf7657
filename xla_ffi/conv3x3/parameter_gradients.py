"""Calls of the convolution handlers that compute the gradients of parameters.

Float32 gradients from bfloat16 terms (`xla_ffi.conv3x3.calls`) take two calls: with x = h + l and
dy = H + L, one call with twice the channels computes h · H and l · H, another h · L.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxunet.ops.conv3x3.operands import Added, Parts
from jaxunet.ops.terms import bfloat16_terms
from xla_ffi.call import ffi_call
from xla_ffi.conv3x3.calls import high_and_low, shortcut_gradient, takes_terms
from xla_ffi.conv3x3.split_k import partial_sums, written

PARTIAL_SUMS = 9 * 64 * 64  # per block: 9 taps of 64 input channels by 64 features
PARTIAL_SHIFTS = 512  # rows of partial sums of the shift, besides two rows per sample


class ParameterGradients(NamedTuple):
    """The gradients of a convolution's parameters and residual.

    Fields:
      norm: the gradients of the norm's scale and offset; () unless requested.
    """

    norm: tuple[Array, ...]
    kernel: Array
    shift: Array
    added: Added | None


class _Types(NamedTuple):
    """The types of the gradients; `shortcut` is not read if there is none."""

    kernel: DTypeLike
    shift: DTypeLike
    shortcut: DTypeLike


class _Found(NamedTuple):
    """The results of a call; `shortcut` and `norm` are () unless requested."""

    kernel: Float[Array, '3 3 channels features']
    shift: Float[Array, '#batch features']
    shortcut: tuple[Float[Array, 'residual_channels features'], ...]
    norm: tuple[Float[Array, '1 channels'], ...]


def parameter_gradients(
    parts: Parts,
    kernel: Array,
    shift: Array,
    added: Added | tuple[()] | None,
    dy: Array,
    sums: Array | None = None,
) -> ParameterGradients:
    """Returns the gradients of kernel, shift and residual, and of the norm's parameters.

    Args:
      parts: the convolution's input; in `norm_silu_conv3x3` this is the activation.
      shift: its `outline`.
      added: what `kept_for_backward` kept of the residual.
      sums: (batch, 2, channels) of the norm's `gradient`; the last launch adds them over the
        samples.
    """
    projected: Parts = ()
    shortcut = None
    if isinstance(added, Added):
        projected, shortcut = added
    types = _Types(kernel.dtype, shift.dtype, kernel.dtype if shortcut is None else shortcut.dtype)
    from_terms = takes_terms((*parts, *projected), dy.shape[3])
    run = _from_terms if from_terms else _call
    found = run(parts, dy, projected, shift.shape[0], types, sums)
    of_added = None if added is None else Added((dy,), None)
    if shortcut is not None:
        of_added = Added(shortcut_gradient(dy, shortcut, projected), *found.shortcut)
    return ParameterGradients(found.norm, found.kernel, found.shift, of_added)


def _call(
    parts: Parts, dy: Array, projected: Parts, rows: int, types: _Types, sums: Array | None
) -> _Found:
    """Runs the handler. `rows`: rows of the shift's gradient, 1 or batch; the rest as above."""
    features = dy.shape[3]
    channels, extra = (sum(part.shape[3] for part in images) for images in (parts, projected))
    norm = () if sums is None else (sums,)
    wanted: list[tuple[tuple[int, ...], DTypeLike]] = [
        ((3, 3, channels, features), types.kernel),
        ((rows, features), types.shift),
    ]
    if projected:
        wanted.append(((extra, features), types.shortcut))
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
    return _Found(of_kernel, of_shift, tuple(others[:shortcuts]), tuple(others[shortcuts:]))


def _from_terms(
    parts: Parts, dy: Array, projected: Parts, rows: int, types: _Types, sums: Array | None
) -> _Found:
    """Does the same as `_call` for float32 images, by adding the products of their bfloat16 terms.

    XLA sums dy for the gradient of the shift, in full float32 precision: a sum without products
    needs no terms.
    """
    images = high_and_low(parts)
    others = high_and_low(projected) if projected else ()
    high, low = bfloat16_terms(dy, 2)
    float32 = _Types(*[jnp.float32] * len(_Types._fields))
    large = _call(images, high, others, rows, float32, None)
    small = _call(images[:1], low, others[:1], rows, float32, sums)

    def total(large: Array, small: Array, t: DTypeLike) -> Array:
        halves = jnp.split(large, 2, axis=-2)  # products of the high and the low terms
        return (halves[0] + (halves[1] + small)).astype(t)

    shift = jnp.sum(dy, axis=(0, 1, 2) if rows == 1 else (1, 2)).reshape(rows, -1)
    return _Found(
        total(large.kernel, small.kernel, types.kernel),
        shift.astype(types.shift),
        tuple(total(*w, types.shortcut) for w in zip(large.shortcut, small.shortcut, strict=True)),
        small.norm,
    )


def _workspace(dy: Array, weights: int) -> int:
    """Float32 elements of the split-K workspace for `weights` weights, and for sums of dy."""
    of_weights = partial_sums(math.prod(dy.shape[:3]), weights, PARTIAL_SUMS)
    return of_weights + sums_of_dy(dy.shape[0], dy.shape[3])


def sums_of_dy(batch: int, features: int) -> int:
    """Returns the float32 elements of the workspace that the sums of dy take."""
    return (2 * batch + PARTIAL_SHIFTS) * features
