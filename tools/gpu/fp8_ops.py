"""Backends that round the operands of 3×3 convolutions to FP8, for `tools/gpu/fp8.py`.

They simulate FP8 kernels: operands are rounded to the values that FP8 holds, and the matrix work is
that of the usual kernels, in 16 bits, which hold these values exactly. Products still accumulate in
float32. `BACKENDS` has one backend for each variant of the tool:

    fp8-none     rounds nothing: GroupNorm and SiLU, then the convolution
    fp8-forward  the forward pass reads activations and weights in e4m3
    fp8-e4m3     ... and the input gradient reads dy and the weights in e4m3
    fp8-e5m2     ... and the input gradient reads dy in e5m2 and the weights in e4m3

What is not named reads unrounded operands: weight gradients always, input gradients of fp8-forward.
Convolutions of few channels, such as the network's first and last, shortcuts, linear layers and
the convolutions after upsampling round nothing.

Activations have the fixed scale `SCALE`; GroupNorm and SiLU have been applied to them. Weights and
dy have one scale per tensor and step, from their largest magnitude in the same step; a kernel would
use that of an earlier step for dy. Scales are powers of two, as their product with FP8 values is
then exact in 16 bits.

The rounding is arithmetic on float32, because XLA may drop a pair of casts.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.references import XLA, implementation
from jaxunet.ops.vocabulary import Conv3x3, Ops, WithInput
from jaxunet.runtime import plugins
from jaxunet.runtime.plugins import Backend

FEW = 4  # most channels or features of a convolution that is not rounded
SCALE = 16.0  # of activations
EXPONENT, LARGEST_EXPONENT = 0x7F800000, 254 << 23  # bits of a float32; of 1/x for a power of two x


class Format(NamedTuple):
    """An FP8 format.

    Fields:
      mantissa: stored bits of the significand.
      least: exponent of the smallest normal number.
      most: largest number; greater magnitudes are clipped to it.
      dtype: numpy's type.
    """

    mantissa: int
    least: int
    most: float
    dtype: type


E4M3 = Format(3, -6, 448.0, ml_dtypes.float8_e4m3fn)
E5M2 = Format(2, -14, 57344.0, ml_dtypes.float8_e5m2)


def rounded(x: Float[Array, '*shape'], to: Format) -> Float[Array, '*shape']:
    """Rounds float32 to a format: to nearest, ties to even, subnormals included."""
    x = jnp.clip(x, -to.most, to.most)
    unit = jnp.maximum(_power_below(x), 2.0**to.least) * 2.0**-to.mantissa
    return lax.round(x * _reciprocal(unit), lax.RoundingMethod.TO_NEAREST_EVEN) * unit


def scale_of(x: Array, to: Format) -> Float[Array, '']:
    """Returns the largest power of two that keeps all magnitudes within the format."""
    most = jnp.maximum(jnp.max(jnp.abs(x.astype(jnp.float32))), 2.0**-100)
    scale = _power_below(jnp.float32(to.most)) * _reciprocal(_power_below(most))
    return jnp.where(most * scale > to.most, scale / 2, scale)


def quantized(x: Array, to: Format, scale: float | None = None) -> Array:
    """Returns x rounded to a format, in x's type.

    Args:
      scale: a power of two; None = `scale_of` x.
    """
    factor = scale_of(x, to) if scale is None else jnp.float32(scale)
    return (rounded(x.astype(jnp.float32) * factor, to) * _reciprocal(factor)).astype(x.dtype)


def check_rounding() -> None:
    """Checks on the default device that `rounded`, compiled, rounds as ml_dtypes does.

    It tries all numbers of 16 bits and of the formats, and the middles between the latter.

    Raises:
      AssertionError: it does not.
    """
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    for to in (E4M3, E5M2):
        own = np.arange(2**8, dtype=np.uint8).view(to.dtype).astype(np.float32)
        own = np.unique(own[np.isfinite(own)])
        middles = (own[1:] + own[:-1]) / 2
        near = [np.nextafter(middles, np.float32(end)) for end in (-np.inf, np.inf)]
        x = np.concatenate([every[~np.isnan(every)], own, middles, *near])
        most = float(ml_dtypes.finfo(to.dtype).max)
        wanted = np.clip(x, -most, most).astype(to.dtype).astype(np.float32)
        found = jax.jit(rounded, static_argnums=1)(x, to)
        np.testing.assert_array_equal(found, wanted)


def _power_below(x: Float[Array, '*shape']) -> Float[Array, '*shape']:
    """Returns the largest power of two that is at most |x|."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & EXPONENT
    return lax.bitcast_convert_type(bits, jnp.float32)


def _reciprocal(power: Float[Array, '*shape']) -> Float[Array, '*shape']:
    """Returns 1 / power of a power of two, exactly; a GPU may divide approximately."""
    bits = LARGEST_EXPONENT - lax.bitcast_convert_type(power, jnp.uint32)
    return lax.bitcast_convert_type(bits, jnp.float32)


@functools.cache
def base() -> Ops:
    """Returns the ops that do the work: those of cuda on a GPU, the references elsewhere."""
    if jax.default_backend() != 'gpu':
        return XLA
    ops = plugins.load_backend('cuda').ops
    return Ops(**{name: implementation(name, ops) for name in Ops._fields})


def rounding(gradient: Format | None) -> Conv3x3:
    """Returns `conv3x3` with an e4m3 forward pass.

    Args:
      gradient: of dy in the input gradient; None = it reads unrounded operands.
    """

    @jax.custom_vjp
    def conv3x3(conv: Convolution) -> Activation:
        image = Activation.of(quantized(conv.image.value, E4M3, SCALE))
        kernel = quantized(conv.kernel, E4M3)
        return base().conv3x3(dataclasses.replace(conv, image=image, kernel=kernel))

    def forward(conv: Convolution) -> tuple[Activation, Convolution]:
        return conv3x3(conv), conv

    def backward(conv: Convolution, dy: Activation) -> tuple[Convolution]:
        _, pull = jax.vjp(base().conv3x3, conv)
        (gradients,) = pull(dy)
        if gradient is None:
            return (gradients,)
        # The input gradient is a convolution of dy. That of `pull` is not used, so XLA removes it.
        dx = base().conv3x3(
            Convolution(
                image=Activation.of(quantized(dy.value, gradient)),
                kernel=quantized(conv.kernel, E4M3)[::-1, ::-1].swapaxes(2, 3),
                shift=jnp.zeros((1, conv.image.channels)),
            )
        )
        return (dataclasses.replace(gradients, image=dx),)

    conv3x3.defvjp(forward, backward)

    def of_one_part(conv: Convolution) -> Activation:
        return conv3x3(dataclasses.replace(conv, image=Activation.of(conv.image.value)))

    return of_one_part


def plain(conv: Convolution) -> Activation:
    """`conv3x3` without rounding."""
    return base().conv3x3(conv)


def backend(name: str, convolve: Conv3x3) -> Backend:
    """Returns a backend with these convolutions, except those of few channels."""

    def few(conv: Convolution) -> bool:
        return min(conv.kernel.shape[2:]) <= FEW

    def conv3x3(conv: Convolution) -> Activation:
        return plain(conv) if few(conv) else convolve(conv)

    def upsample_conv3x3(conv: Convolution) -> Activation:
        return base().upsample_conv3x3(conv)

    def norm_silu_conv3x3(conv: Convolution) -> Activation:
        if few(conv):
            return base().norm_silu_conv3x3(conv)
        active = base().group_norm(conv.image, conv.required_norm, silu=True)
        return convolve(conv.of(active))

    def norm_silu_conv3x3_and_input(conv: Convolution, *, copies: int = 1) -> WithInput[Activation]:
        if few(conv):
            return base().norm_silu_conv3x3_and_input(conv, copies=copies)
        norm = conv.required_norm
        active, passed = base().group_norm_and_input(conv.image, norm, silu=True, copies=copies)
        return WithInput(convolve(conv.of(active)), passed)

    def transform(function: plugins.Transformed, devices: int = 1) -> plugins.Transformed:
        """Merges weight gradients as cuda does, where it does."""
        return plugins.load_backend('cuda').transform_gradients(function, devices)

    ops = (conv3x3, upsample_conv3x3, norm_silu_conv3x3, norm_silu_conv3x3_and_input)
    return Backend(
        name=name,
        title='convolutions of rounded operands',
        api=plugins.API,
        ops={op.__name__: op for op in ops},
        unavailable=lambda: None,
        transform_gradients=transform,
    )


NONE = backend('fp8-none', plain)
FORWARD = backend('fp8-forward', rounding(None))
GRADIENT_E4M3 = backend('fp8-e4m3', rounding(E4M3))
GRADIENT_E5M2 = backend('fp8-e5m2', rounding(E5M2))
BACKENDS = {
    'NONE': NONE,
    'FORWARD': FORWARD,
    'GRADIENT_E4M3': GRADIENT_E4M3,
    'GRADIENT_E5M2': GRADIENT_E5M2,
}


def install(folder: pathlib.Path) -> None:
    """Lets jaxunet find the backends in this process, as if their package were installed.

    Args:
      folder: gets the files that describe the package.
    """
    about = folder / 'fp8_ops-0.dist-info'
    about.mkdir(parents=True, exist_ok=True)
    (about / 'METADATA').write_text('Metadata-Version: 2.1\nName: fp8_ops\nVersion: 0\n')
    points = [f'{one.name} = {__name__}:{name}' for name, one in BACKENDS.items()]
    (about / 'entry_points.txt').write_text('\n'.join([f'[{plugins.BACKEND_GROUP}]', *points]))
    sys.path.append(str(folder))
    for cached in (plugins.backend_entry_points, plugins.load_backend):
        cached.cache_clear()
