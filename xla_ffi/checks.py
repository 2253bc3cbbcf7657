"""Checks the operands for limits that only the CUDA kernels have."""

from __future__ import annotations

from jaxunet.ops.activation import Activation

MAX_PARTS = 4  # arrays that form one activation: kMaxParts in binding/plan.h


def check_parts(op: str, name: str, activation: Activation) -> None:
    """Checks that an activation has no more parts than the kernels read.

    Raises:
      ValueError: it has more; the message names the operand.
    """
    found = len(activation.parts)
    if found > MAX_PARTS:
        raise ValueError(
            f'{op}: {name}: {found} parts; the CUDA kernels take at most {MAX_PARTS}; concatenate '
            f'some of them, or use the xla backend'
        )
