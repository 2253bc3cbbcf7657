"""Kernel backends: their interface, and the discovery of installed ones.

A backend is a Python entry point of the group `jaxunet.backends` that names a `Backend`:

    [project.entry-points."jaxunet.backends"]
    pallas = "pallas_kernels.backend:BACKEND"
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxunet.runtime.errors import UserError

BACKEND_GROUP = 'jaxunet.backends'
Transformed = TypeVar('Transformed', bound=Callable[..., Any])
API = 3  # version of the interface: grows whenever a signature in `jaxunet.ops.vocabulary` changes


def unchanged(function: Transformed, devices: int = 1) -> Transformed:
    """Returns a gradient function as it is."""
    del devices
    return function


@dataclass(frozen=True)
class Backend:
    """A set of kernels.

    Fields:
      name: name in the config.
      title: name of its kernels in tables, such as 'CUDA kernels'.
      api: version of the interface that it implements: `API` of the jaxunet it was written for.
      ops: implementations by op name of `jaxunet.config.OPS`; the other ops run on XLA.
        Variants (`jaxunet.ops.references.VARIANTS`) are optional; a missing one is composed from
        its op.
      unavailable: returns what this machine lacks to run the kernels, or None if they run here.
      transform_gradients: takes a function that returns gradients and the number of `devices` whose
        gradients are then added, by default 1. It returns a faster function with the same arguments
        and results, for example one that merges small kernels. The function's positional arguments
        are trees of arrays. A training step uses it if the backend computes the convolutions. It is
        called whenever such a step is traced. If it returns another function, a step in 16 bits on
        several devices, without `model.remat`, expects most gradients at the same time, and sums
        them together.
    """

    name: str
    title: str
    api: int
    ops: Mapping[str, Any]
    unavailable: Callable[[], str | None]
    transform_gradients: Callable[..., Callable[..., Any]] = unchanged


@functools.cache
def backend_entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    """Returns the entry points of all installed kernel backends, one per name, ours first."""
    found = importlib.metadata.entry_points(group=BACKEND_GROUP)
    unique = {point.name: point for point in found}
    return tuple(
        sorted(
            unique.values(),
            key=lambda point: (
                not point.value.startswith(('pallas_kernels.', 'xla_ffi.')),
                point.value,
            ),
        )
    )


def backend_names() -> tuple[str, ...]:
    """Returns the names of all installed kernel backends."""
    return tuple(point.name for point in backend_entry_points())


@functools.cache
def load_backend(name: str) -> Backend:
    """Returns the installed backend of that name.

    Raises:
      UserError: the backend is not installed, cannot be imported, is not a `Backend`, or was
        written for another version of jaxunet.
    """
    found = [point for point in backend_entry_points() if point.name == name]
    if not found:
        known = ', '.join(backend_names()) or 'none'
        raise UserError(
            f'backend={name}: not installed (installed: {known}); '
            'install jaxunet with "pip install -e ." '
            f'or the package that has the entry point {name!r} of {BACKEND_GROUP}'
        )
    (point, *_) = found
    try:
        backend = point.load()
    except Exception as error:
        raise UserError(
            f'backend={name}: {point.value} of {_package(point)} cannot be imported: '
            f'{type(error).__name__}: {error}'
        ) from error
    if not isinstance(backend, Backend):
        raise UserError(
            f'backend={name}: {point.value} of {_package(point)}: '
            f'expected a jaxunet.runtime.plugins.Backend, found {backend!r}'
        )
    if backend.api != API:
        raise UserError(
            f'backend={name}: {_package(point)} implements version {backend.api} of the kernel '
            f'interface, this jaxunet version {API}; install matching versions of both'
        )
    return backend


def _package(point: importlib.metadata.EntryPoint) -> str:
    return f'{point.dist.name} {point.dist.version}' if point.dist is not None else point.module
