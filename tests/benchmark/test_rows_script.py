"""tools/gpu/benchmarks.sh, with a stand-in for Python that notes its GPU and its arguments."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest
from support import commands

from jaxunet.benchmark.kernels.lowering import KINDS
from jaxunet.data import ladders

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / 'tools/gpu/benchmarks.sh'
STAND_IN = """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES $*" >> "$CALLS"
taskset -cp $$ | sed 's/.*: //' >> "$CALLS.cores"
sleep 0.2
case "$*" in *imagenet64*) exit 3 ;; esac
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that runs the script with some parts; it returns status and calls.

    A call is the GPU, followed by the arguments of Python.
    """
    python = tmp_path / 'bin/python3'
    python.parent.mkdir()
    python.write_text(STAND_IN)
    python.chmod(0o755)
    calls = tmp_path / 'calls'
    monkeypatch.setenv('PATH', f'{python.parent}{os.pathsep}{os.environ["PATH"]}')
    monkeypatch.setenv('CALLS', str(calls))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3')

    def call(*parts):
        command = [SCRIPT, tmp_path / 'out', *parts]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        return done, calls.read_text().splitlines() if calls.exists() else []

    return call


def test_a_job_that_fails_does_not_keep_the_others(run):
    done, calls = run()
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert len(lines) == len(calls) == 13
    assert [line.split(' after ')[0] for line in lines if 'status 0' not in line] == [
        'networks: exit status 3'
    ]
    assert {call.split()[2] for call in calls} == {'jaxunet.benchmark', 'jaxunet.benchmark.kernels'}
    configs = [call.split('--config ')[1].split()[0] for call in calls if '--config ' in call]
    assert all((ROOT / config).is_file() for config in configs)


def test_whole_networks_are_measured_alone(run, tmp_path, monkeypatch):
    """Only they are compiled beside each other, so only they have a lock, the same on one GPU."""
    _, calls = run()
    for call in calls:
        assert (' jaxunet.benchmark ' in call) == (f' --lock {tmp_path}/out/lock.3' in call)
    monkeypatch.chdir(ROOT)
    for side in (128, 256):  # as configs/images.py chooses
        levels = ladders.levels_of(side, side)
        mult = ','.join(map(str, ladders.LADDERS[levels]))
        attended = ','.join(map(str, ladders.attended(side, levels)))
        chosen = f' --config.data.image_size={side} --config.model.channel_mult={mult} '
        (call,) = (call for call in calls if chosen in call)
        assert f' --config.model.attention_resolutions={attended} ' in call
        assert f' --config.data.batch_size={ladders.batch_size(side * side, 1000)} ' in call
    larger = [call.split(' jaxunet.benchmark ')[1] for call in calls if 'configs/images.py' in call]
    plans = [
        commands.call(
            'jaxunet.benchmark', *flags.replace(' --peers pytorch-best', '').split(), '--dry_run'
        )
        for flags in larger
    ]
    assert {plan.split(';')[0] for plan in plans} == {
        'images 256x256, bfloat16, batch 16, step: xla, auto',
        'images 128x128, bfloat16, batch 32, step: xla, auto',
    }


def test_parts_are_chosen(run):
    done, calls = run('budget')
    assert (done.returncode, len(calls)) == (0, 2)
    assert all('--roofline' in call for call in calls)


def test_the_gpus_share_the_jobs(run, monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '2,5')
    done, calls = run('kernels', 'budget')
    assert (done.returncode, len(calls)) == (0, 5)
    assert {call.split()[0] for call in calls} == {'2', '5'}
    ops = [call.split('--ops ')[1].split()[0] for call in calls if '--ops ' in call]
    assert {op for listed in ops for op in listed.split(',')} == set(KINDS)


def test_the_jobs_share_the_cores_of_the_mask(run, monkeypatch, tmp_path):
    every = os.sched_getaffinity(0)
    mask = sorted(every)[-4:][:2]  # not the first ones, if there are four or more
    if len(mask) < 2:
        pytest.skip('needs two CPU cores')
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '2,5')
    os.sched_setaffinity(0, mask)
    try:
        done, calls = run('kernels')
    finally:
        os.sched_setaffinity(0, every)
    assert (done.returncode, len(calls)) == (0, 3)
    used = (tmp_path / 'calls.cores').read_text().split()
    assert {int(cores) for cores in used} == set(mask)


def test_an_unknown_part_is_refused(run):
    done, calls = run('step', 'steps')
    assert (done.returncode, calls) == (2, [])
    assert 'part steps: expected some of step networks' in done.stdout
