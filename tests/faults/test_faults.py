"""A short run of the faults, and of what judges them; `run.py` is the long one."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
from faults.cases import KINDS, failed, kind_of, run_case
from faults.victim import _jump
from faults.world import Run, World

KILLED = 54  # a seed: killed twice, while it writes a file and a checkpoint


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp('faults'))


def test_a_run_that_is_killed_ends_with_the_same_bits(world):
    report = run_case(world, KILLED, 'killed')
    assert report['faults'] == ['write', 'checkpoint']
    assert not failed(report), report


@pytest.fixture(scope='module')
def outcome(world):
    return world.undisturbed(Run())


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


CHANGES = {
    'state': lambda o: {'state': {n: (t, s, flipped(b)) for n, (t, s, b) in o.state.items()}},
    'type': lambda o: {'state': {n: ('int8', s, b) for n, (_, s, b) in o.state.items()}},
    'metrics': lambda o: {'metrics': o.metrics[:-1]},
    'loss': lambda o: {'metrics': [row | {'loss': '0.5'} for row in o.metrics]},
    'evaluations': lambda o: {'evaluations': [{'step': '12'}]},
    'pictures': lambda o: {'pictures': {n: flipped(data) for n, data in o.pictures.items()}},
    'picture': lambda o: {'pictures': dict([*o.pictures.items()][:-1])},
}


@pytest.mark.parametrize('change', CHANGES)
def test_every_difference_is_seen(change, outcome):
    assert len(outcome.state) > 50
    assert [row['step'] for row in outcome.metrics] == [str(step) for step in range(1, 25)]
    assert len(outcome.pictures) == 3
    changed = dataclasses.replace(outcome, **CHANGES[change](outcome))
    assert outcome.differences(changed)
    assert not outcome.differences(dataclasses.replace(outcome))


def test_lost_pictures_are_allowed_where_the_log_says_so(outcome):
    fewer = dataclasses.replace(outcome, **CHANGES['picture'](outcome))
    assert not outcome.differences(fewer, pictures_lost=True)
    other = dataclasses.replace(outcome, **CHANGES['pictures'](outcome))
    assert outcome.differences(other, pictures_lost=True)


def test_a_seed_is_a_case():
    kinds = [kind_of(seed) for seed in range(200)]
    assert kinds == [kind_of(seed) for seed in range(200)]
    assert set(kinds) == set(KINDS)


def test_a_clock_that_jumps(monkeypatch):
    before = time.time()
    monkeypatch.setattr(time, 'time', time.time)
    monkeypatch.setattr(time, 'time_ns', time.time_ns)
    _jump(random.Random(0))
    told = [time.time() - before for _ in range(5000)]
    assert max(told) > 1e8
    assert min(told) < -1e8
