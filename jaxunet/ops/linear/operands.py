"""The checks of the linear layer's operands: those of every backend, and those of the kernels."""

from __future__ import annotations

import math

from jaxtyping import Array

from jaxunet.ops.checks import check_count, check_floating, check_image, check_kernel_type


def check_operands(x: Array, kernel: Array, bias: Array, residual: Array | None) -> None:
    """Checks that the operands fit each other.

    Raises:
      ValueError: shapes or types do not fit; the message names the operand.
    """
    check_image('linear', 'x', x)
    check_floating('linear', x=x, kernel=kernel, bias=bias)
    if kernel.ndim != 2 or kernel.shape[0] != x.shape[3]:
        raise ValueError(
            f'linear: kernel: shape {list(kernel.shape)}; expected [{x.shape[3]}, features]'
        )
    features = kernel.shape[1]
    if bias.shape != (1, features):
        raise ValueError(f'linear: bias: shape {list(bias.shape)}; expected [1, {features}]')
    wanted = (*x.shape[:3], features)
    if residual is not None and (residual.shape != wanted or residual.dtype != x.dtype):
        raise ValueError(
            f'linear: residual is {residual.dtype}{list(residual.shape)}; '
            f'expected {x.dtype}{list(wanted)}'
        )


def check_kernel_operands(x: Array, kernel: Array, bias: Array, residual: Array | None) -> None:
    """Checks the operands for a backend's kernels.

    Raises:
      ValueError: as `check_operands`, or the kernels do not take x's type or this many pixels.
    """
    check_operands(x, kernel, bias, residual)
    check_kernel_type('linear', 'x', x)
    check_count('linear', 'x', 'pixels', math.prod(x.shape[:3]))
