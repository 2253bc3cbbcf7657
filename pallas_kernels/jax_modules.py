"""The modules of JAX that the kernels are written in; a version of JAX may lack some of them.

JAX promises neither its private modules nor `jaxlib.mlir`. Only this file imports them; the kernels
import them from here:

    from pallas_kernels.jax_modules import mosaic_gpu as plgpu

If this version of JAX lacks one, that import raises an error that says what to do. `check_runs`
raises the same line when an op is called.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
from absl import logging

from jaxunet.runtime import device
from jaxunet.runtime.errors import UserError

TESTED = 'jax>=0.10.2,<=0.12.0.1'  # the versions in pyproject.toml
# The source, MODULE or MODULE:NAME, of each name that this file exports.
NAMES = {
    'mosaic_gpu': 'jax.experimental.pallas.mosaic_gpu',
    'mosaic': 'jax.experimental.mosaic.gpu',
    'mosaic_utils': 'jax.experimental.mosaic.gpu.utils',
    'ir': 'jaxlib.mlir.ir',
    'arith': 'jaxlib.mlir.dialects.arith',
    'nvvm': 'jaxlib.mlir.dialects.nvvm',
    'UntilingTransform': 'jax._src.pallas.mosaic_gpu.core:UntilingTransform',
    'TransformedRef': 'jax._src.state.types:TransformedRef',
}


def unavailable() -> str | None:
    """Says what this machine, or this version of JAX, lacks for the kernels; None if they run."""
    try:
        target = device.target()
    except device.UnsupportedDeviceError as error:
        return str(error)
    if target is not device.Target.HOPPER:
        chosen = device.kernels()
        by = '' if chosen is device.Kernels.FASTEST else f' with {device.VARIABLE}={chosen.value}'
        return (
            'the Pallas kernels need a GPU of compute capability 9.0 (Hopper), '
            f'found {device.kind()}{by}'
        )
    return missing()


def check_runs() -> None:
    """Checks that the kernels run here.

    Raises:
      UserError: this machine or version of JAX lacks what they need.
    """
    if lacks := unavailable():
        raise UserError(f'backend=pallas: {lacks}; use backend=cuda or xla')


def supports(op: str, problem: str | None) -> bool:
    """Returns True if the kernels take a call; otherwise XLA runs it, and the log says so.

    Args:
      op: the name in the log.
      problem: why the kernels do not take the call; None if they do.
    """
    if problem:
        _log(f'backend=pallas: XLA runs {op}, whose kernels do not take {problem}')
    return not problem


@functools.cache  # once for each line
def _log(line: str) -> None:
    logging.warning('%s', line)


@functools.cache
def missing() -> str | None:
    """Returns a line that says what this version of JAX lacks; None if nothing."""
    for source in NAMES.values():
        try:
            _load(source)
        except (ImportError, AttributeError) as error:
            return _message(source, error)
    return None


def __getattr__(name: str) -> Any:
    """Loads one of `NAMES`.

    Raises:
      ImportError: this version of JAX lacks it.
    """
    if name not in NAMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    try:
        return _load(NAMES[name])
    except (ImportError, AttributeError) as error:
        raise ImportError(_message(NAMES[name], error)) from error


def _load(source: str) -> Any:
    module, _, name = source.partition(':')
    imported = importlib.import_module(module)
    return getattr(imported, name) if name else imported


def _message(source: str, error: Exception) -> str:
    return (
        f'the Pallas kernels need {source.replace(":", ".")}, which jax {jax.__version__} does not '
        f'have ({error}); install {TESTED}'
    )
