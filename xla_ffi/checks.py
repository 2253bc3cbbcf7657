"""Checks the operands for limits that only the CUDA kernels have."""

from __future__ import annotations

from jaxunet.ops.activation import Activation

MAX_PARTS = 4  # arrays that form one activation: kMaxParts in binding/plan.h
MAX_ARRAYS = 1 << 16  # weights of one optimizer call: kMaxTensors in adamw/read.cc


def check_parts(op: str, name: str, activation: Activation) -> None:
    """Checks that an activation has no more parts than the kernels read.

    Raises:
      ValueError: it has more; the message names the operand.
    """
    remedy = 'concatenate some of them, or use the xla backend'
    _check(op, name, 'parts', len(activation.parts), MAX_PARTS, remedy)


def check_arrays(op: str, name: str, count: int) -> None:
    """Checks that a call has no more arrays of a kind than the handlers of the optimizer take.

    Raises:
      ValueError: it has more; the message names the operand.
    """
    _check(op, name, 'arrays', count, MAX_ARRAYS, 'use the xla backend')


def _check(op: str, name: str, unit: str, count: int, most: int, remedy: str) -> None:
    if count > most:
        raise ValueError(
            f'{op}: {name}: {count} {unit}; the CUDA kernels take at most {most}; {remedy}'
        )
