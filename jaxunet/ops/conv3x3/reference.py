"""3×3 convolution (NHWC, stride 1, zero padding 1) and its fusion with what surrounds it in a residual block.

The plain composition: the oracle of every kernel, and the xla backend.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxunet.ops.activation import Activation, at_least_float32
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

    `shift` of shape (1, F) is a bias, of shape (B, F) a bias and time shift per sample. `shortcut` is a 1×1 convolution for a
    residual whose channels differ. The products accumulate in float32; sums around them are in at least float32; the result has
    x's dtype.
    """
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
    elif shortcut is not None:
        raise ValueError('conv3x3: a shortcut needs a residual to be applied to')
    return Activation.of(y.astype(value.dtype))


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
    """conv3x3(SiLU(norm(x) · scale + offset)) + shift [+ residual]: half a residual block as one op.

    The convolution's zero padding is applied after the activation.
    """
    active = group_norm(x, scale, offset, groups=groups, eps=eps, silu=True)
    return conv3x3(Activation.of(active), kernel, shift, residual=residual, shortcut=shortcut)
