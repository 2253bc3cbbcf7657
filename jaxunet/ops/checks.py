"""The checks of operands that several ops share."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

# The kernels count pixels, or the queries of all heads, as int32, rounded up to whole tiles.
MAX_COUNT = 2**31 - 4096
MAX_SAMPLES = 65535  # of kernels whose grid has the samples along y or z
KERNEL_TYPES = ('bfloat16', 'float16', 'float32')  # types of activations; parameters may be wider


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


def check_count(op: str, name: str, unit: str, count: int, most: int = MAX_COUNT) -> None:
    """Checks that an operand is not larger than a backend's kernels take.

    Args:
      unit: names the things that are counted, such as pixels.
      most: their largest number.

    Raises:
      ValueError: it has more.
    """
    if count > most:
        raise ValueError(
            f'{op}: {name}: {count} {unit}; the kernels take at most {most}; split the batch, or '
            f'use the xla backend'
        )


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
