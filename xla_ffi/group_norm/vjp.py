"""Differentiable calls of the GroupNorm handlers: GroupNorm, optionally with SiLU and dropout.

Forward is one handler, which also returns each group's mean and inverse deviation. Backward is one
handler as well, which sums over the pixels and then writes dx. A fused convolution calls
`statistics` before it applies the norm to its tiles, and `gradient` in its backward pass.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.dropout import Dropout, check_dropout, drop
from jaxunet.ops.group_norm.operands import Affine, Norm, Statistics, check_kernel_operands
from jaxunet.ops.transformations import joins_batch
from jaxunet.ops.vocabulary import WithInput, check_copies
from xla_ffi.call import ffi_call
from xla_ffi.checks import check_parts

Copies = tuple[tuple[Array, ...], ...]  # the parts of each copy of x


def group_norm(
    x: Activation, norm: Norm, *, silu: bool = False, dropout: Dropout | None = None
) -> Float[Array, 'batch height width channels']:
    """act(norm(x) · scale + offset), act = SiLU or identity, then dropout.

    See `jaxunet.ops.group_norm.reference.group_norm`. Wu & He 2018, arXiv 1803.08494. In the calls
    that our networks make, the kernels apply dropout themselves, forward and backward; in other
    calls XLA applies it to the result.

    Raises:
      ValueError: shapes or types that do not fit each other, channels that are not a multiple of
        the groups, or more than `MAX_PARTS` parts.
    """
    check_kernel_operands(x, norm)
    check_parts('group_norm', 'x', x)
    if dropout is None or _drops_inside(x, silu):
        if dropout is not None:
            check_dropout(dropout, x.parts[0].shape[0])
        return _group_norm(x, norm, dropout, silu, 0)[0]
    return drop(_group_norm(x, norm, None, silu, 0)[0], dropout)


def _drops_inside(x: Activation, silu: bool) -> bool:
    """Returns True if the kernels implement dropout for a call.

    They do so with SiLU, for x of one part whose pixels are multiples of 16 bytes.
    """
    return silu and len(x.parts) == 1 and x.channels * x.dtype.itemsize % 16 == 0


def group_norm_and_input(
    x: Activation, norm: Norm, *, silu: bool = False, copies: int = 1
) -> WithInput[Array]:
    """Returns the result of `group_norm`, and copies of x for its other readers.

    The backward kernel adds the gradients of the copies to its own before it rounds dx. A copy that
    nobody reads has a gradient of zeros, which still costs the kernel a read.

    Raises:
      ValueError: as `group_norm`, or `copies` is not 1 to `MAX_COPIES`.
    """
    check_kernel_operands(x, norm)
    check_parts('group_norm', 'x', x)
    check_copies('group_norm', copies)
    y, passed = _group_norm(x, norm, None, silu, copies)
    return WithInput(y, tuple(Activation(parts) for parts in passed))


def statistics(x: Activation, norm: Norm) -> tuple[Affine, Statistics]:
    """Returns what a convolution applies as the norm of x, and its statistics, from one read."""

    def run(operands: Sequence[Array], _: tuple[()]) -> list[Array]:
        shape = jax.ShapeDtypeStruct((operands[0].shape[0], x.channels), jnp.float32)
        counts = {'parts': np.int64(len(x.parts)), 'groups': np.int64(norm.groups)}
        call = ffi_call('jaxunet_group_norm_statistics', [shape] * 4)
        return call(*operands, **counts, eps=np.float32(norm.eps))

    a, b, mean, inverse = joins_batch(run)(_operands(x, norm), ())
    return (a, b), Statistics(mean, inverse)


def _dropout_operands(
    dropout: Dropout | None, dtype: jnp.dtype
) -> tuple[str, tuple[Array, ...], dict[str, Any]]:
    """Returns what dropout adds to a call's handler name, operands and attributes."""
    if dropout is None:
        return '', (), {}
    attributes = {
        'threshold': np.int64(dropout.threshold),
        'factor': np.float32(dropout.factor(dtype)),
    }
    return 'dropout_', (dropout.seeds,), attributes


def _operands(x: Activation, norm: Norm) -> tuple[Array, ...]:
    return (*x.parts, norm.scale.astype(jnp.float32), norm.offset.astype(jnp.float32))


class Gradient(NamedTuple):
    """The results of a normalisation's backward pass.

    Fields:
      dx: the gradient of every part of x.
      sums: the gradients of offset and scale of each sample: sums over its pixels.
      norm: the gradients of scale and offset, in their shapes: summed over the samples that share a
        row; None without `samples`.
      active: the recomputed activation; () without `activation`.
    """

    dx: tuple[Array, ...]
    sums: Float[Array, 'batch 2 channels']
    norm: Norm | None
    active: tuple[Array, ...]


def gradient(
    parts: Sequence[Array],
    dy: Array,
    norm: Norm,
    stats: Statistics,
    *,
    silu: bool,
    rounded: bool = False,
    activation: bool = False,
    added: Sequence[Sequence[Array]] = (),
    samples: bool = True,
    dropout: Dropout | None = None,
) -> Gradient:
    """Returns the gradients of a normalisation, given the gradient of its result.

    Args:
      rounded: dy is not exact but was rounded to its type, so dx and the sums may have errors of
        this size as well. In bfloat16, the kernels then compute SiLU's derivative by tanh.approx.
      activation: also write act(norm(x) · scale + offset) again, from the same read of x, for a
        weight gradient to read.
      added: further gradients of every part of x, at most `MAX_COPIES`; the kernel adds them to dx.
      samples: also return the gradients of scale and offset, which takes another launch. Without
        it, the caller adds the sums over the samples in a launch that it needs anyway.
      dropout: the dropout of the result; not with `activation` or `added`. See `_drops_inside`.
    """
    batch, *_, channels = dy.shape
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    shapes = [float32((batch, 2, channels))]
    shapes += [float32(row.shape) for row in (norm.scale, norm.offset)] * samples
    shapes += [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in parts] + [
        jax.ShapeDtypeStruct(dy.shape, dy.dtype)
    ] * activation
    drops, seeds, rates = _dropout_operands(dropout, dy.dtype)
    call = ffi_call(f'jaxunet_group_norm_{drops}gradient', shapes)
    affine = (norm.scale.astype(jnp.float32), norm.offset.astype(jnp.float32), *stats)
    counts = {
        'parts': np.int64(len(parts)),
        'added': np.int64(len(added)),
        'groups': np.int64(norm.groups),
    }
    others = itertools.chain.from_iterable(added)
    flags = {'silu': silu, 'rounded': rounded, 'activation': activation, 'samples': samples}
    operands = (*parts, dy, *affine, *others, *seeds)
    arrays = list(call(*operands, **counts, **flags, **rates))
    sums = arrays.pop(0)
    of_norm = None
    if samples:
        of_norm = norm.with_gradients(arrays.pop(0), arrays.pop(0))
    return Gradient(tuple(arrays[: len(parts)]), sums, of_norm, tuple(arrays[len(parts) :]))


# Saved for the backward pass.
Saved = tuple[Activation, Norm, Statistics, Dropout | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _group_norm(
    x: Activation, norm: Norm, dropout: Dropout | None, silu: bool, copies: int
) -> tuple[Array, Copies]:
    return _forward(x, norm, dropout, silu, copies)[0]


def _forward(
    x: Activation, norm: Norm, dropout: Dropout | None, silu: bool, copies: int
) -> tuple[tuple[Array, Copies], Saved]:
    y, stats = normalise(x, norm, silu=silu, dropout=dropout)
    return (y, (x.parts,) * copies), (x, norm, stats, dropout)


def normalise(
    x: Activation, norm: Norm, *, silu: bool, dropout: Dropout | None = None
) -> tuple[Array, Statistics]:
    """Returns the result of `group_norm`, and the statistics."""
    drops, seeds, rates = _dropout_operands(dropout, x.dtype)

    def run(operands: Sequence[Array], _: tuple[()]) -> tuple[Array, Array, Array]:
        shape = jax.ShapeDtypeStruct((*operands[0].shape[:3], x.channels), x.dtype)
        rows = jax.ShapeDtypeStruct((shape.shape[0], x.channels), jnp.float32)
        counts = {'parts': np.int64(len(x.parts)), 'groups': np.int64(norm.groups)}
        call = ffi_call(f'jaxunet_group_norm_{drops}forward', [shape, rows, rows])
        y, mean, inverse = call(*operands, **counts, eps=np.float32(norm.eps), silu=silu, **rates)
        return y, mean, inverse

    y, *stats = joins_batch(run)((*_operands(x, norm), *seeds), ())
    return y, Statistics(*stats)


def _backward(
    silu: bool, copies: int, saved: Saved, given: tuple[Array, Copies]
) -> tuple[Activation, Norm | None, None]:
    del copies
    (dy, added), (x, norm, stats, dropout) = given, saved
    result = gradient(x.parts, dy, norm, stats, silu=silu, added=added, dropout=dropout)
    return Activation(result.dx), result.norm, None


_group_norm.defvjp(_forward, _backward)
