"""Calls of the FFI handlers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

from jaxunet.ops.transformations import vary, varying_axes
from jaxunet.runtime import device

MAX_PARTS = 4  # kMaxParts in binding/plan.h


def check_parts(op: str, name: str, parts: Sequence[Array]) -> None:
    """Checks that the kernels can read an image of this many parts.

    Raises:
      ValueError: it has more than `MAX_PARTS`.
    """
    if len(parts) > MAX_PARTS:
        raise ValueError(
            f'{op}: {name}: {len(parts)} parts; the CUDA kernels take at most {MAX_PARTS}; '
            f'concatenate some of them'
        )


def ffi_call(
    target: str, results: Any, *, vmap_method: str = 'sequential', **options: Any
) -> Callable[..., Any]:
    """Returns the call of `jax.ffi.ffi_call` with the same arguments, for a checked `shard_map`.

    JAX assumes that the results of a custom call are the same on every device. Here they vary over
    the mesh axes over which an operand varies.

    If `device.kernels` excludes kernels, an attribute of the call tells the handler, and every
    dispatch obeys it (`xla_ffi/common/device.h`). The attribute is part of the lowered program.
    """
    call = jax.ffi.ffi_call(target, results, vmap_method=vmap_method, **options)

    def run(*operands: Any, **attributes: Any) -> Any:
        axes = varying_axes(operands)
        kernels = device.kernels()
        if kernels is not device.Kernels.FASTEST:
            attributes['kernels'] = kernels.value
        return vary(call(*vary(operands, axes), **attributes), axes)

    return run
