"""The time of a training step by method, from rows of `jaxunet.compare.step_cost`."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence

from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError, listed
from jaxunet.runtime.untrusted import NUMBER, check_fields, is_pair

# Step costs beside a comparison file whose clock measures training time.
COSTS = 'step_cost.jsonl'
FIELDS = {
    'costs': {'*': {'ms': NUMBER, 'ratio': NUMBER, 'quartiles': list}},
    'rounds': int,
    'steps': int,
    'batch': int,
    'device': str,
}


def combined_costs(path: pathlib.Path) -> dict[str, rows.Row]:
    """Returns the step cost of each case, from several rows of `jaxunet.compare.step_cost`.

    All rows begin with the same case, the base. Its milliseconds come from the first row. For every
    other case, they are its ratio to the base, in the latest row that has it, times the base's
    milliseconds. Rows of different days compare in this way, because the cases of a row took turns.

    Returns:
      case -> `ms`, `ratio` and `quartiles` of the ratio.

    Raises:
      UserError: the file cannot be read, has no rows, or rows that begin with different cases.
    """
    every = [row['costs'] for row in _read_costs(path)]
    firsts = list(dict.fromkeys(next(iter(costs), '') for costs in every))
    if len(firsts) != 1 or not firsts[0]:
        raise UserError(
            f'{path}: expected rows of jaxunet.compare.step_cost that begin with one case, found '
            f'{" and ".join(firsts) or "none"}'
        )
    base = every[0][firsts[0]]['ms']
    return {
        case: {**cost, 'ms': base * cost['ratio']}
        for costs in every
        for case, cost in costs.items()
    }


def step_times(text: str, cases: Sequence[str], source: str = '--step_ms') -> dict[str, float]:
    """Returns the milliseconds of a step by case; {} if the text is 0 (measure training time).

    Args:
      text: a number, or a file of rows of `jaxunet.compare.step_cost`.
      cases: the cases that need a number.
      source: the flag or the key that gave the text; error messages begin with it.

    Raises:
      UserError: neither a number nor such a file, or a case that the file lacks.
    """
    try:
        ms = float(text)
    except ValueError:
        path = pathlib.Path(text)
        if not path.exists():
            raise UserError(
                f'{source}: no file {path}; make it by python -m jaxunet.compare.step_cost'
            ) from None
        costs = combined_costs(path)
        if lacking := [case for case in dict.fromkeys(cases) if case not in costs]:
            raise UserError(
                f'{source}: {text} has no steps of {listed(lacking)}; add them by '
                'python -m jaxunet.compare.step_cost'
            ) from None
        return {case: costs[case]['ms'] for case in cases}
    if not 0 <= ms < math.inf:
        raise UserError(f'{source}: expected 0 or more milliseconds, or a file, found {text!r}')
    return dict.fromkeys(cases, ms) if ms else {}


def _read_costs(path: pathlib.Path) -> list[rows.Row]:
    def check(row: rows.Row, source: str) -> None:
        check_fields(row, FIELDS, source, advice='remove the line')
        for case, cost in row['costs'].items():
            if not (cost['ms'] > 0 and cost['ratio'] > 0 and is_pair(cost['quartiles'])):
                raise UserError(
                    f'{source}: {case}: expected ms and ratio above 0 and two quartiles; remove '
                    'the line'
                )

    return rows.read(path, check)
