"""Test parameters for combinations; the default tests run only a few of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest


def in_turn(cases: Mapping[str, object], *others: tuple[object, ...]) -> list[object]:
    """Returns the parameters of a test for all combinations of named cases and other values.

    In the default tests, every case runs with one combination of the other values, which take
    turns. All other combinations are marked `long`.
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
