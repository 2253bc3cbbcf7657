"""The modules of JAX that the kernels are written in; a version of JAX may lack some of them.

JAX deprecates Pallas's Triton lowering for removal, and promises neither its private modules nor
`jaxlib.mlir`. Only this file imports them; the kernels import them from here:

    from pallas_kernels.jax_modules import triton as plgpu

If this version of JAX lacks one, that import raises an error that says which kernels need it and
what to do. `on_hopper` raises the same line earlier, when an op chooses its kernel.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxunet.runtime import device
from jaxunet.runtime.errors import UserError

TESTED = 'jax>=0.10.2,<=0.12.0.1'  # the versions in pyproject.toml


@dataclass(frozen=True, eq=False)
class Part:
    """A part of JAX that some of the kernels need.

    Fields:
      kernels: which ones; messages say "the Pallas kernels {kernels}".
      advice: what to do without it, other than installing another version of JAX.
      names: the source, MODULE or MODULE:NAME, of each name that this file exports.
    """

    kernels: str
    advice: str
    names: Mapping[str, str]


TRITON = Part(
    'in Triton',
    'or use backend=cuda',
    {'triton': 'jax.experimental.pallas.triton'},
)
MOSAIC = Part(
    'for Hopper',
    'use backend=cuda, or set JAXUNET_KERNELS=portable for the Triton kernels',
    {
        'mosaic_gpu': 'jax.experimental.pallas.mosaic_gpu',
        'mosaic': 'jax.experimental.mosaic.gpu',
        'mosaic_utils': 'jax.experimental.mosaic.gpu.utils',
        'ir': 'jaxlib.mlir.ir',
        'arith': 'jaxlib.mlir.dialects.arith',
        'nvvm': 'jaxlib.mlir.dialects.nvvm',
        'UntilingTransform': 'jax._src.pallas.mosaic_gpu.core:UntilingTransform',
        'TransformedRef': 'jax._src.state.types:TransformedRef',
    },
)


def runs_hopper() -> bool:
    """Returns True if this process's device runs the Hopper kernels, which need Mosaic GPU.

    Raises:
      UserError: it does, but this version of JAX lacks what they need.
    """
    if device.target() is not device.Target.HOPPER:
        return False
    if lacks := missing(MOSAIC):
        raise UserError(f'backend=pallas: {lacks}')
    return True


def on_hopper(op: str, problem: Callable[[], str | None], *, interpret: bool = False) -> bool:
    """Returns True if a call runs on the Hopper kernel, False if on the Triton kernel.

    Args:
      op: the name in errors.
      problem: returns why the Hopper kernel does not accept the call; None if it does. Called only
        on devices that run the Hopper kernels.
      interpret: take the Triton kernel, which the caller interprets.

    Raises:
      UserError: this version of JAX lacks what the kernel needs.
    """
    reason = "Hopper's kernels do not run here"
    if not interpret and runs_hopper():
        found = problem()
        if found is None:
            return True
        reason = f"Hopper's does not take {found}"
    if lacks := missing(TRITON):
        raise UserError(f'backend=pallas: {op} needs a Triton kernel ({reason}); {lacks} or xla')
    return False


@functools.cache
def missing(part: Part) -> str | None:
    """Returns a line that says what this version of JAX lacks of a part; None if nothing."""
    for source in part.names.values():
        try:
            _load(source)
        except (ImportError, AttributeError) as error:
            return _message(part, source, error)
    return None


def __getattr__(name: str) -> Any:
    """Loads one of the names of TRITON and MOSAIC.

    Raises:
      ImportError: this version of JAX lacks it.
    """
    for part in (TRITON, MOSAIC):
        if name in part.names:
            try:
                return _load(part.names[name])
            except (ImportError, AttributeError) as error:
                raise ImportError(_message(part, part.names[name], error)) from error
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def _load(source: str) -> Any:
    module, _, name = source.partition(':')
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def _message(part: Part, source: str, error: Exception) -> str:
    return (
        f'the Pallas kernels {part.kernels} need {source.replace(":", ".")}, which jax '
        f'{jax.__version__} does not have ({error}); install {TESTED}, {part.advice}'
    )
