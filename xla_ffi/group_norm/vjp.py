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
    """The normalisation from the parts' moments, which a kernel computes where the producer did not.

    Raises:
      ValueError: channels that are not a multiple of `groups`.
    """
    found = [_moments(part) if known is None else known for part, known in zip(x.parts, x.moments, strict=True)]
    batch, channels = found[0].shape[0], x.channels
    if groups < 1 or channels % groups:
        raise ValueError(f'group_norm: {channels} channels are not a multiple of {groups} groups')
    moments = jnp.concatenate(found, axis=1).reshape(batch, groups, channels // groups, 2)
    mean, deviation = moments[..., 0], moments[..., 1]
    centre = jnp.mean(mean, axis=-1, keepdims=True)
    variance = jnp.mean(deviation + jax.lax.square(mean - centre), axis=-1, keepdims=True)
    inverse = jnp.broadcast_to(jax.lax.rsqrt(variance + eps), mean.shape).reshape(batch, channels)
    centre = jnp.broadcast_to(centre, mean.shape).reshape(batch, channels)
    a = scale.astype(jnp.float32) * inverse
    return Norm(a, offset.astype(jnp.float32) - centre * a, centre, inverse)


def gradient(
    parts: Sequence[Array], dy: Array, scale: Array, offset: Array, norm: Norm, *, groups: int, silu: bool
) -> tuple[tuple[Array, ...], Float[Array, 'batch 2 channels']]:
    """The gradient of every part, and the sums over pixels whose rows are the gradients of offset and scale."""
    batch, *_, channels = dy.shape
    shapes = [jax.ShapeDtypeStruct((batch, 2, channels), jnp.float32), *(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in parts)]
    call = jax.ffi.ffi_call('jaxunet_group_norm_gradient', shapes, vmap_method='sequential')
    affine = (scale.astype(jnp.float32), offset.astype(jnp.float32), norm.mean, norm.inverse)
    sums, *dx = call(*parts, dy, *affine, parts=np.int64(len(parts)), groups=np.int64(groups), silu=silu)
    return tuple(dx), sums


def of_parameters(sums: Float[Array, 'batch 2 channels'], scale: Array, offset: Array) -> tuple[Array, Array]:
    """The gradients of scale and offset, over the batch where they are shared."""
    total = jnp.sum(sums, axis=0, keepdims=True)
    of_scale, of_offset = ((total if like.shape[0] == 1 else sums)[:, i].astype(like.dtype) for i, like in ((1, scale), (0, offset)))
    return of_scale, of_offset


def of_moments(x: Features) -> tuple[Array | None, ...]:
    """Zeros for the moments that came with x."""
    return tuple(None if known is None else jnp.zeros_like(known) for known in x.moments)


def _moments(x: Float[Array, 'batch height width channels']) -> Float[Array, 'batch channels 2']:
    shape = jax.ShapeDtypeStruct((x.shape[0], x.shape[3], 2), jnp.float32)
    return jax.ffi.ffi_call('jaxunet_group_norm_moments', shape, vmap_method='sequential')(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _group_norm(x: Features, scale: Array, offset: Array, groups: int, eps: float, silu: bool) -> Array:
    return _forward(x, scale, offset, groups, eps, silu)[0]


def _forward(x: Features, scale: Array, offset: Array, groups: int, eps: float, silu: bool) -> tuple[Array, Any]:
    norm = statistics(x, scale, offset, groups=groups, eps=eps)
    shape = jax.ShapeDtypeStruct((*x.parts[0].shape[:3], x.channels), x.dtype)
    call = jax.ffi.ffi_call('jaxunet_group_norm_apply', shape, vmap_method='sequential')
    return call(*x.parts, norm.a, norm.b, parts=np.int64(len(x.parts)), silu=silu), (x, scale, offset, norm)


def _backward(groups: int, eps: float, silu: bool, saved: Any, dy: Array) -> tuple[Features, Array, Array]:
    del eps
    x, scale, offset, norm = saved
    dx, sums = gradient(x.parts, dy, scale, offset, norm, groups=groups, silu=silu)
    return Features(dx, of_moments(x)), *of_parameters(sums, scale, offset)


_group_norm.defvjp(_forward, _backward)
