"""Combinations of which the default tests run a few."""

from __future__ import annotations

from collections.abc import Mapping

import pytest


def in_turn(cases: Mapping[str, object], *others: tuple[object, ...]) -> list[object]:
    """Returns the parameters of a test for all combinations of named cases and other values.

    Every case is tested with one of the others, which take turns; the rest is long.
    """
    return [
        pytest.param(
            case,
            *values,
            id='-'.join(map(str, (name, *values))),
            marks=() if turn == number % len(others) else pytest.mark.long,
        )
        for number, (name, case) in enumerate(cases.items())
        for turn, values in enumerate(others)
    ]
