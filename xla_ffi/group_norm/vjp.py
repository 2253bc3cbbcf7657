"""GroupNorm, optionally followed by SiLU: the FFI handlers, differentiable."""

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
from jaxunet.ops.group_norm import reference
from jaxunet.ops.group_norm.operands import check_operands, group_size

MOST_PASSED = 2  # gradients beside its own that the backward pass adds


class Norm(NamedTuple):
    """A normalisation, per (sample, channel): norm(x) · scale + offset = a · x + b, and its group's mean and inverse deviation."""

    a: Float[Array, 'batch channels']
    b: Float[Array, 'batch channels']
    mean: Float[Array, 'batch channels']
    inverse: Float[Array, 'batch channels']


def group_norm(
    x: Activation,
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    *,
    groups: int = 32,
    eps: float = 1e-5,
    silu: bool = False,
    passing: int = 0,
) -> Any:
    """act(norm(x) · scale + offset), act = SiLU or identity: `reference.group_norm` on kernels (Wu & He 2018, arXiv 1803.08494).

    A producer's moments are taken as a function of its part: the gradient of the part is the whole one, that of the moments is zero.

    Args:
      passing: also return x so many times, at most twice, for other readers of x, as `jaxunet.ops.activation.passing` has it: the kernel
        adds the gradients that they give to its own before it rounds. One that nobody reads has zeros for a gradient, which cost a read.

    Raises:
      ValueError: shapes or types that do not fit each other, or channels that are not a multiple of `groups`.
    """
    check_operands(x, scale, offset)
    y, passed = _group_norm(x, scale, offset, groups, eps, silu, checked(passing, 'group_norm'))
    return with_passed(y, passed, x)


def checked(passing: int, op: str) -> int:
    """How often x is passed on. Raises ValueError where that is too often."""
    if not 0 <= passing <= MOST_PASSED:
        raise ValueError(f'{op}: passing={passing}; expected 0 to {MOST_PASSED}')
    return passing


def with_passed(result: Any, passed: Sequence[tuple[Array, ...]], x: Activation) -> Any:
    """What an op returns that passes x on: its result and x, or the result alone where it passes nothing."""
    return (result, *(Activation(parts, x.moments) for parts in passed)) if passed else result


def statistics(x: Activation, scale: Array, offset: Array, *, groups: int, eps: float) -> Norm:
    """The normalisation of x: from the producers' moments where every part came with them, else from one read of x.

    Raises:
      ValueError: channels that are not a multiple of `groups`.
    """
    group_size(x.channels, groups)
    known = [m for m in x.moments if m is not None]
    if len(known) == len(x.parts):
        return Norm(
            *reference.combine(
                jnp.concatenate(known, axis=1), scale, offset, groups=groups, eps=eps
            )
        )
    shape = jax.ShapeDtypeStruct((x.parts[0].shape[0], x.channels), jnp.float32)
    call = jax.ffi.ffi_call('jaxunet_group_norm_statistics', [shape] * 4, vmap_method='sequential')
    return Norm(
        *call(
            *_operands(x, scale, offset),
            parts=np.int64(len(x.parts)),
            groups=np.int64(groups),
            eps=np.float32(eps),
        )
    )


def _operands(x: Activation, scale: Array, offset: Array) -> tuple[Array, ...]:
    return (*x.parts, scale.astype(jnp.float32), offset.astype(jnp.float32))


class Gradient(NamedTuple):
    """What a normalisation's backward pass gives.

    Fields:
      dx: of every part of x.
      sums: of offset and scale, of each sample: sums over the pixels.
      scale, offset: of these, in their shapes: those sums, over the batch where samples share a row; where they were asked for.
      active: the activation again, where it was asked for.
    """

    dx: tuple[Array, ...]
    sums: Float[Array, 'batch 2 channels']
    scale: Float[Array, '#batch channels'] | None
    offset: Float[Array, '#batch channels'] | None
    active: Array | None


def gradient(
    parts: Sequence[Array],
    dy: Array,
    scale: Array,
    offset: Array,
    mean: Array,
    inverse: Array,
    *,
    groups: int,
    silu: bool,
    activation: bool = False,
    added: Sequence[Sequence[Array]] = (),
    samples: bool = True,
) -> Gradient:
    """The gradients of a normalisation, given that of its result; with `samples` a launch more adds the samples' sums.

    Args:
      mean, inverse: as `Norm` has them.
      activation: also write act(norm(x) · scale + offset) again, from the same read of x: a weight gradient reads it.
      added: further gradients of every part of x, at most two, which are added to dx.
      samples: whether the gradients of scale and offset are found too; else the caller adds the samples' sums, in a launch that it has.
    """
    batch, *_, channels = dy.shape
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    shapes = [
        float32((batch, 2, channels)),
        *[float32(row.shape) for row in (scale, offset)] * samples,
    ]
    shapes += [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in parts] + [
        jax.ShapeDtypeStruct(dy.shape, dy.dtype)
    ] * activation
    call = jax.ffi.ffi_call('jaxunet_group_norm_gradient', shapes, vmap_method='sequential')
    affine = (scale.astype(jnp.float32), offset.astype(jnp.float32), mean, inverse)
    counts = {
        'parts': np.int64(len(parts)),
        'added': np.int64(len(added)),
        'groups': np.int64(groups),
    }
    others = itertools.chain.from_iterable(added)
    flags = {'silu': silu, 'activation': activation, 'samples': samples}
    sums, *arrays = call(*parts, dy, *affine, *others, **counts, **flags)
    of_scale, of_offset = (
        arrays.pop(0).astype(row.dtype) if samples else None for row in (scale, offset)
    )
    return Gradient(
        tuple(arrays[: len(parts)]), sums, of_scale, of_offset, arrays[-1] if activation else None
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _group_norm(
    x: Activation, scale: Array, offset: Array, groups: int, eps: float, silu: bool, passing: int
) -> Any:
    return _forward(x, scale, offset, groups, eps, silu, passing)[0]


def _forward(
    x: Activation, scale: Array, offset: Array, groups: int, eps: float, silu: bool, passing: int
) -> tuple[Any, Any]:
    y, saved = normalise(x, scale, offset, groups, eps, silu)
    return (y, (x.parts,) * passing), saved


def normalise(
    x: Activation, scale: Array, offset: Array, groups: int, eps: float, silu: bool
) -> tuple[Array, Any]:
    """The result of `group_norm`, and what its gradient needs: x, scale, offset, and the groups' mean and inverse deviation."""
    attributes: dict[str, Any] = {'parts': np.int64(len(x.parts)), 'silu': silu}
    shape = jax.ShapeDtypeStruct((*x.parts[0].shape[:3], x.channels), x.dtype)
    if all(m is not None for m in x.moments):
        norm = statistics(x, scale, offset, groups=groups, eps=eps)
        call = jax.ffi.ffi_call('jaxunet_group_norm_apply', shape, vmap_method='sequential')
        return call(*x.parts, norm.a, norm.b, **attributes), (
            x,
            scale,
            offset,
            norm.mean,
            norm.inverse,
        )
    group_size(x.channels, groups)
    rows = jax.ShapeDtypeStruct((shape.shape[0], x.channels), jnp.float32)
    whole = jax.ffi.ffi_call(
        'jaxunet_group_norm_forward', [shape, rows, rows], vmap_method='sequential'
    )
    y, mean, inverse = whole(
        *_operands(x, scale, offset), groups=np.int64(groups), eps=np.float32(eps), **attributes
    )
    return y, (x, scale, offset, mean, inverse)


def _backward(
    groups: int, eps: float, silu: bool, passing: int, saved: Any, given: Any
) -> tuple[Any, ...]:
    del eps, passing
    (dy, added), (x, scale, offset, mean, inverse) = given, saved
    found = gradient(
        x.parts, dy, scale, offset, mean, inverse, groups=groups, silu=silu, added=added
    )
    return Activation(found.dx, x.zero_moments), found.scale, found.offset


_group_norm.defvjp(_forward, _backward)
