"""The Hopper convolution's rings of buffers neither deadlock nor overwrite, run as plain Python."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pallas_kernels.conv3x3.hopper_plan import Plan, plan
from pallas_kernels.conv3x3.schedule import Tile


@dataclasses.dataclass
class Barriers:
    """Phases of mbarriers: a thread that waits for the k-th time proceeds when the k-th phase is
    complete.
    """

    arrivals: dict[str, int]
    arrived: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    waited: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def arrive(self, kind: str, n: int) -> None:
        self.arrived[kind, n] += 1

    def ready(self, thread: str, kind: str, n: int) -> bool:
        complete = self.arrived[kind, n] // self.arrivals[kind]
        # A phase is one bit: a thread may be at most one behind.
        assert complete - self.waited[thread, kind, n] <= 1, f'{thread} lost a phase of {kind} {n}'
        if complete == self.waited[thread, kind, n]:
            return False
        self.waited[thread, kind, n] += 1
        return True


Event = tuple[str, str, int] | tuple[str, Callable[[], None]]


def threads(
    p: Plan, program: int, activates: bool, check: Callable[[str, object, object], None]
) -> dict[str, Iterator[Event]]:
    """Returns the waits and arrivals of `hopper_kernel` in order, with `check(ring slot, expected
    content)` at each read.
    """
    s, tile = p.schedule, p.schedule.tile
    content: dict[object, object] = {}

    def loads(i: int, step: int) -> list[int]:
        if s.resident:
            return []
        return (
            [s.load_number(i, step, n) for n in range(s.loads_per_chunk)]
            if step < s.chunks
            else [s.extra_load_number(i, step)]
        )

    def load() -> Iterator[Event]:
        if s.resident:
            for _ in range(s.steps):
                yield 'arrive', 'block full', 0
        for i in range(s.local_tiles(program)):
            for step in range(s.steps):
                use, slot = s.slot(s.strip_number(i, step))
                for g in range(tile.groups):
                    if use > 0:
                        yield 'wait', 'strip empty', g * tile.slots + slot
                    content['strip', g, slot] = (i, step)
                    yield 'arrive', 'strip full', g * tile.slots + slot
                for number in loads(i, step):
                    use, slot = s.ring(number)
                    if use > 0:
                        yield 'wait', 'block empty', slot
                    content['block', slot] = number
                    yield 'arrive', 'block full', slot

    def activate() -> Iterator[Event]:
        for i in range(s.local_tiles(program)):
            for step in range(s.steps):
                _, slot = s.slot(s.strip_number(i, step))
                for g in range(tile.groups):
                    yield 'wait', 'strip full', g * tile.slots + slot
                    check('strip', content['strip', g, slot], (i, step))
                    yield 'arrive', 'strip ready', g * tile.slots + slot

    def compute(me: int) -> Iterator[Event]:
        if s.resident:
            yield 'wait', 'block full', 0
        if s.ping_pong and me == 1:
            yield 'arrive', 'turn', 0
        for i in range(s.local_tiles(program)):
            reading: list[tuple[object, object, Event]] = []  # slot, content, and what releases it
            for step in range(s.steps):
                _, slot = s.slot(s.strip_number(i, step))
                yield 'wait', 'strip ready' if activates else 'strip full', me * tile.slots + slot
                if s.ping_pong:
                    yield 'wait', 'turn', me
                previous, reading = reading, []
                for n, number in enumerate(loads(i, step) or [None]):
                    if number is not None:
                        _, block = s.ring(number)
                        yield 'wait', 'block full', block
                        if n > 0:
                            previous, reading = reading, []
                        reading.append((('block', block), number, ('arrive', 'block empty', block)))
                    for where, what, release in previous:
                        check(str(where), content[where], what)
                        yield release
                    previous = []
                reading.append(
                    (
                        ('strip', me, slot),
                        (i, step),
                        ('arrive', 'strip empty', me * tile.slots + slot),
                    )
                )
                if s.ping_pong:
                    yield 'arrive', 'turn', 1 - me
            for where, what, release in reading:
                check(str(where), content[where], what)
                yield release

    out = {'load': load(), **{f'compute {g}': compute(g) for g in range(tile.groups)}}
    return {**out, 'activate': activate()} if activates else out


TILES = [
    *[
        Tile(8, 64, groups, slots, taps, ring)
        for groups in (1, 2, 3)
        for slots in (2, 3)
        for taps, ring in ((9, 2), (3, 2), (3, 4), (1, 2), (1, 5))
    ],
    *[Tile(8, 64, groups, slots, 9, 0) for groups in (1, 2) for slots in (2, 3)],
]


@pytest.mark.parametrize('activates', [False, True])
@pytest.mark.parametrize('order', ['forward', 'backward', 'random'])
def test_rings_neither_deadlock_nor_overwrite(order: str, activates: bool) -> None:
    """Every warpgroup finishes, whichever runs first, and reads the data intended for it."""

    def check(what: str, found: object, expected: object) -> None:
        assert found == expected, f'{what} holds {found}, {expected} was expected'

    rng = np.random.default_rng(0)
    for tile, (chunks, extras) in itertools.product(TILES, ((1, 0), (1, 1), (3, 2))):
        p = plan((1300, 8, 8), (64 * chunks,), 64, tile, residual=(64,) * extras, shortcut=True)
        assert p.schedule.steps == chunks + extras
        s = p.schedule
        arrivals = {'strip full': 1, 'strip ready': 1, 'strip empty': 1, 'turn': 1}
        barriers = Barriers(
            {**arrivals, 'block full': s.steps if s.resident else 1, 'block empty': tile.groups}
        )
        running = threads(p, 0, activates, check)
        waiting: dict[str, Event] = {}
        while running:
            names = list(running)
            if order != 'forward':
                names = (
                    names[::-1]
                    if order == 'backward'
                    else [names[k] for k in rng.permutation(len(names))]
                )
            moved = False
            for name in names:
                event = waiting.pop(name, None) or next(running[name], None)
                if event is None:
                    del running[name]
                    moved = True
                elif event[0] == 'arrive':
                    barriers.arrive(event[1], event[2])
                    moved = True
                elif barriers.ready(name, event[1], event[2]):
                    moved = True
                else:
                    waiting[name] = event
            assert moved, f'{tile}, {chunks} + {extras} steps: deadlock at {waiting}'
