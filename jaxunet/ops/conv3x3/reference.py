"""3×3 convolution (NHWC, stride 1, zero padding 1), and its fusion with GroupNorm and SiLU.

In plain JAX: the reference that kernels are tested against, and the xla backend.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxunet.ops.activation import Activation, at_least_float32
from jaxunet.ops.conv3x3.operands import Convolution, check_operands
from jaxunet.ops.conv3x3.upsampling import upsampled
from jaxunet.ops.group_norm.reference import group_norm


def conv3x3(conv: Convolution) -> Activation:
    """conv(x, kernel) + shift [+ residual, or residual · shortcut].

    Products accumulate in float32, sums around them are in at least float32; the result has x's
    dtype.

    Raises:
      ValueError: as `check_operands`.
    """
    check_operands(conv)
    value = conv.image.value
    wide = at_least_float32(value.dtype)
    y = jax.lax.conv_general_dilated(
        value,
        conv.kernel.astype(value.dtype),
        (1, 1),
        ((1, 1), (1, 1)),
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
    y = y.astype(wide) + conv.shift.astype(wide)[:, None, None, :]
    if conv.residual is not None:
        r = conv.residual.value
        if conv.shortcut is not None:
            r = jnp.einsum('bhwc,cf->bhwf', r, conv.shortcut.astype(r.dtype))
        y = y + r.astype(wide)
    return Activation.of(y.astype(value.dtype))


def upsample_conv3x3(conv: Convolution) -> Activation:
    """conv3x3 of x with every pixel repeated in two rows and two columns; without a residual.

    Raises:
      ValueError: as `check_upsampled`.
    """
    return upsampled(conv3x3)(conv)


def norm_silu_conv3x3(conv: Convolution) -> Activation:
    """conv3x3(SiLU(norm(x) · scale + offset)) + shift [+ residual]: half a residual block.

    Raises:
      ValueError: as `check_operands` and `jaxunet.ops.group_norm.reference.group_norm`.
    """
    return conv3x3(conv.of(group_norm(conv.image, conv.required_norm, silu=True)))
