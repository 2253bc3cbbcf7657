"""The processes of the points: whatever they do is a row, and done points are not run again."""

import dataclasses
import os
import pathlib
import sys
import threading
import time

import pytest
from support.processes import assert_ended
from support.sweeps import CPU, GPU, ORIGIN, grid

from jaxunet.runtime import subprocesses as processes
from jaxunet.runtime.errors import UserError
from jaxunet.sweep import measure, runner
from jaxunet.sweep.folder import load, save
from jaxunet.sweep.points import Machine, parse_axes
from jaxunet.sweep.runner import Options

TESTS = pathlib.Path(__file__).parents[1]


@pytest.fixture
def faults(monkeypatch, tmp_path):
    """Points' processes run tests/support/sweep_faults.py; returns what ran."""
    monkeypatch.setattr(runner, 'MEASURE', 'support.sweep_faults')
    monkeypatch.setenv('PYTHONPATH', str(TESTS))
    monkeypatch.setenv('SWEEP_CALLS', str(tmp_path / 'calls'))
    monkeypatch.setenv('SWEEP_WORKER', str(tmp_path / 'worker'))

    def calls():
        path = tmp_path / 'calls'
        return path.read_text().splitlines() if path.exists() else []

    return calls


def go(directory, *axes, **options):
    points, notes = grid(*axes, parallel={'devices': 1})
    opts = Options(**options)
    said: list[str] = []
    spec = {
        'title': 'T',
        'command': '--config c.py',
        'axes': [dataclasses.asdict(a) for a in parse_axes(axes)],
        'notes': notes,
    }
    save(directory, spec | {'keys': [runner.key(p, opts, GPU) for p in points]})
    runner.Runner(directory, opts, GPU, said.append).run(points)
    sweep = load(directory)
    return sweep, said


def test_whatever_a_process_does_is_a_row(faults, tmp_path):
    sweep, said = go(tmp_path / 's', 'data.batch_size=8,11,12,13,14,15,16,17', timeout=1.5)
    rows = {row['point']['data.batch_size']: row for row in sweep.rows}
    assert {batch: row['status'] for batch, row in rows.items()} == {
        8: 'ok',
        11: 'crash',
        12: 'crash',
        13: 'out of memory',
        14: 'timeout',
        15: 'crash',
        16: 'ok',
        17: 'crash',
    }
    assert 'SIGABRT' in rows[11]['reason']
    assert rows[12]['reason'] == 'exit code 3: ValueError: went wrong'
    assert 'SIGKILL' in rows[13]['reason']
    assert rows[14]['reason'] == 'not done after 1.5 s (--timeout)'
    assert rows[15]['reason'] == 'exit code 0: starting'
    assert rows[17]['reason'] == 'exit code 1: no output'
    log = (tmp_path / 's' / rows[12]['log']).read_text().splitlines()
    assert log[0].startswith(f'{sys.executable} -m support.sweep_faults ')
    assert log[1:] == ['starting', 'ValueError: went wrong']
    assert rows[8]['images_per_s'] == 4000
    assert rows[8]['git'] == 'abc1234'
    assert rows[8]['xla_flags'] == os.environ['XLA_FLAGS']
    assert any('timeout: not done after 1.5 s' in line for line in said)
    hung = int((tmp_path / 'worker').read_text())  # the worker of the point that hung
    assert_ended(hung, seconds=10)


def test_done_points_are_not_run_again_and_failed_ones_when_asked(faults, tmp_path):
    axes = ['data.batch_size=8,12,16']
    go(tmp_path, *axes)
    assert faults() == ['8', '16']
    sweep, said = go(tmp_path, *axes)
    assert faults() == ['8', '16']
    assert said == [
        '3 of 3 points are done (1 of them failed; --retry_failed runs those again): '
        f'{tmp_path / "results.jsonl"}'
    ]
    _, said = go(tmp_path, *axes, retry_failed=True)
    assert [line for line in said if 'crash' in line] == [
        '[2/3] batch_size=12: crash: exit code 3: ValueError: went wrong'
    ]
    assert faults() == ['8', '16']
    go(tmp_path, 'data.batch_size=8,24')  # a larger grid in the same folder
    assert faults() == ['8', '16', '24']
    go(tmp_path, *axes, steps=7)  # measured otherwise
    assert faults()[3:] == ['8', '16']
    assert len(sweep.rows) == 3


def test_keys_tell_apart_what_may_differ():
    (point,), _ = grid('data.batch_size=8')
    (eager,), _ = grid('jit=off', parallel={'devices': 1})
    other_version = dataclasses.replace(GPU, provenance=ORIGIN | {'versions': {'jax': '1.2.4'}})
    other_device = dataclasses.replace(GPU, provenance=ORIGIN | {'device': 'other thing'})
    other_code = dataclasses.replace(GPU, provenance=ORIGIN | {'git': 'abc1235'})
    edited = dataclasses.replace(GPU, provenance=ORIGIN | {'git': 'abc1234-dirty'})
    keys = [
        runner.key(point, Options(), m)
        for m in (GPU, other_version, other_device, other_code, edited)
    ]
    keys += [runner.key(eager, Options(), GPU), runner.key(point, Options(warmup=3), GPU)]
    assert len(set(keys)) == len(keys)
    (labelled,), _ = grid('seed=0')  # another axis, but the same config as by data.batch_size=8
    assert runner.key(labelled, Options(timeout=1), GPU) == keys[0]


def test_keys_tell_apart_the_kernels_of_auto(monkeypatch):
    """They are measured on the machine, and a point that names its backend has none of them."""
    measured = dataclasses.replace(GPU, auto={'bfloat16': {'attention': 'pallas'}})
    other = dataclasses.replace(GPU, auto={'bfloat16': {'attention': 'cuda'}})
    points, _ = grid('backend=auto,auto+linear=xla,xla', precision='bfloat16')
    (float32,), _ = grid('backend=auto', precision='float32')

    def keys():
        return [
            [runner.key(point, Options(), machine) for machine in (GPU, measured, other)]
            for point in (*points, float32)
        ]

    found = keys()
    assert [len(set(one)) for one in found] == [3, 3, 1, 1]
    monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_autotune_level=0')
    assert not {k for one in found for k in one} & {k for one in keys() for k in one}


def test_the_probe_finds_no_measured_choices_on_a_cpu():
    assert runner.probe().auto == {}


def test_the_probe_says_what_was_measured_for_auto(monkeypatch):
    found = {'attention': 'pallas'}
    monkeypatch.setattr(measure, 'measured', {'bfloat16': found}.get)
    assert Machine(**measure.probe()).auto == {'bfloat16': found}


def test_side_by_side_points_have_gpus_of_their_own(monkeypatch):
    needs = [1, 4, 0, 2, 1, 2, 1]
    lock, busy, order, most = threading.Lock(), set(), [], []

    def work(i, gpus):
        assert len(gpus) == needs[i]
        with lock:
            assert not busy & set(gpus)
            busy.update(gpus)
            order.append(i)
            most.append(len(busy))
        time.sleep(0.05)
        with lock:
            busy.difference_update(gpus)

    processes.share(list(enumerate(needs)), ['0', '1', '2', '3'], work)
    assert sorted(order) == list(range(len(needs)))
    assert order.index(3) < order.index(
        1
    )  # the one that needs all waits for those that fit beside the first
    assert max(most) == 4

    def fail(i, gpus):
        raise ValueError('of a worker')

    with pytest.raises(ValueError, match='of a worker'):
        processes.share([(0, 1), (1, 1)], ['0'], fail)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '2,5')
    assert runner.gpu_names(Machine('gpu', 2, ORIGIN)) == ['2', '5']
    with pytest.raises(UserError, match='this machine has none'):
        runner.gpu_names(CPU)


def test_side_by_side_from_processes(faults, tmp_path):
    sweep, _ = go(
        tmp_path / 's', 'parallel.devices=1,2,4', 'data.batch_size=8,16', side_by_side=True
    )
    assert [row['status'] for row in sweep.rows] == ['ok'] * 6
    assert all(row['side_by_side'] for row in sweep.rows)
    points, _ = grid('parallel.devices=1,2,4')
    assert runner.environment(points[1], GPU, ['1', '3'])['CUDA_VISIBLE_DEVICES'] == '1,3'
    assert [runner.needed_gpus(p, GPU) for p in points] == [1, 2, 4]
