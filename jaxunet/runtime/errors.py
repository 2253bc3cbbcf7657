"""The one exception that means "the user can fix this": command lines print it without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

USER_ERROR = 2  # exit code of a command that ends with a UserError


class UserError(Exception):
    """A mistake in a flag, a config, a data file or a weight file.

    The message names the file or field, what was expected, what was found and what to do.
    """


def near_misses(name: str, known: Iterable[str]) -> str:
    """`'; did you mean "a" or "b"?'` for the known names close to `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return '; did you mean ' + ' or '.join(f'"{m}"' for m in matches) + '?' if matches else ''


def listed(names: Sequence[str]) -> str:
    """The names, or the first 20 of more."""
    return ', '.join(names[:20]) + (', ...' if len(names) > 20 else '')
