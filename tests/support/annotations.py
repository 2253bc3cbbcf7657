"""Checks the array annotations of the packages at run time: jaxtyping's shapes by beartype."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar, get_origin, get_type_hints

import beartype
import jaxtyping

Function = TypeVar('Function', bound=Callable[..., object])
Target = TypeVar('Target')  # a function or a class
Decorator = Callable[[Target], Target]

PACKAGES = ('jaxunet', 'pallas_kernels', 'xla_ffi')
# Functions without an array among their annotations are left to mypy, because tests pass them wrong
# configs on purpose.
ARRAY = re.compile(r'\b(Bool|Complex|Float|Inexact|Int|Integer|Key|Num|Real|Shaped|UInt)\d*\[')
# JAX replaces the arrays of this tree by shapes and shardings.
PLACEHOLDERS = {'jaxunet.checkpoint.state.TrainState.__init__'}
_CONF = beartype.BeartypeConf(is_pep484_tower=True)  # an int is a float, as for mypy


def check(signature: Function, **options: object) -> Function:
    """Returns a function that checks its arguments, if one of them is an array of a known shape.

    Args:
      signature: a function that jaxtyping makes, with the signature of a function in the packages.
        jaxtyping calls such a function twice: before the original function (it returns Any), and
        after it (it also gets the result). Only the second is checked, so that the original
        function can raise its own error about a wrong array.
    """
    annotations = getattr(signature, '__annotations__', {})
    if annotations.get('return') is Any or _name(signature) in PLACEHOLDERS:
        return signature
    for name, annotation in annotations.items():
        if hasattr(get_origin(annotation), '_fields'):
            annotations[name] = tuple  # beartype 0.23 cannot check generic NamedTuples
    if any(ARRAY.search(str(annotation)) for annotation in annotations.values()):
        try:
            return beartype.beartype(signature, conf=_CONF, **options)
        except beartype.roar.BeartypeDecorHintPepUnsupportedException:
            return signature  # generic named tuples, on Python 3.12 and later
    return signature


def install(root: pathlib.Path) -> None:
    """Checks all modules under `root` that are imported from now on, except for tests."""
    jaxtyping.jaxtyped = _only_with_arrays(jaxtyping.jaxtyped)  # the hook calls it by this name
    modules = [
        '.'.join(path.relative_to(root).with_suffix('').parts)
        for package in PACKAGES
        for path in sorted((root / package).rglob('*.py'))
        if not path.name.startswith(('test_', 'parity_test', '__init__'))
    ]
    jaxtyping.install_import_hook(modules, 'support.annotations.check')


def _only_with_arrays(jaxtyped: Callable[..., Decorator]) -> Callable[..., Decorator]:
    """Makes jaxtyping's decorator return functions and classes without arrays as they are.

    Otherwise each of their calls would be about 20 µs slower, and a test may make millions.
    """
    known: dict[CodeType | type, bool] = {}  # a nested function is decorated at every call

    def decorate(decorator: Decorator[Target], target: Target) -> Target:
        code = getattr(target, '__code__', target)
        if code not in known:
            known[code] = _may_have_array(target)
        return decorator(target) if known[code] else target

    return lambda **options: functools.partial(decorate, jaxtyped(**options))


def _may_have_array(target: Callable[..., object]) -> bool:
    try:
        hints = get_type_hints(target, include_extras=True)
    except Exception:  # a name that only a type checker or an enclosing function knows
        return True
    return any(ARRAY.search(str(hint)) for hint in hints.values())


def _name(function: Callable[..., object]) -> str:
    return f'{function.__module__}.{function.__qualname__}'
