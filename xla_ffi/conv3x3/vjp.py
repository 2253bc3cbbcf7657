"""The convolution ops on the FFI handlers, with their gradients.

Between forward and backward only raw convolution outputs are kept: the activation silu(norm(x)) is computed again by the weight gradient.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Added, Affine, Parts, check_operands, needed, outline
from xla_ffi.group_norm.vjp import checked, gradient, normalise, statistics, with_passed

# Floats of the weight gradient's workspace: blocks that share the pixels write their sums there, of the kernel and, for each sample, of
# the shift. On a GPU of 132 multiprocessors, each of which sums 9 · 64 · 64 entries, more would not be used; a kernel that finds less
# shares the pixels less.
PARTIAL_SUMS = 132 * 9 * 64 * 64
PARTIAL_SHIFTS = 512

# From so many pixels on, the convolutions apply GroupNorm and SiLU themselves: a tile is activated once for its nine taps, beside the
# tensor cores. In smaller images the kernel's best tiles have no room for that, and the activation is a kernel of little traffic.
FUSED_PIXELS = 1024


def conv3x3(
    x: Activation,
    kernel: Float[Array, '3 3 channels features'],
    shift: Float[Array, '#batch features'],
    *,
    residual: Activation | None = None,
    shortcut: Float[Array, 'residual_channels features'] | None = None,
) -> Activation:
    """conv(x, kernel) + shift [+ residual, or residual · shortcut]: `reference.conv3x3` on kernels.

    Raises:
      ValueError: shapes or types that do not fit each other, or a shortcut without a residual.
    """
    added = check_operands(x, kernel, shift, residual, shortcut)
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
    passing: int = 0,
) -> Any:
    """conv3x3(SiLU(norm(x) · scale + offset)) + shift [+ residual]: `reference.norm_silu_conv3x3` on kernels.

    A producer's moments are taken as a function of its part: the gradient of the part is the whole one, that of the moments is zero.

    Args:
      passing: also return x so many times, as `xla_ffi.group_norm.vjp.group_norm` does.

    Raises:
      ValueError: shapes or types that do not fit each other, a shortcut without a residual, or channels not a multiple of `groups`.
    """
    added = check_operands(x, kernel, shift, residual, shortcut)
    y, passed = _norm_conv(
        x, scale, offset, kernel, shift, added, groups, eps, checked(passing, 'norm_silu_conv3x3')
    )
    return with_passed(Activation.of(y), passed, x)


def _tiled(parts: Parts) -> bool:
    """Whether the kernels that read an input tile once for its nine taps take these channels and this type."""
    return parts[0].dtype != jnp.float32 and all(part.shape[3] % 8 == 0 for part in parts)


def _convolve(
    parts: Parts,
    kernel: Array,
    shift: Array,
    added: Added | None,
    affine: Affine | None,
    *,
    flipped: bool = False,
) -> Array:
    """conv(act(x), kernel) + shift + added; `flipped`: with kernel[::-1, ::-1], its input and output channels exchanged."""
    first, features = parts[0], kernel.shape[2 if flipped else 3]
    extra, shortcut = (added.parts, added.shortcut) if added is not None else ((), None)
    matrix = () if shortcut is None else (shortcut.astype(first.dtype),)
    shape = jax.ShapeDtypeStruct((*first.shape[:3], features), first.dtype)
    return jax.ffi.ffi_call('jaxunet_conv3x3', shape, vmap_method='sequential')(
        *(
            *parts,
            kernel.astype(first.dtype),
            shift.astype(jnp.float32),
            *extra,
            *matrix,
            *(affine or ()),
        ),
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
    return tuple(
        _convolve((dy,), part, jnp.zeros((1, part.shape[2]), jnp.float32), None, None, flipped=True)
        for part in slices
    )


def _shortcut_gradient(dy: Array, shortcut: Array, projected: Parts) -> Parts:
    """The gradient by each part of what a shortcut projects: dy times the shortcut, transposed."""
    shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in projected]
    call = jax.ffi.ffi_call('jaxunet_conv3x3_shortcut_gradient', shapes, vmap_method='sequential')
    return tuple(call(dy, shortcut.astype(dy.dtype), residuals=np.int64(len(projected))))


def _parameter_gradients(
    parts: Parts,
    kernel: Array,
    shift: Array,
    added: Any,
    dy: Array,
    affine: Affine | None,
    sums: Array | None = None,
) -> tuple[Any, ...]:
    """Gradients of kernel, shift and what was added, given what `needed` kept of that.

    Before them, given `sums` of a norm's gradient: those of its scale and offset, which this one's last launch adds over the samples.
    """
    projects = isinstance(added, Added)
    projected, shortcuts = (added.parts, [added.shortcut]) if projects else ((), [])
    batch, features = dy.shape[0], dy.shape[3]
    pixels, weights = math.prod(dy.shape[:3]), sum(math.prod(w.shape) for w in (kernel, *shortcuts))
    # At least the gradients themselves, which are float32 until all sums are there.
    workspace = (
        max(min(weights * -(-pixels // 64), PARTIAL_SUMS), weights)
        + (2 * batch + PARTIAL_SHIFTS) * features
    )
    # The kernels write the types that they can write: that of the parameters if it is float32 or that of x.
    wanted = [
        (kernel.shape, kernel.dtype),
        ((shift.shape[0], features), shift.dtype),
        *((w.shape, w.dtype) for w in shortcuts),
    ]
    norm = () if sums is None else (sums,)
    wanted += [((1, sums.shape[2]), sums.dtype) for sums in norm for _ in range(2)]
    shapes = [
        jax.ShapeDtypeStruct(shape, t if t in (jnp.float32, dy.dtype) else jnp.float32)
        for shape, t in wanted
    ]
    shapes += [jax.ShapeDtypeStruct((workspace,), jnp.float32)]
    call = jax.ffi.ffi_call('jaxunet_conv3x3_weight_gradient', shapes, vmap_method='sequential')
    counts = {'parts': np.int64(len(parts)), 'residuals': np.int64(len(projected))}
    flags = {'activation': affine is not None, 'norm': sums is not None}
    found = call(*parts, dy, *(affine or ()), *projected, *norm, **counts, **flags)
    dkernel, dshift, *others = (
        gradient.astype(t) for gradient, (_, t) in zip(found[:-1], wanted, strict=True)
    )
    of_shortcut, of_norm = others[: len(shortcuts)], others[len(shortcuts) :]
    if projects:
        return (
            *of_norm,
            dkernel,
            dshift,
            Added(_shortcut_gradient(dy, added.shortcut, projected), *of_shortcut),
        )
    return *of_norm, dkernel, dshift, None if added is None else Added((dy,), None)


@jax.custom_vjp
def _conv(parts: Parts, kernel: Array, shift: Array, added: Added | None) -> Array:
    return _convolve(parts, kernel, shift, added, None)


def _conv_forward(
    parts: Parts, kernel: Array, shift: Array, added: Added | None
) -> tuple[Array, Any]:
    return _conv(parts, kernel, shift, added), (parts, kernel, outline(shift), needed(added))


def _conv_backward(saved: Any, dy: Array) -> tuple[Any, ...]:
    parts, kernel, shift, added = saved
    dx = _input_gradient(dy, kernel, tuple(p.shape[3] for p in parts))
    return dx, *_parameter_gradients(parts, kernel, shift, added, dy, None)


def _fuses_activation(parts: Parts) -> bool:
    """Whether the convolution activates its input: the kernels for other channels and float32 would do it once for each tap."""
    return _tiled(parts) and parts[0].shape[1] * parts[0].shape[2] >= FUSED_PIXELS


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _norm_conv(
    x: Activation,
    scale: Array,
    offset: Array,
    kernel: Array,
    shift: Array,
    added: Added | None,
    groups: int,
    eps: float,
    passing: int,
) -> Any:
    return _norm_conv_forward(x, scale, offset, kernel, shift, added, groups, eps, passing)[0]


def _norm_conv_forward(
    x: Activation,
    scale: Array,
    offset: Array,
    kernel: Array,
    shift: Array,
    added: Added | None,
    groups: int,
    eps: float,
    passing: int,
) -> tuple[Any, Any]:
    if _fuses_activation(x.parts):
        norm = statistics(x, scale, offset, groups=groups, eps=eps)
        mean, inverse, affine = norm.mean, norm.inverse, (norm.a, norm.b)
        y = _convolve(x.parts, kernel, shift, added, affine)
    else:
        active, (*_, mean, inverse) = normalise(x, scale, offset, groups, eps, True)
        y, affine = _convolve((active,), kernel, shift, added, None), None
    return (y, (x.parts,) * passing), (
        x,
        scale,
        offset,
        kernel,
        outline(shift),
        needed(added),
        mean,
        inverse,
        affine,
    )


def _norm_conv_backward(
    groups: int, eps: float, passing: int, saved: Any, given: Any
) -> tuple[Any, ...]:
    del eps, passing
    (dy, passed), (x, scale, offset, kernel, shift, added, mean, inverse, affine) = given, saved
    (dactive,) = _input_gradient(dy, kernel, (x.channels,))
    # What the forward pass did not keep, the weight gradient applies again, or this launch writes again. Where samples share scale and
    # offset, their sums are added with the weight gradient's.
    shared = scale.shape[0] == offset.shape[0] == 1
    options: dict[str, Any] = {
        'groups': groups,
        'silu': True,
        'activation': affine is None,
        'added': passed,
        'samples': not shared,
    }
    found = gradient(x.parts, dactive, scale, offset, mean, inverse, **options)
    parts = x.parts if found.active is None else (found.active,)
    others = _parameter_gradients(
        parts, kernel, shift, added, dy, affine, found.sums if shared else None
    )
    of_scale, of_offset, *rest = others if shared else (found.scale, found.offset, *others)
    return (
        Activation(found.dx, x.zero_moments),
        of_scale.astype(scale.dtype),
        of_offset.astype(offset.dtype),
        *rest,
    )


_conv.defvjp(_conv_forward, _conv_backward)
_norm_conv.defvjp(_norm_conv_forward, _norm_conv_backward)
