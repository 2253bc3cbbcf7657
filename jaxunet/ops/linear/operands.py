"""The checks of the linear layer's operands: those of every backend, and those of the kernels."""

from __future__ import annotations

from jaxtyping import Array

DTYPES = ('bfloat16', 'float16', 'float32')


def check_operands(x: Array, kernel: Array, bias: Array, residual: Array | None) -> None:
    """Checks that the operands fit each other.

    Raises:
      ValueError: shapes or types do not fit; the message names the operand.
    """
    if x.ndim != 4 or not x.shape[3]:
        raise ValueError(
            f'linear: x: shape {list(x.shape)}; expected [batch, height, width, channels]'
        )
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
      ValueError: as `check_operands`, or the kernels do not take x's type.
    """
    check_operands(x, kernel, bias, residual)
    if x.dtype not in DTYPES:
        raise ValueError(f'linear: x: {x.dtype}; expected bfloat16, float16 or float32')
