"""A short run of the faults, and of what judges them; `run.py` is the long one."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest

from jaxunet.runtime.out_of_memory import OUT_OF_MEMORY
from tools.faults.cases import KINDS, MOUNTING, failed, kind_of, run_case
from tools.faults.victim import _jump
from tools.faults.world import Run, World, can_mount

KILLED = 54  # a seed: killed twice, while it writes a file and a checkpoint
SEEDS = {'healed': 15}  # of other kinds, where seed 0 is late or long


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp('faults'))


def test_a_run_that_is_killed_ends_with_the_same_bits(world):
    report = run_case(world, KILLED, 'killed')
    assert report['faults'] == ['write', 'checkpoint']
    assert not failed(report), report


@pytest.mark.long
@pytest.mark.parametrize('kind', [kind for kind in KINDS if kind != 'killed'])
def test_a_case_of_every_other_kind(kind, world):
    if kind in MOUNTING and not can_mount():
        pytest.skip('may not mount a disk')
    report = run_case(world, SEEDS.get(kind, 0), kind)
    assert report['faults']
    assert not failed(report), report


@pytest.fixture(scope='module')
def outcome(world):
    return world.undisturbed(Run())


def test_samples_that_do_not_fit_into_memory(world, outcome, tmp_path):
    """The command says what to lower, and goes on from the batch that it had drawn."""
    process = world.sample(tmp_path / 'x.npz', {'full': ['generation', 2]})
    error = process.communicate()[1]
    assert process.returncode == OUT_OF_MEMORY
    told = 'error: drawing samples: the device has no memory left (RESOURCE_EXHAUSTED: '
    (line,) = [line for line in error.splitlines() if line.startswith('error:')]
    assert line.startswith(told)
    assert '; lower --batch_size, or ' in line
    assert 'Traceback' not in error
    process = world.sample(tmp_path / 'x.npz', {})
    assert 'resuming from ' in process.communicate()[1]
    assert process.returncode == 0


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
    assert set(kinds) == {kind for kind, (weight, _) in KINDS.items() if weight}


def test_a_clock_that_jumps(monkeypatch):
    before = time.time()
    monkeypatch.setattr(time, 'time', time.time)
    monkeypatch.setattr(time, 'time_ns', time.time_ns)
    _jump(random.Random(0))
    told = [time.time() - before for _ in range(5000)]
    assert max(told) > 1e8
    assert min(told) < -1e8
