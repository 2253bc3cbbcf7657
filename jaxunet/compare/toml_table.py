"""Reads the keys of a TOML table, and checks the types of their values."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import EllipsisType
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


def read_toml(path: Path) -> Table:
    """Returns the table of a file.

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
    return Table(values, f'{path}: ')


def _texts(value: object) -> Iterator[str]:
    """Yields all texts of a value, with the keys of tables."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value:
            yield from _texts(part)
        for part in value.values() if isinstance(value, dict) else ():
            yield from _texts(part)


class Table:
    """Values by key.

    Args:
      place: start of every error message: the file, and the path of the table in it, ending in a
        dot.
    """

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self._values, self.place = values, place
        self._known: list[str] = []

    def has(self, key: str) -> bool:
        """Returns True if the table has a key."""
        return key in self._values

    def holds(self, key: str, kind: type) -> bool:
        """Returns True if the value of a key is of this type."""
        return isinstance(self._values.get(key), kind)

    def one(self, key: str, kind: Any, default: Any = ...) -> Any:
        """Returns the value of a key.

        Args:
          kind: one of `WORDS`.
          default: for a file without the key; `...` = the key must be there.

        Raises:
          UserError: the key is missing, or its value is of another type.
        """
        self._known.append(key)
        value = self._values.get(key, default)
        if value is default and not isinstance(default, EllipsisType):
            return default
        if not _is(value, kind):
            self._refuse(key, WORDS[kind][0], value)
        return value

    def several(self, key: str, kind: Any, default: Any = ...) -> Any:
        """Returns the list of a key as a tuple; like `one`, but an empty list is an error, too."""
        self._known.append(key)
        value = self._values.get(key, default)
        if value is default and not isinstance(default, EllipsisType):
            return default
        if not isinstance(value, list) or not value or not all(_is(part, kind) for part in value):
            self._refuse(key, WORDS[kind][1], value)
        return tuple(value)

    def table(self, key: str, *, optional: bool = False) -> Table:
        """Returns the table of a key; an empty one if it is `optional` and missing."""
        values = self.one(key, dict, {}) if optional else self.one(key, dict)
        return Table(values, f'{self.place}{key}.')

    def tables(self, key: str) -> list[Table]:
        """Returns the tables of a key."""
        found = self.several(key, dict)
        return [Table(values, f'{self.place}{key}[{i}].') for i, values in enumerate(found)]

    def every(self) -> dict[str, Any]:
        """Returns all values of a table that may have any keys."""
        self._known += self._values
        return dict(self._values)

    def done(self) -> None:
        """Checks that the table has no keys other than those read so far.

        Raises:
          UserError: it has one.
        """
        for key in self._values:
            if key not in self._known:
                raise UserError(
                    f'{self.place}{key}: unknown key{near_misses(key, self._known)}; expected '
                    f'some of {listed(self._known)}'
                )

    def _refuse(self, key: str, wanted: str, value: object) -> None:
        found = 'none' if value is ... else shown(value)
        raise UserError(f'{self.place}{key}: expected {wanted}, found {found}')


def _is(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
