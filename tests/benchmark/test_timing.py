"""Sides take turns, which are long enough and hold no garbage collection."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable

import pytest
from support.benchmarks import plan
from support.tiny import tiny_config

from jaxunet.benchmark import run
from jaxunet.benchmark.cases import Prepared
from jaxunet.benchmark.device import Rates
from jaxunet.benchmark.jax_side import synthetic_source
from jaxunet.benchmark.timing import (
    TURN_SECONDS,
    interleave,
    steps_in,
    summarise,
    turn_steps,
    turns,
)


def test_sides_take_turns() -> None:
    """Forwards and backwards; each turn is timed alone, and a ratio is of one round, so a drift
    cancels.
    """
    assert turns(['a', 'b', 'c'], 3) == [['a', 'b', 'c'], ['c', 'b', 'a'], ['a', 'b', 'c']]
    now, speed, done = [0.0], {'a': 1.0, 'b': 2.0}, []

    def side(name: str) -> Callable[[int], None]:
        def work(steps: int) -> None:
            done.append(name)
            now[0] += (
                steps * speed[name] * (1 + len(done) // 2 * 3)
            )  # from round to round the machine slows down

        return work

    times = interleave(
        {name: side(name) for name in speed}, rounds=3, steps=5, clock=lambda: now[0]
    )
    assert done == ['a', 'b', 'b', 'a', 'a', 'b']
    assert {name: len(t) for name, t in times.items() if isinstance(t, list)} == {'a': 3, 'b': 3}
    first = times['a']
    assert isinstance(first, list)
    assert first[0] == 1000
    quick = summarise([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 4.0, 6.0, 8.0, 5.0])
    assert quick == (3.0, (2.0, 4.0), 0.5, (0.5, 0.5))


def test_a_turn_takes_half_a_second() -> None:
    now = [0.0]

    def work(speed: float) -> Callable[[int], None]:
        return lambda steps: now.__setitem__(0, now[0] + steps * speed)

    quick, slow = (
        steps_in(TURN_SECONDS, work(speed), clock=lambda: now[0]) for speed in (1 / 256, 1 / 64)
    )
    assert (quick, slow) == (128, 32)
    assert turn_steps([slow, quick]) == quick
    assert turn_steps([quick, 20]) == 80  # or the slowest would take more than two seconds
    assert turn_steps([1]) == turn_steps([]) == 10
    calls = []
    assert (
        steps_in(
            TURN_SECONDS,
            lambda steps: (calls.append(steps), work(1 / 256)(steps)),
            20,
            lambda: now[0],
        )
        == 128
    )
    assert calls == [20, 40]
    assert turn_steps([128], 20) == 140
    assert turn_steps([], 7) == 14


def test_nobody_is_timed_for_the_length_of_a_turn_that_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []
    prepared = Prepared(counted.append, None, 0.0, None, None, {}, lambda: None)
    monkeypatch.setattr(
        run, 'make_side', lambda *_: types.SimpleNamespace(prepare=lambda direction: prepared)
    )
    monkeypatch.setattr(run, 'measure_rates', lambda precision: Rates(1e12, 1e12))
    source = synthetic_source(tiny_config())
    assert len(list(run.run(plan(directions=['step'], steps=3), source, ''))) == 1
    assert counted == [3, 3]  # two rounds


def test_no_garbage_is_collected_in_a_turn() -> None:
    """Older objects are frozen during a turn, and returned to the collector at its end."""
    kept, counted = [[] for _ in range(1000)], []
    interleave({'a': lambda steps: counted.append(gc.get_freeze_count())}, rounds=1, steps=1)
    assert counted[0] >= len(kept)
    assert gc.get_freeze_count() == 0


def test_a_side_that_fails_ends_alone() -> None:
    def fail(steps: int) -> None:
        raise ValueError('broken')

    times = interleave({'a': fail, 'b': lambda steps: None}, rounds=2, steps=1)
    assert isinstance(times['a'], ValueError)
    assert len(times['b']) == 2  # type: ignore[arg-type]
