"""GroupNorm, optionally followed by SiLU: the FFI handlers, differentiable."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.features import Features
from pallas_kernels.group_norm import reference
from pallas_kernels.group_norm.statistics import group_size
from pallas_kernels.group_norm.vjp import check_operands


class Norm(NamedTuple):
    """A normalisation, per (sample, channel): norm(x) · scale + offset = a · x + b, and its group's mean and inverse deviation."""

    a: Float[Array, 'batch channels']
    b: Float[Array, 'batch channels']
    mean: Float[Array, 'batch channels']
    inverse: Float[Array, 'batch channels']


def group_norm(
    x: Features,
    scale: Float[Array, '#batch channels'],
    offset: Float[Array, '#batch channels'],
    *,
    groups: int = 32,
    eps: float = 1e-5,
    silu: bool = False,
) -> Float[Array, 'batch height width channels']:
    """act(norm(x) · scale + offset), act = SiLU or identity: `reference.group_norm` on kernels (Wu & He 2018, arXiv 1803.08494).

    A producer's moments are taken as a function of its part: the gradient of the part is the whole one, that of the moments is zero.

    Raises:
      ValueError: shapes or types that do not fit each other, or channels that are not a multiple of `groups`.
    """
    check_operands(x, scale, offset)
    return _group_norm(x, scale, offset, groups, eps, silu)


def statistics(x: Features, scale: Array, offset: Array, *, groups: int, eps: float) -> Norm:
    """The normalisation of x: from the producers' moments where every part came with them, else from one read of x.

    Raises:
      ValueError: channels that are not a multiple of `groups`.
    """
    group_size(x.channels, groups)
    known = [m for m in x.moments if m is not None]
    if len(known) == len(x.parts):
        return Norm(*reference.combine(jnp.concatenate(known, axis=1), scale, offset, groups=groups, eps=eps))
    shape = jax.ShapeDtypeStruct((x.parts[0].shape[0], x.channels), jnp.float32)
    call = jax.ffi.ffi_call('jaxunet_group_norm_statistics', [shape] * 4, vmap_method='sequential')
    return Norm(*call(*_operands(x, scale, offset), parts=np.int64(len(x.parts)), groups=np.int64(groups), eps=np.float32(eps)))


def _operands(x: Features, scale: Array, offset: Array) -> tuple[Array, ...]:
    return (*x.parts, scale.astype(jnp.float32), offset.astype(jnp.float32))


class Gradient(NamedTuple):
    """What a normalisation's backward pass gives.

    Fields:
      dx: of every part of x.
      scale, offset: of these, in their shapes: sums over the pixels, and over the batch where samples share a row.
      active: the activation again, where it was asked for.
    """

    dx: tuple[Array, ...]
    scale: Float[Array, '#batch channels']
    offset: Float[Array, '#batch channels']
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
) -> Gradient:
    """The gradients of a normalisation, given that of its result, in two launches, the second of which adds the samples' sums.

    Args:
      mean, inverse: as `Norm` has them.
      activation: also write act(norm(x) · scale + offset) again, from the same read of x: a weight gradient reads it.
    """
    batch, *_, channels = dy.shape
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    shapes = [float32((batch, 2, channels)), float32(scale.shape), float32(offset.shape)]  # the first only passes between the launches
    shapes += [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in parts] + [jax.ShapeDtypeStruct(dy.shape, dy.dtype)] * activation
    call = jax.ffi.ffi_call('jaxunet_group_norm_gradient', shapes, vmap_method='sequential')
    affine = (scale.astype(jnp.float32), offset.astype(jnp.float32), mean, inverse)
    attributes = {'parts': np.int64(len(parts)), 'groups': np.int64(groups), 'silu': silu, 'activation': activation}
    _, of_scale, of_offset, *arrays = call(*parts, dy, *affine, **attributes)
    dx, active = tuple(arrays[: len(parts)]), arrays[-1] if activation else None
    return Gradient(dx, of_scale.astype(scale.dtype), of_offset.astype(offset.dtype), active)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _group_norm(x: Features, scale: Array, offset: Array, groups: int, eps: float, silu: bool) -> Array:
    return normalise(x, scale, offset, groups, eps, silu)[0]


def normalise(x: Features, scale: Array, offset: Array, groups: int, eps: float, silu: bool) -> tuple[Array, Any]:
    """The result of `group_norm`, and what its gradient needs: x, scale, offset, and the groups' mean and inverse deviation."""
    attributes: dict[str, Any] = {'parts': np.int64(len(x.parts)), 'silu': silu}
    shape = jax.ShapeDtypeStruct((*x.parts[0].shape[:3], x.channels), x.dtype)
    if all(m is not None for m in x.moments):
        norm = statistics(x, scale, offset, groups=groups, eps=eps)
        call = jax.ffi.ffi_call('jaxunet_group_norm_apply', shape, vmap_method='sequential')
        return call(*x.parts, norm.a, norm.b, **attributes), (x, scale, offset, norm.mean, norm.inverse)
    group_size(x.channels, groups)
    rows = jax.ShapeDtypeStruct((shape.shape[0], x.channels), jnp.float32)
    whole = jax.ffi.ffi_call('jaxunet_group_norm_forward', [shape, rows, rows], vmap_method='sequential')
    y, mean, inverse = whole(*_operands(x, scale, offset), groups=np.int64(groups), eps=np.float32(eps), **attributes)
    return y, (x, scale, offset, mean, inverse)


def _backward(groups: int, eps: float, silu: bool, saved: Any, dy: Array) -> tuple[Features, Array, Array]:
    del eps
    x, scale, offset, mean, inverse = saved
    found = gradient(x.parts, dy, scale, offset, mean, inverse, groups=groups, silu=silu)
    return Features(found.dx, x.zero_moments), found.scale, found.offset


_group_norm.defvjp(normalise, _backward)
