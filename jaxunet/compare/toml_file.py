"""Reads TOML files that may be damaged or hostile, and checks their keys and values."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxunet.runtime.errors import UserError, listed, near_misses
from jaxunet.runtime.untrusted import MAX_DEPTH, NUMBER, check_values, read_limited, shown

MAX_BYTES = 2**20
ADVICE = 'shorten it'
# Texts and comments, in which dots are no part of a key; also those without an end.
TEXTS = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?(?:\"{3}|\Z)|'{3}.*?(?:'{3}|\Z)"""
    r"""|"(?:\\.|[^"\\\n])*"?|'[^'\n]*'?|\#[^\n]*""",
    re.DOTALL,
)
LONG_KEY = re.compile(rf'(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){{{MAX_DEPTH}}}')
CONTROL = re.compile(r'[\x00-\x1f\x7f-\x9f]')

# kind -> how a message names one, and several
WORDS: dict[object, tuple[str, str]] = {
    str: ('text', 'a list of texts'),
    int: ('a whole number', 'a list of whole numbers'),
    NUMBER: ('a number', 'a list of numbers'),
    dict: ('a table', 'a list of tables'),
    str | NUMBER: ('a number or the path of a file', 'a list of numbers or paths'),
}


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the keys and values of a file.

    Raises:
      UserError: no such file, it is not TOML, a text in it has control characters, or it exceeds
        `MAX_BYTES` or the limits of `check_values`.
    """
    if not path.exists():
        neighbours = [p.name for p in path.parent.glob(f'*{path.suffix}')]
        raise UserError(f'no file {path}{near_misses(path.name, neighbours)}')
    data = read_limited(path, MAX_BYTES, advice=ADVICE)
    deep = f'{path}: expected at most {MAX_DEPTH} levels of keys and lists, found more; {ADVICE}'
    try:
        text = data.decode()
        # Before it is parsed, as a key takes memory and time with the square of its parts.
        if LONG_KEY.search(TEXTS.sub('x', text)):
            raise UserError(deep)
        values = tomllib.loads(text)
        check_values(values)
    except RecursionError:
        raise UserError(deep) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f'{path}: expected TOML, found another text: {error}') from None
    except ValueError:
        raise UserError(
            f'{path}: expected numbers of at most 64 bits, found a longer one; {ADVICE}'
        ) from None
    for part in _texts(values):
        if CONTROL.search(part):
            raise UserError(
                f'{path}: expected texts without control characters, found {shown(part)}'
            )
    return values


def _texts(value: object) -> Iterator[str]:
    """Yields all texts of a value, with the keys of tables."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value:
            yield from _texts(part)
        for part in value.values() if isinstance(value, dict) else ():
            yield from _texts(part)


def check_form(values: Mapping[str, Any], form: Mapping[str, Any], place: str) -> None:
    """Checks the keys of a table and the types of their values.

    Args:
      form: key -> one of `WORDS`, a list with the kind of its elements, or the form of a table. A
        key that ends in ? may be missing; the key * is for all keys.
      place: the file, and the path of the table in it, ending in a dot; begins a message.

    Raises:
      UserError: a key is missing or unknown, its value is of another type, or a list is empty.
    """
    if '*' in form:
        form = dict.fromkeys(values, form['*'])
    for name, kind in form.items():
        key = name.removesuffix('?')
        if key in values or key == name:
            _check_value(values.get(key, ...), kind, f'{place}{key}')
    known = [name.removesuffix('?') for name in form]
    for key in values:
        if key not in known:
            raise UserError(
                f'{place}{key}: unknown key{near_misses(key, known)}; expected some of '
                f'{listed(known)}'
            )


def _check_value(value: object, kind: Any, place: str) -> None:
    several = isinstance(kind, list)
    every, one = (value, kind[0]) if several else ([value], kind)
    type_ = dict if isinstance(one, Mapping) else one
    if not (
        isinstance(every, list)
        and every
        and all(isinstance(v, type_) and not isinstance(v, bool) for v in every)
    ):
        found = 'none' if value is ... else shown(value)
        raise UserError(f'{place}: expected {WORDS[type_][several]}, found {found}')
    if isinstance(one, Mapping):
        for i, inside in enumerate(every):
            check_form(inside, one, f'{place}[{i}].' if several else f'{place}.')
