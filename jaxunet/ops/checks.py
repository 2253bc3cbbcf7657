"""The checks of operands that several ops share."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

KERNEL_TYPES = ('bfloat16', 'float16', 'float32')  # of activations; parameters may be wider


def check_image(op: str, name: str, value: Array) -> None:
    """Checks that an operand is an NHWC array with at least one channel.

    Raises:
      ValueError: another rank, or no channels.
    """
    if value.ndim != 4 or not value.shape[3]:
        raise ValueError(
            f'{op}: {name}: shape {list(value.shape)}; expected [batch, height, width, channels]'
        )


def check_floating(op: str, **operands: Array | None) -> None:
    """Checks that operands are arrays of floating-point numbers.

    Raises:
      ValueError: one has another type; the message names it.
    """
    for name, value in operands.items():
        if value is not None and not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f'{op}: {name}: {value.dtype}; expected bfloat16, float16 or float32')


def check_kernel_type(op: str, name: str, value: Array) -> None:
    """Checks that the kernels take the type of an activation. The references take float64 too.

    Raises:
      ValueError: another type.
    """
    check_floating(op, **{name: value})
    if value.dtype not in KERNEL_TYPES:
        raise ValueError(
            f'{op}: {name}: {value.dtype}; the kernels take {", ".join(KERNEL_TYPES)}; cast it, '
            f'or use the xla backend'
        )
