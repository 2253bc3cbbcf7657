"""Sampling options as a Python program gives them: of any type, and with lists for tuples."""

from __future__ import annotations

import contextlib
import operator
import typing
from types import EllipsisType, GenericAlias
from typing import Any

import numpy as np

from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.sampling.options import SamplerConfig

KINDS = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'a text'}


def as_options(given: dict[str, Any]) -> dict[str, Any]:
    """Returns options with the types of the fields of `SamplerConfig`.

    Lists and arrays of numbers become tuples, and numbers of NumPy and JAX those of Python.

    Raises:
      UserError: an unknown option, or a value of another type.
    """
    hints = typing.get_type_hints(SamplerConfig)
    del hints['name']  # the argument `sampler`
    for name in given:
        if name not in hints:
            raise UserError(f'{name}: unknown option{near_misses(name, hints)}')
    return {name: as_type(name, value, hints[name]) for name, value in given.items()}


def as_whole(name: str, value: Any, least: int) -> int:
    """Returns a whole number of Python, NumPy or JAX; raises `UserError` for anything else."""
    with contextlib.suppress(TypeError):
        if (number := operator.index(value)) >= least:
            return number
    raise UserError(f'{name}: expected {least} or more, found {value!r}')


def as_progress(progress: Any) -> Any:
    """Returns the argument `progress`, a function, True or False; raises `UserError` for others."""
    return progress if callable(progress) else as_type('progress', progress, bool, 'or a function')


def as_type(name: str, value: object, hint: Any, others: str = '') -> Any:
    """Returns the value of an argument as its type, which is `hint`: X or X | None.

    Args:
      others: what else the argument may be, for the message.

    Raises:
      UserError: it is of another type.
    """
    kind = hint if isinstance(hint, type | GenericAlias) else typing.get_args(hint)[0]
    if value is None and kind is not hint:
        return None
    try:
        plain = np.asarray(value).tolist()
    except ValueError:  # lists of several lengths
        plain = value
    if not isinstance(kind, GenericAlias):
        if _is(plain, kind):
            return plain
        expected = f'{KINDS[kind]} {others}'.rstrip()
        raise UserError(f'{name}: expected {expected}, found {value!r}')
    item, more = typing.get_args(kind)
    count = None if isinstance(more, EllipsisType) else len(typing.get_args(kind))
    fits = isinstance(plain, list) and all(_is(one, item) for one in plain)
    if fits and count in (None, len(plain)):
        return tuple(plain)
    numbers = KINDS[item].removeprefix('a ') + 's'
    expected = f'a tuple of {numbers}' if count is None else f'a tuple of {count} {numbers}'
    raise UserError(f'{name}: expected {expected}, found {value!r}')


def _is(value: object, kind: type) -> bool:
    return type(value) in ((int, float) if kind is float else (kind,))
