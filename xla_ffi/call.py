"""Calls of the FFI handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxunet.ops.transformations import vary, varying_axes
from jaxunet.runtime import device


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
