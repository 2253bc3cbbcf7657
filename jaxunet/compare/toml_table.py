"""Reads the keys of a TOML table, and checks the types of their values."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import EllipsisType
from typing import Any

from jaxunet.runtime.errors import UserError, listed, near_misses
from jaxunet.runtime.untrusted import NUMBER, shown

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
      UserError: no such file, or it is not TOML.
    """
    try:
        with path.open('rb') as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        neighbours = [p.name for p in path.parent.glob(f'*{path.suffix}')]
        raise UserError(f'no file {path}{near_misses(path.name, neighbours)}') from None
    except OSError as error:
        raise UserError(f'{path}: cannot be read: {error.strerror or error}') from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f'{path}: expected TOML, found another text: {error}') from None
    return Table(values, f'{path}: ')


class Table:
    """Values by key.

    Args:
      place: start of every error message: the file, and the path of the table in it, ending in a
        dot.
    """

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self._values, self.place = values, place
        self._known: list[str] = []

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
    return isinstance(value, kind) and not (isinstance(value, bool) and kind in (int, NUMBER))
