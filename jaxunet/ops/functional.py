"""The ops as functions of plain arrays, for networks other than jaxunet's own.

Each function takes the operands of its op in `jaxunet.ops.vocabulary` as arrays, checks them, and
calls the op of a backend. An activation is an array, or a sequence of arrays that are joined along
channels: the kernels read them where they are, without a concatenated copy. docs/own_networks.md
has examples.

Every function has `backend`, a name as `Config.backend`: `auto` takes the fastest for this device
and the type of the activation; xla runs everywhere. A backend that cannot run here is a `UserError`
that says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.adamw.operands import Constants, Tree, check_scalars, gradient_leaves, state_leaves
from jaxunet.ops.backends import choose
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.dropout import Dropout
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.linear.projections import Projection
from jaxunet.ops.transformations import vary, varying_axes
from jaxunet.ops.vocabulary import Ops

Image: TypeAlias = Float[Array, 'batch height width _']
Images: TypeAlias = Image | Sequence[Image]  # joined along channels
# One for all samples, as a vector or a row, or one per sample.
Channels: TypeAlias = Float[Array, ' channels'] | Float[Array, '#batch channels']
Features: TypeAlias = Float[Array, ' features'] | Float[Array, '#batch features']
AdamWState: TypeAlias = optax.ScaleByAdamState  # count, mu, nu


def conv3x3(
    x: Images,
    kernel: Float[Array, '3 3 channels features'],
    shift: Features,
    *,
    residual: Images | None = None,
    shortcut: Float[Array, 'residual_channels features'] | None = None,
    backend: str = 'auto',
) -> Float[Array, 'batch height width features']:
    """conv(x, kernel) + shift [+ residual, or residual · shortcut]; stride 1, zero padding 1.

    Args:
      shift: a bias (features,), or a bias plus an embedding of each sample (batch, features).
      shortcut: a 1×1 convolution, for a residual whose channels differ from `features`.

    Raises:
      ValueError: shapes or types do not fit, or the kernels do not take them.
      UserError: this machine does not run the backend.
    """
    conv = _convolution(x, kernel, shift, residual, shortcut)
    return _ops(backend, conv.image).conv3x3(conv).value


def upsample_conv3x3(
    x: Images,
    kernel: Float[Array, '3 3 channels features'],
    shift: Features,
    *,
    backend: str = 'auto',
) -> Float[Array, 'batch 2*height 2*width features']:
    """conv3x3 of x with every pixel repeated in two rows and two columns.

    Arguments and errors as `conv3x3`.
    """
    conv = _convolution(x, kernel, shift)
    return _ops(backend, conv.image).upsample_conv3x3(conv).value


def norm_silu_conv3x3(
    x: Images,
    scale: Channels,
    offset: Channels,
    kernel: Float[Array, '3 3 channels features'],
    shift: Features,
    *,
    residual: Images | None = None,
    shortcut: Float[Array, 'residual_channels features'] | None = None,
    groups: int = 32,
    eps: float = 1e-5,
    backend: str = 'auto',
) -> Float[Array, 'batch height width features']:
    """conv3x3(SiLU(GroupNorm(x))) + shift [+ residual, or residual · shortcut].

    Arguments and errors as `conv3x3` and `group_norm`.
    """
    norm = Norm(_rows(scale), _rows(offset), groups, eps)
    conv = _convolution(x, kernel, shift, residual, shortcut, norm)
    return _ops(backend, conv.image).norm_silu_conv3x3(conv).value


def group_norm(
    x: Images,
    scale: Channels,
    offset: Channels,
    *,
    groups: int = 32,
    eps: float = 1e-5,
    silu: bool = False,
    dropout: Dropout | None = None,
    backend: str = 'auto',
) -> Float[Array, 'batch height width channels']:
    """norm(x) · scale + offset, then SiLU if `silu`, then dropout.

    Args:
      scale: (channels,), or (batch, channels) for a scale-shift norm.
      offset: as `scale`.
      groups: divides the channels.
      eps: added to the variance.
      dropout: its seeds are two random words per sample, uint32; None = no dropout.

    Raises:
      ValueError: as `conv3x3`, or `groups` does not divide the channels.
      UserError: this machine does not run the backend.
    """
    norm = Norm(_rows(scale), _rows(offset), groups, eps)
    image, norm, dropout = _prepared(_activation(x), norm, dropout)
    return _ops(backend, image).group_norm(image, norm, silu=silu, dropout=dropout)


def attention(
    qkv: Float[Array, 'batch tokens packed'], *, num_heads: int, backend: str = 'auto'
) -> Float[Array, 'batch tokens channels']:
    """softmax(q·kᵀ/√d)·v for each head of width d = packed / (3 · num_heads).

    Args:
      qkv: all of q, then all of k, then all of v, each head-major.

    Raises:
      ValueError: as `conv3x3`, the heads do not divide the packed channels, or they are wider than
        the kernels take (256).
      UserError: this machine does not run the backend.
    """
    (qkv,) = _prepared(qkv)
    return _ops(backend, qkv).attention(qkv, num_heads=num_heads)


def linear(
    x: Float[Array, 'batch *rest channels'],
    kernel: Float[Array, 'channels features'],
    bias: Features,
    *,
    residual: Float[Array, 'batch *rest features'] | None = None,
    backend: str = 'auto',
) -> Float[Array, 'batch *rest features']:
    """x · kernel + bias [+ residual], in the type of x.

    Args:
      x: vectors, tokens, images, or arrays of more dimensions; the last one is the channels.

    Raises:
      ValueError: as `conv3x3`.
      UserError: this machine does not run the backend.
    """
    x, kernel, bias, residual = _prepared(x, kernel, _rows(bias), residual)
    shape = x.shape
    if x.ndim > 1 and x.ndim != 4:
        x = _pixels(x)
        if residual is not None:
            if residual.shape[:-1] != shape[:-1]:
                wanted = [*shape[:-1], *kernel.shape[1:]]
                raise ValueError(
                    f'linear: residual is {residual.dtype}{list(residual.shape)}; '
                    f'expected {x.dtype}{wanted}'
                )
            residual = _pixels(residual)
    y = _ops(backend, x).linear(x, kernel, bias, residual=residual)
    return y.reshape(*shape[:-1], y.shape[-1])


def project(
    x: Float[Array, 'batch width'],
    kernels: Sequence[Float[Array, 'width _']],
    biases: Sequence[Float[Array, ' _']],
    *,
    backend: str = 'auto',
) -> tuple[Float[Array, 'batch _'], ...]:
    """x · kernel + bias for each kernel and its bias, in float32: many small layers in one launch.

    Use it for the projections of a time embedding, one for each block of a network.

    Args:
      kernels: of any numbers of features; they are cast to the type of x.

    Raises:
      ValueError: as `conv3x3`, or there are fewer or more biases than kernels.
      UserError: this machine does not run the backend.
    """
    if len(kernels) != len(biases):
        raise ValueError(f'project: {len(biases)} biases for {len(kernels)} kernels')
    x, *weights = _prepared(x, *kernels, *biases)
    layers = [
        Projection(kernel.astype(x.dtype), (bias,))
        for kernel, bias in zip(weights[: len(kernels)], weights[len(kernels) :], strict=True)
    ]
    return _ops(backend, x).project(x, layers)


def adamw_init(params: Tree) -> AdamWState:
    """Returns the state of `adamw` before the first step: moments of zero."""
    return optax.scale_by_adam().init(params)


def adamw(
    gradients: Tree,
    state: AdamWState,
    params: Tree,
    *,
    learning_rate: float | Float[Array, ''],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    backend: str = 'auto',
) -> tuple[Tree, AdamWState]:
    """One step of AdamW on all weights, as `optax.adamw`; returns the new params and state.

    With kernels it is one launch. `jaxunet.ops.backends.Kernels.update` has more in that launch:
    clipping, averages of the weights, 16-bit copies.

    Args:
      gradients: float32 arrays, or 16-bit ones of weights that were trained in 16 bits.
      params: float32 arrays. With `jax.jit(..., donate_argnums=...)` they are updated in place.

    Raises:
      ValueError: the trees differ in structure or shapes, or an array has another type.
      UserError: this machine does not run the backend.
    """
    rate = jnp.asarray(learning_rate, jnp.float32)
    check_scalars(learning_rate=rate)
    leaves = gradient_leaves(gradients)
    structure: Any = jax.tree.structure(params)
    for name, tree in (('gradients', gradients), ('mu', state.mu), ('nu', state.nu)):
        if structure != jax.tree.structure(tree):
            raise ValueError(f'adamw: {name}: its tree has another structure than that of params')
    state_leaves(leaves, params, state.mu, state.nu, ())
    kernels, constants = choose(backend, 'float32').update, Constants(b1, b2, eps, weight_decay)
    if kernels is None:
        return _optax_step(constants, gradients, state, params, rate)
    count = optax.safe_increment(state.count)
    step = count.astype(jnp.float32)
    one = jnp.ones((), jnp.float32)
    moved = kernels.adamw(
        constants,
        gradients,
        params,
        state.mu,
        state.nu,
        (),
        take=jnp.ones((), jnp.bool_),
        factor=one,
        learning_rate=rate,
        corrections=(one - jnp.power(b1, step), one - jnp.power(b2, step)),
        follow=(),
    )
    return moved.params, AdamWState(count, moved.mu, moved.nu)


def _optax_step(
    c: Constants, gradients: Tree, state: AdamWState, params: Tree, learning_rate: Float[Array, '']
) -> tuple[Tree, AdamWState]:
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    with jax.numpy_dtype_promotion('standard'):  # optax's own code needs it
        direction, state = optax.scale_by_adam(c.b1, c.b2, c.eps).update(wide, state)
    moved = jax.tree.map(
        lambda p, d: p - learning_rate * (d + c.weight_decay * p), params, direction
    )
    return moved, state


def _convolution(
    x: Array | Sequence[Array],
    kernel: Array,
    shift: Array,
    residual: Array | Sequence[Array] | None = None,
    shortcut: Array | None = None,
    norm: Norm | None = None,
) -> Convolution:
    conv = Convolution(
        image=_activation(x),
        norm=norm,
        kernel=jnp.asarray(kernel),
        shift=_rows(shift),
        residual=None if residual is None else _activation(residual),
        shortcut=None if shortcut is None else jnp.asarray(shortcut),
    )
    return vary(conv, varying_axes(conv))


def _activation(value: Array | Sequence[Array]) -> Activation:
    parts = value if isinstance(value, (list, tuple)) else (value,)
    return Activation(tuple(jnp.asarray(part) for part in parts))


def _rows(value: Array) -> Array:
    """Returns a vector as one row for all samples."""
    value = jnp.asarray(value)
    return value[None, :] if value.ndim == 1 else value


def _pixels(value: Array) -> Array:
    """Returns an array of two or more dimensions as images of one row."""
    return value.reshape(value.shape[0], 1, math.prod(value.shape[1:-1]), value.shape[-1])


def _prepared(*operands: Any) -> list[Any]:
    """Returns operands as JAX arrays that vary over the same axes of a `jax.shard_map`.

    So the gradients of weights that are the same on all devices are summed over the devices.
    """
    # Not `jax.tree.map`: the parameters of Flax's nnx are trees themselves.
    kept = (Activation, Norm, Dropout, type(None))
    arrays = [x if isinstance(x, kept) else jnp.asarray(x) for x in operands]
    return vary(arrays, varying_axes(arrays))


def _ops(backend: str, x: Activation | Array) -> Ops:
    """Returns the ops of a backend; `auto` depends on the type of x."""
    types = [str(leaf.dtype) for leaf in jax.tree.leaves(x)]
    # The op refuses an image without parts, or with parts of several types.
    return choose(backend, types[0] if types else 'float32').ops
