"""`UserError`, which commands print without a traceback, and helpers for its messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

ERROR = 1  # exit code after any exception that is not a UserError
USER_ERROR = 2  # exit code of a command that ends with a UserError


class UserError(Exception):
    """A mistake that the user can correct, in a flag, a config, a data file or a weight file.

    The message names the file or field, what was expected, what was found and what to do.

    Attributes:
      exit_code: exit code of a command that ends with this error.
    """

    exit_code = USER_ERROR

    def __str__(self) -> str:
        """Returns the message; names in it may be a stranger's."""
        return printable_lines(super().__str__())


def printable(name: str) -> str:
    """Returns a name, which may hold any characters, as one line for any terminal.

    What is not printable becomes an escape such as \\x1b: control characters, which a terminal
    obeys, marks that change the direction of the text, line separators and lone surrogates.
    """
    if name.isprintable():
        return name
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in name)


def printable_lines(text: str) -> str:
    """Returns a text of several lines with each line `printable`."""
    return '\n'.join(map(printable, text.split('\n')))


def near_misses(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean "a" or "b"?` with known names similar to `name`, or ''."""
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    quoted = ' or '.join(f'"{printable(match)}"' for match in matches)
    return f'; did you mean {quoted}?' if matches else ''


def heading(name: str) -> str:
    """Returns a name with a colon behind it for a message; a set such as digits: has its own."""
    return name if name.endswith(':') else f'{name}:'


def plural(count: int, noun: str) -> str:
    """Returns such as `1 image` or `2 images`."""
    return f'{count} {noun}{"s" * (count != 1)}'


def itemized(problems: Sequence[str]) -> str:
    """Returns text that follows a colon: ` PROBLEM` for a single problem, or a line for each."""
    return f' {problems[0]}' if len(problems) == 1 else ''.join(f'\n  {p}' for p in problems)


def listed(names: Sequence[str]) -> str:
    """Returns the names, `printable`, joined by commas; shortened after the first 20."""
    return ', '.join(map(printable, names[:20])) + (', ...' if len(names) > 20 else '')
