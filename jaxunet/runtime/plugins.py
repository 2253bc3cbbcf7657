"""Kernel backends: their interface, and the discovery of installed ones.

A backend is a Python entry point of the group `jaxunet.backends` that names a `Backend`:

    [project.entry-points."jaxunet.backends"]
    pallas = "pallas_kernels.backend:BACKEND"
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from absl import logging

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import one_line, shown

BACKEND_GROUP = 'jaxunet.backends'
SHIPPED = ('pallas_kernels.', 'xla_ffi.')  # the packages of our own backends
Transformed = TypeVar('Transformed', bound=Callable[..., Any])
FUNCTIONS = ('unavailable', 'transform_gradients')  # fields of a `Backend`
API = 5  # version of the interface: grows whenever a signature in `jaxunet.ops.vocabulary` changes


def unchanged(function: Transformed, devices: int = 1) -> Transformed:
    """Returns a gradient function as it is."""
    del devices
    return function


@dataclass(frozen=True, eq=False)  # one object, which may be the key of a cache
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
    points = importlib.metadata.entry_points(group=BACKEND_GROUP)
    unique = {point.name: point for point in points}
    return tuple(
        sorted(
            unique.values(),
            key=lambda point: (not point.value.startswith(SHIPPED), point.value),
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
    points = [point for point in backend_entry_points() if point.name == name]
    if not points:
        known = ', '.join(backend_names()) or 'none'
        raise UserError(
            f'backend={name}: not installed (installed: {known}); '
            'install jaxunet with "pip install -e ." '
            f'or the package that has the entry point {name!r} of {BACKEND_GROUP}'
        )
    (point, *_) = points
    where = f'{point.value} of {_package(point)}'
    if not is_shipped(name):
        # A module may end the process without an exception; then this line is the last one.
        logging.info('backend=%s: importing %s', name, where)
    with blamed(name, f'{where} cannot be imported'):
        backend = point.load()
        found_text = one_line(repr(backend))
    if not isinstance(backend, Backend):
        raise UserError(
            f'backend={name}: {where}: '
            f'expected a jaxunet.runtime.plugins.Backend, found {found_text}'
        )
    if type(backend.api) is not int or backend.api != API:
        raise UserError(
            f'backend={name}: {_package(point)} implements version {shown(backend.api)} of the '
            f'kernel interface, this jaxunet version {API}; install matching versions of both'
        )
    _check_fields(backend, name, where)
    if is_shipped(name):
        return backend
    return dataclasses.replace(backend, unavailable=_asked(name, backend.unavailable))


def is_shipped(name: str) -> bool:
    """Returns True for a backend that comes with jaxunet, False for one of another package."""
    points = [point for point in backend_entry_points() if point.name == name]
    return any(point.value.startswith(SHIPPED) for point in points)


@contextlib.contextmanager
def blamed(backend: str, what: str) -> Iterator[None]:
    """Turns an exception of a backend's code into a UserError that names the backend.

    A lack of memory passes, as does a `UserError` of another kind.

    Args:
      backend: its name in the config.
      what: the code that the block calls.

    Raises:
      UserError: the block raised an exception, or ended Python.
    """
    try:
        yield
    except MemoryError:
        raise
    except UserError as error:
        if type(error) is not UserError or str(error).startswith('backend='):
            raise
        raise UserError(f'backend={backend}: {what}: {error}') from error
    except (Exception, SystemExit) as error:
        if 'RESOURCE_EXHAUSTED' in str(error):  # JAX's words for a device without memory
            raise
        raise _failure(backend, what, error) from error


def at_fault(error: BaseException) -> UserError | None:
    """Returns the error to print for an exception from a backend of another package.

    It may come from a function that XLA calls while a program runs; then only its text names the
    file. None if the exception has another origin.
    """
    for point in backend_entry_points():
        if is_shipped(point.name):
            continue
        home = _home(point)
        if (home and home in str(error)) or _place(error, point.name):
            return _failure(point.name, 'its code', error)
    return None


def _failure(backend: str, what: str, error: BaseException) -> UserError:
    text = str(error)
    if 'Traceback (most recent call last)' in text:  # of a function that XLA called
        text = text.strip().rpartition('\n')[2]
    return UserError(
        f'backend={backend}: {what}: {type(error).__name__}: {one_line(text or "no message")}'
        f'{_place(error, backend)}; mend or update its package, or use backend=xla'
    )


def _place(error: BaseException, backend: str) -> str:
    """Returns ` (FILE, line N)`, the last place in a backend's package that an error passed."""
    homes = tuple(_home(p) for p in backend_entry_points() if p.name == backend and _home(p))
    places = [
        f' ({frame.filename}, line {frame.lineno})'
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(homes)
    ] + [
        f' ({file}, line {line})'
        for file, line in re.findall(r'File "(.+?)", line (\d+)', str(error))
        if file.startswith(homes)
    ]
    return places[-1] if places else ''


def _home(point: importlib.metadata.EntryPoint) -> str:
    """Returns the file of a backend's top module, or its folder with a slash; '' if unknown."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(point.module.partition('.')[0])
        if spec is not None and spec.origin:
            folder, name = os.path.split(spec.origin)
            return f'{folder}{os.sep}' if name == '__init__.py' else spec.origin
    return ''


def _check_fields(backend: Backend, name: str, where: str) -> None:
    """Raises UserError if a field of a backend has another type, or it has another name."""
    kinds: dict[str, tuple[str, Callable[[object], bool]]] = {
        'name': (f'{name!r}, as its entry point', lambda value: value == name),
        'title': ('text', lambda value: isinstance(value, str)),
        'ops': ('a mapping of functions by op', lambda value: isinstance(value, Mapping)),
        **dict.fromkeys(FUNCTIONS, ('a function', callable)),
    }
    for field, (expected, fits) in kinds.items():
        value = getattr(backend, field)
        if not fits(value):
            raise UserError(
                f'backend={name}: {where}: {field}: expected {expected}, found {shown(value)}'
            )


def _asked(name: str, ask: Callable[[], str | None]) -> Callable[[], str | None]:
    """Returns `Backend.unavailable` with a check of what it returns."""

    def asked() -> str | None:
        with blamed(name, 'unavailable()'):
            answer = ask()
        if answer is not None and not isinstance(answer, str):
            raise UserError(
                f'backend={name}: unavailable(): expected None, or text that says what is missing, '
                f'found {shown(answer)}'
            )
        return answer

    return asked


def _package(point: importlib.metadata.EntryPoint) -> str:
    return f'{point.dist.name} {point.dist.version}' if point.dist is not None else point.module
