"""3×3 convolution (NHWC, stride 1, zero padding 1), and its fusion with GroupNorm and SiLU.

In plain JAX: the reference that kernels are tested against, and the xla backend.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation, at_least_float32
from jaxunet.ops.conv3x3.operands import check_operands
from jaxunet.ops.conv3x3.upsampling import upsampled
from jaxunet.ops.group_norm.reference import group_norm


def conv3x3(
    x: Activation,
    kernel: Float[Array, '3 3 channels features'],
    shift: Float[Array, '#batch features'],
    *,
    residual: Activation | None = None,
    shortcut: Float[Array, 'residual_channels features'] | None = None,
) -> Activation:
    """conv(x, kernel) + shift [+ residual, or residual · shortcut].

    Products accumulate in float32, sums around them are in at least float32; the result has x's
    dtype.

    Args:
      shift: (1, features) is a bias; (batch, features) is a bias plus a time shift per sample.
      shortcut: a 1×1 convolution, for a residual whose channels differ from `features`.

    Raises:
      ValueError: shapes or types do not fit, or a shortcut has no residual.
    """
    check_operands(x, kernel, shift, residual, shortcut)
    value = x.value
    wide = at_least_float32(value.dtype)
    y = jax.lax.conv_general_dilated(
        value,
        kernel.astype(value.dtype),
        (1, 1),
        ((1, 1), (1, 1)),
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
    y = y.astype(wide) + shift.astype(wide)[:, None, None, :]
    if residual is not None:
        r = residual.value
        if shortcut is not None:
            r = jnp.einsum('bhwc,cf->bhwf', r, shortcut.astype(r.dtype))
        y = y + r.astype(wide)
    return Activation.of(y.astype(value.dtype))


def upsample_conv3x3(
    x: Activation,
    kernel: Float[Array, '3 3 channels features'],
    shift: Float[Array, '#batch features'],
) -> Activation:
    """conv3x3 of x with every pixel repeated in two rows and two columns.

    Arguments and errors as `conv3x3`.
    """
    return upsampled(conv3x3)(x, kernel, shift)


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
) -> Activation:
    """conv3x3(SiLU(norm(x) · scale + offset)) + shift [+ residual]: half a residual block.

    The convolution's zero padding is applied after the activation. Arguments and errors as
    `conv3x3` and `jaxunet.ops.group_norm.reference.group_norm`.
    """
    active = group_norm(x, scale, offset, groups=groups, eps=eps, silu=True)
    return conv3x3(Activation.of(active), kernel, shift, residual=residual, shortcut=shortcut)
