"""Checks a config: field names, types, values and the relations between fields."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from ml_collections import ConfigDict

from jaxunet.config.relations import check_relations
from jaxunet.config.schema import FACTS, OPS, Config, Fields, by_path
from jaxunet.config.versions import with_current_names
from jaxunet.runtime.errors import UserError, itemized, near_misses
from jaxunet.runtime.plugins import backend_names, load_backend
from jaxunet.runtime.untrusted import plain, shown

T = TypeVar('T')

INVALID = 'the config is not valid:'  # begins the message of `resolve`
SHIPPED = ('pallas', 'cuda')  # kernel backends in this repository
SIZES = ('data.image_size', 'model.low_res_size')
FLOAT32 = (2 - 2**-23) * 2.0**127  # the largest number


def split_backend(text: str, field: str = 'backend') -> tuple[str, dict[str, str]]:
    """Returns the backend that `text` names, and the ops that it assigns to other backends.

    For example, `pallas+adamw=cuda` gives `('pallas', {'adamw': 'cuda'})`.

    Args:
      text: BACKEND or BACKEND+OP=BACKEND+...
      field: the config field or flag named in errors.

    Raises:
      UserError: a backend that is not installed or does not load, an unknown op, an op given
        twice, or a backend without a kernel for the op.
    """
    base, *parts = text.split('+')
    bases = ('auto', 'xla', *backend_names())
    if base not in bases:
        raise UserError(
            f'{field}: expected one of {", ".join(bases)}, found {base!r}{_hint(base, bases)}'
        )
    changed: dict[str, str] = {}
    for part in parts:
        op, _, name = part.partition('=')
        if op not in OPS:
            raise UserError(
                f'{field}: expected {base}+OP=BACKEND with one of {", ".join(OPS)}, '
                f'found {part!r}{near_misses(op, OPS)}'
            )
        if name not in bases[1:]:
            raise UserError(
                f'{field}: {op}: expected one of {", ".join(bases[1:])}, '
                f'found {name!r}{_hint(name, bases[1:])}'
            )
        if name != 'xla' and op not in load_backend(name).ops:
            allowed = [
                'xla',
                *(other for other in backend_names() if op in load_backend(other).ops),
            ]
            raise UserError(f'{field}: {op}: expected one of {", ".join(allowed)}, found {name!r}')
        if op in changed:
            raise UserError(f'{field}: {op} is given twice in {text!r}; give it once')
        changed[op] = name
    return base, changed


def _hint(name: str, known: Sequence[str]) -> str:
    """Returns advice about an unknown backend.

    Entry points exist only after jaxunet is installed; if it is only on the path, even its own
    backends are unknown.
    """
    if name in SHIPPED:
        return (
            f'; {name} comes with jaxunet, which is not installed here: run '
            '"pip install -e ." in its folder, or install its wheel'
        )
    return near_misses(name, known)


def resolve(values: ConfigDict | Fields) -> Config:
    """Checks field names, types and values, and returns the frozen config.

    Raises:
      UserError: the config is invalid; the message lists every problem.
    """
    problems: list[str] = []
    raw = values.to_dict() if isinstance(values, ConfigDict) else values
    if not isinstance(raw, dict):
        raise UserError(
            'the config: expected the ConfigDict of default_config() with fields changed, '
            f'found {raw!r}'
        )
    config = _build(Config, raw, '', problems)
    if not problems:
        problems += _check_values(config)
    if problems:
        raise UserError(f'{INVALID}{itemized(problems)}')
    return config


def _build(section: type[T], values: object, prefix: str, problems: list[str]) -> T:
    """Returns the dataclass `section` with `values`, and appends what is wrong to `problems`."""
    if not isinstance(values, dict):
        problems.append(
            f'{prefix.rstrip(".")}: expected a section with the fields of {section.__name__}, '
            f'found {shown(values)}'
        )
        return section()
    hints: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(cast(Any, section))}
    known = set(hints)
    values = with_current_names(values, prefix)
    for name in sorted(set(values) - known):
        problems.append(f'{prefix}{plain(name)}: unknown field{near_misses(name, known)}')
    built: Fields = {}
    for name in sorted(set(values) & known):
        hint, path = hints[name], prefix + name
        if dataclasses.is_dataclass(hint):
            built[name] = _build(cast(type, hint), values[name], path + '.', problems)
        else:
            built[name] = _coerce(values[name], hint, path, problems)
    return section(**built)


def _coerce(
    value: object, hint: type | types.GenericAlias, path: str, problems: list[str]
) -> object:
    """Returns the value as the type of its field; appends to `problems` where it does not fit.

    Lists (from JSON) become tuples. An int is accepted for a float, and a number for a string in
    a tuple.
    """
    if isinstance(hint, types.GenericAlias):
        if not isinstance(value, list | tuple):
            one = f'; write ({value!r},)' if isinstance(value, str | int | float) else ''
            problems.append(f'{path}: expected a tuple, found {value!r}{one}')
            return ()
        if path in SIZES and len(value) == 1 and isinstance(value[0], str):
            # Such as --config.data.image_size=16x16 on a command line.
            problems.append(
                f'{path}: expected SIDE or HEIGHT,WIDTH, such as 64 or 48,64, '
                f'found {shown(value[0])}'
            )
            return ()
        if hint.__args__[0] is str:
            # --config.data.classes=7,1 on a command line means the names '7' and '1'.
            value = [str(v) if type(v) in (int, float) else v for v in value]
        return tuple(
            _coerce(v, hint.__args__[0], f'{path}[{i}]', problems) for i, v in enumerate(value)
        )
    if hint is float and isinstance(value, int | float) and not abs(value) <= FLOAT32:
        problems.append(f'{path}: expected a finite number of float32, found {shown(value)}')
        return value
    if hint is float and type(value) is int:
        # Not converted: multipliers such as channel_mult=(1, 2) print and compare as written.
        return value
    if type(value) is not hint:
        problems.append(
            f'{path}: expected {hint.__name__}, found {value!r} ({type(value).__name__})'
        )
    return value


def _check_values(config: Config) -> list[str]:
    """Returns one line per problem of a single value, or else per problem between fields."""
    problems = [
        f'{path}: {problem}'
        for path, value in by_path(config).items()
        for one in (value if isinstance(value, tuple) else (value,))
        if (problem := FACTS[path].problem(one))
    ]
    try:
        split_backend(config.backend)
    except UserError as error:
        problems.append(str(error))
    return problems or check_relations(config)


def diff(old: Config, new: Config) -> list[str]:
    """Returns a line `section.field: old -> new` for every field that differs."""
    now = by_path(new)
    return [
        f'{path}: {value!r} -> {now[path]!r}'
        for path, value in by_path(old).items()
        if value != now[path]
    ]
