"""A run of ten thousand small steps holds no more at its end than at its beginning."""

from __future__ import annotations

import argparse
import collections
import os
import signal
import subprocess
import sys
import time

import pytest
from support import processes
from support.tiny import flags
from support.untrained_features import write_untrained

from jaxunet.training.logs import read_metrics
from tools.soak import run, watch

STEPS = 10_000
LINUX = pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')


def samples(values):
    return [{'seconds': float(i), 'threads': value} for i, value in enumerate(values)]


def test_what_grows_is_found():
    flat = [10.0, 10.0, 12.0, 10.0, 10.0] * 10
    assert watch.growths(samples(flat), 0.1) == {'threads': 0.0}
    rising = watch.growths(samples([x + 0.02 * i for i, x in enumerate(flat)]), 0.1)
    assert rising == {'threads': pytest.approx(0.08, abs=0.02)}
    assert watch.growths(samples([50.0] * 5 + flat), 0.1) == {'threads': 0.0}  # before it settled
    half = len(flat) // 2
    assert watch.growths(samples(flat[half:] + [x + 0.5 for x in flat[half:]]), 0) == {
        'threads': 0.0  # once
    }
    doubled = watch.growths(samples(flat[half:] + [2 * x for x in flat[half:]]), 0)
    assert doubled == {'threads': 1.0}
    assert watch.ends(samples(flat + [11.0] * 5), 0.1) == {'threads': [10.0, 11.0]}


def test_threads_that_stay_are_named():
    few, more = collections.Counter(pool=4, main=1), collections.Counter(pool=36, main=1)
    busy = few + collections.Counter(reader=8)
    names = [busy, few, busy, few] * 5 + [more, more + collections.Counter(reader=8)] * 10
    assert watch.more_threads(names, 0.1) == {'pool': [4, 36]}
    assert watch.more_threads([few, busy] * 20, 0.1) == {}


@LINUX
def test_threads_are_counted_by_their_names():
    with subprocess.Popen(['sh', '-c', 'sleep 60 & sleep 60 & echo; wait'], stdout=-1) as child:
        try:
            child.stdout.readline()  # both children run
            while 'sleep' not in (names := watch.thread_names(child.pid)) or names['sh'] > 1:
                time.sleep(0.01)  # a child is named sh until it becomes sleep
            assert names == {'sh': 1, 'sleep': 2}
        finally:
            for member in processes.family(child.pid):
                os.kill(member, signal.SIGKILL)


@LINUX
def test_a_process_is_measured_with_its_children():
    alone = watch.measure(os.getpid())
    with subprocess.Popen(['sh', '-c', 'sleep 60 & echo; wait'], stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()  # its own child runs
            members = processes.family(os.getpid())
            both = watch.measure(os.getpid())
        finally:
            for member in processes.family(child.pid):
                os.kill(member, signal.SIGKILL)
    assert {os.getpid(), child.pid} < set(members)
    assert both['threads'] >= alone['threads'] + 2
    assert all(both[name] > alone[name] > 0 for name in ('own_mib', 'open_files'))


@pytest.mark.long
@LINUX
def test_ten_thousand_steps_hold_no_more_at_the_end(tmp_path):
    row = run.soak(
        argparse.Namespace(
            minutes=20.0,
            settled=0.4,
            every=0.5,
            limit=0.02,
            output=tmp_path,
            flags=[
                *flags(),
                f'--config.train.steps={STEPS}',
                '--config.train.log_every=100',
                '--config.train.checkpoint_every=500',
                '--config.train.sample_every=500',
                '--config.train.evaluate_every=1000',
                '--config.evaluation.samples=8',
                '--config.evaluation.batch_size=4',
                '--config.evaluation.steps=2',
                '--config.evaluation.metrics=fid,precision',
                f'--config.evaluation.features={write_untrained(tmp_path)}',
            ],
        )
    )
    assert row['exit_status'] == 0
    assert read_metrics(tmp_path / 'run/metrics.csv')[-1]['step'] == str(STEPS)
    assert set(row['grown']) <= {'step_ms'}, row['growth']  # other tests keep the CPU busy
