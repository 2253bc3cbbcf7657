"""Facts about a field beside its type and default, which the schema states with `option`."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxunet.runtime.errors import near_misses

INT32 = 2**31 - 1


class Range(NamedTuple):
    """Numbers that a field may have.

    Fields:
      words: the range, for errors.
      holds: returns True for numbers in the range.
    """

    words: str
    holds: Callable[[float], bool]


ANY = Range('a number', lambda v: True)
POSITIVE = Range('more than 0', lambda v: 0 < v < math.inf)
NOT_NEGATIVE = Range('0 or more', lambda v: 0 <= v < math.inf)
FRACTION = Range('at least 0 and less than 1', lambda v: 0 <= v < 1)
UNIT = Range('0 to 1', lambda v: 0 <= v <= 1)
UP_TO_ONE = Range('more than 0 and at most 1', lambda v: 0 < v <= 1)


@dataclass(frozen=True)
class Facts:
    """The facts of a field, from which checks, messages and identities follow.

    Fields:
      range: of a number, and of each number of a tuple.
      limit: the largest number of a field that determines the size of arrays, programs or
        processes: far beyond any use, so that a typing error does not start an endless
        compilation. 0 = `INT32` of integers.
      choices: the valid texts; () = any.
      prefixes: a field of the same section whose name begins with a choice belongs to that choice.
      belongs_to: (path, value) of other fields without which this one has no effect.
      left_open: value by which a config leaves the field open, not valid otherwise; None = never.
      counts_steps: it must be a multiple of `train.steps_per_call`.
      outside_step: the compiled step does not depend on the field, or on any of the section.
      since: the version that brought the field; '' = 0.1.0.
      first_name: its name in version 0.1.0; '' = the same.
      first_default: what its default stood for in version 0.1.0; None = the same.
    """

    range: Range = ANY
    limit: int = 0
    choices: tuple[str, ...] = ()
    prefixes: bool = False
    belongs_to: tuple[tuple[str, object], ...] = ()
    left_open: object = None
    counts_steps: bool = False
    outside_step: bool = False
    since: str = ''
    first_name: str = ''
    first_default: object = None

    def problem(self, value: object) -> str | None:
        """Returns what was expected instead of a value of the field's type; None if it is valid."""
        if isinstance(value, str):
            if not self.choices or value in self.choices:
                return None
            known = ', '.join(choice or "''" for choice in self.choices)
            return f'expected one of {known}, found {value!r}{near_misses(value, self.choices)}'
        if not isinstance(value, int | float):
            return None
        limit = self.limit or (INT32 if isinstance(value, int) else math.inf)
        if not self.range.holds(value):
            return f'expected {self.range.words}, found {value!r}'
        return f'expected at most {limit}, found {value}' if value > limit else None


def option(default: Any, range: Range = ANY, **facts: Any) -> Any:
    """Returns a field of a dataclass with its default and `Facts`."""
    return dataclasses.field(default=default, metadata=stated(range=range, **facts))


def stated(**facts: Any) -> dict[str, Facts]:
    """Returns `Facts` in the form that `dataclasses.field` keeps, for a field or a section."""
    return {'facts': Facts(**facts)}


def facts_of(field: 'dataclasses.Field[Any]') -> Facts:
    """Returns the facts of a field that may have been made without `option`."""
    return field.metadata.get('facts', Facts())


def similar_fields(path: str, known: Collection[str]) -> str:
    """Returns advice about an unknown field, which begins with '; ', or ''.

    The advice names the fields of the same name elsewhere, those of its section with a similar
    name, or all of its section.

    Args:
      path: the field as given, such as `optimizer.lr`.
      known: the paths of all fields.
    """
    section, _, name = path.rpartition('.')
    siblings = [f for f in known if section and f.startswith(f'{section}.')]
    names = {f: f.rpartition('.')[2] for f in siblings or known}
    close = difflib.get_close_matches(name, set(names.values()), n=3)
    similar = [f for f in known if f.rpartition('.')[2] == name]
    similar = similar or [f for each in close for f in names if names[f] == each]
    if similar:
        return f'; did you mean {" or ".join(similar)}?'
    return f'; {section} has {", ".join(names.values())}' if siblings else ''
