"""Runs of a queue that stop and go on, and processes that share jobs or devices."""

from __future__ import annotations

import csv
import dataclasses
import os
import signal
import unittest.mock

import jax
import pytest
from support.commands import call_each
from support.counting_step import move_weights
from support.queues import TINY, make_queue, rows_of, small_jobs
from support.untrained_features import write_untrained

from jaxunet.compare import collected, job_runner, work
from jaxunet.compare.job_runner import Queue
from jaxunet.compare.measure import Measurements
from jaxunet.compare.stopwatch import Limit
from jaxunet.runtime.errors import UserError
from jaxunet.training.parallel import Parallel
from jaxunet.training.session import Session

STEP_MS = {'uniform': 20.0}


@pytest.fixture(scope='module', autouse=True)
def _cheap_steps():
    with unittest.mock.patch.object(Session, 'compile', move_weights):
        yield


@pytest.fixture(scope='module')
def measurements(tmp_path_factory):
    """Measurements whose samplers several queues share."""
    features = write_untrained(tmp_path_factory.mktemp('features'))
    return Measurements(str(features), tmp_path_factory.mktemp('shared'))


@pytest.fixture(scope='module')
def job():
    """A job whose steps count 20 ms: its times are after 2, 4 and 10 steps."""
    choosing, plain = small_jobs()
    return dataclasses.replace(
        plain,
        seconds=(0.04, 0.08, 0.2),
        samplers=('heun:2',),
        averages=choosing.averages,
        choosing=8,
        picture=0,
    )


@pytest.fixture(scope='module')
def undisturbed(job, measurements, tmp_path_factory):
    output = tmp_path_factory.mktemp('undisturbed')
    assert make_queue(output, '', measurements=measurements, step_ms=STEP_MS).run([job]) == []
    return results_of(output)


def results_of(output):
    """Rows without what is of the process."""
    names = ('seconds', 'training_seconds', 'step', 'average', 'average_fid', 'values')
    return [{name: row[name] for name in names} for row in rows_of(output)]


class Died(BaseException):
    pass


def die(*arguments):
    raise Died


def stopped_after(monkeypatch, calls):
    """Has queues stop training after so many steps, as if the limit came near."""
    left = iter([True] * calls)
    monkeypatch.setattr(Queue, '_goes_on', lambda self: next(left, False))


def test_runs_go_on_in_the_middle(job, undisturbed, measurements, tmp_path, monkeypatch):
    """One that stopped at the limit, and died while it measured, ends as an undisturbed one."""
    options = {'measurements': measurements, 'step_ms': STEP_MS}
    with monkeypatch.context() as patch:
        stopped_after(patch, 3)
        (problem,) = make_queue(tmp_path, '', **options).run([job])
    assert problem == (
        'digits_uniform_seed1: stopped at the limit; the same command goes on from there'
    )
    assert [row['step'] for row in rows_of(tmp_path)] == [2]

    with monkeypatch.context() as patch:
        patch.setattr(Measurements, 'measure', die)
        with pytest.raises(Died):
            make_queue(tmp_path, '', **options).run([job])
    assert [row['step'] for row in rows_of(tmp_path)] == [2]
    assert (tmp_path / 'work' / job.name / 'checkpoints' / '4').is_dir()
    assert make_queue(tmp_path, '', **options).run([job]) == []
    assert results_of(tmp_path) == undisturbed
    assert not (tmp_path / 'work' / job.name).exists()
    outcomes = [r['outcome'] for r in collected.read_stretches([tmp_path / 'stretches.jsonl'])]
    assert outcomes == ['measured', 'stopped', 'stopped', 'measured', 'measured', 'trained']


def test_a_learning_rate_falls_to_0_at_the_last_time(job, measurements, tmp_path, monkeypatch):
    """Also if the process dies after the last step, and another one measures it."""
    falling = {'optimizer.schedule': 'linear', 'optimizer.warmup_steps': 0, 'train.log_every': 1}
    job = dataclasses.replace(job, fields={**job.fields, **falling}, seconds=(0.2,))
    with pytest.raises(UserError, match=f'{job.name}: optimizer.schedule: linear falls to 0 at'):
        make_queue(tmp_path, '').run([job])

    options = {'measurements': measurements, 'step_ms': STEP_MS}
    with monkeypatch.context() as patch:
        patch.setattr(Measurements, 'measure', die)
        with pytest.raises(Died):
            make_queue(tmp_path, '', **options).run([job])
    with (tmp_path / 'logs' / f'{job.name}.csv').open() as file:
        rates = [float(row['learning_rate']) for row in csv.DictReader(file)]
    rate = job.load_config().optimizer.learning_rate
    assert rates == pytest.approx([rate * (1 - n / 10) for n in range(10)])
    assert make_queue(tmp_path, '', **options).run([job]) == []
    assert [row['step'] for row in rows_of(tmp_path)] == [10]


@pytest.mark.parametrize('which', [0, -1])
@pytest.mark.parametrize('by', ['signal', 'limit'])
def test_measuring_stops_for_a_signal_and_at_the_limit(
    by, which, job, undisturbed, measurements, tmp_path, monkeypatch
):
    """It comes while samples are drawn, at the first time of the run or at the last."""
    queue = make_queue(tmp_path, '', measurements=measurements, step_ms=STEP_MS)
    draw, calls = Measurements._draw, []

    def interrupted(self, generator, checkpoint, *arguments):
        if checkpoint.seconds == job.seconds[which]:
            calls.append(by)
            if by == 'signal':
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                queue.limit = Limit(0.0)
        return draw(self, generator, checkpoint, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Measurements, '_draw', interrupted)
        if by == 'signal':
            with pytest.raises(KeyboardInterrupt):
                queue.run([job])
        else:
            problem = queue.run([job])[0]
            assert problem == f'{job.name} at {job.seconds[which]:g} s: {job_runner.AT_LIMIT}'
    assert len(calls) == 1
    done = job.seconds[:which] if which else ()
    assert [row['seconds'] for row in rows_of(tmp_path)] == list(done)
    stretches = collected.read_stretches([tmp_path / 'stretches.jsonl'])
    assert stretches[len(done)]['outcome'] == collected.STOPPED
    options = {'measurements': measurements, 'step_ms': STEP_MS}
    assert make_queue(tmp_path, '', **options).run([job]) == []
    assert results_of(tmp_path) == undisturbed


def test_a_run_trains_on_several_devices(job, tmp_path, monkeypatch):
    local, found, compiled = Parallel.local, set(), []

    def spy(self, tree):
        found.add(len(jax.tree.leaves(tree)[0].sharding.device_set))
        return local(self, tree)

    monkeypatch.setattr(Parallel, 'local', spy)
    monkeypatch.setattr(Measurements, 'compile', lambda self, beside: compiled.append(len(beside)))
    monkeypatch.setattr(Measurements, 'measure', lambda self, *_: iter(()))
    job = dataclasses.replace(job, seconds=(0.04,))
    for devices in (1, 2):
        found.clear()
        queue = make_queue(tmp_path / str(devices), '', step_ms=STEP_MS, devices=devices)
        assert queue.run([job]) == []
        assert found == {devices}, 'the devices that hold the state'
    assert compiled == [1, 2], 'the devices that train beside the compiler'


@pytest.mark.parametrize(
    ('flag', 'reason'),
    [
        ('--devices=2', '--devices: a step on 2 devices takes another time than on one'),
        ('--shared_by=2', '--shared_by: 2 processes slow each other down'),
    ],
)
def test_runs_that_are_not_alone_on_a_gpu_need_the_time_of_a_step(flag, reason, tmp_path):
    command = ['jaxunet.compare.queue', f'--jobs={TINY}', f'--output={tmp_path}/output', flag]
    ((code, _, errors),) = call_each([command], tmp_path)
    assert code == 2
    assert reason in errors
    assert not (tmp_path / 'output').exists()


def test_the_folder_of_another_run_is_not_used(job, tmp_path):
    """Another config or other times of a step make another run; moved images do not."""
    config = job.load_config()
    moved = config.replace(data={'path': str(tmp_path)})
    other = config.replace(optimizer={'learning_rate': 1e-3})
    for now, step_seconds, resume, kept in (
        (config, 0.02, True, True),
        (moved, 0.02, True, True),
        (other, 0.02, True, False),
        (config, 0.03, True, False),
        (config, 0.02, False, False),
    ):
        folder = work.prepare(tmp_path, job, config, 0.02, resume=True)
        (folder / 'checkpoint').touch()
        assert work.prepare(tmp_path, job, now, step_seconds, resume=resume) == folder
        assert (folder / 'checkpoint').exists() == kept
    (folder / work.FILE).write_text('{')
    (folder / 'checkpoint').touch()
    work.prepare(tmp_path, job, config, 0.02, resume=True)
    assert not (folder / 'checkpoint').exists(), 'what it holds is not known'


def test_a_run_starts_again_if_the_weights_of_a_time_are_gone(
    job, undisturbed, measurements, tmp_path, monkeypatch, capsys
):
    options = {'measurements': measurements, 'step_ms': STEP_MS}
    with monkeypatch.context() as patch:
        stopped_after(patch, 3)
        make_queue(tmp_path, '', **options).run([dataclasses.replace(job, seconds=(0.2,))])
    assert make_queue(tmp_path, '', **options).run([job]) == []
    assert results_of(tmp_path) == undisturbed
    assert 'no longer has the weights of 0.04 s; it starts again' in capsys.readouterr().out


def test_a_job_of_another_process_is_not_left_out(job, tmp_path):
    """That process does it, or says why it does not."""
    (tmp_path / job.name).touch()
    free = dataclasses.replace(job, case='free')
    queue = make_queue(tmp_path / 'output', '', elapsed=590, reserve=30, claims=str(tmp_path))
    (problem,) = queue.run([job, free])
    assert problem.startswith('digits_free_seed1: left out, ')


def test_a_process_that_starts_again_takes_its_own_job(job, measurements, tmp_path, monkeypatch):
    """The earlier process ended in the middle of the job, and no other process does it."""

    options = {'measurements': measurements, 'step_ms': STEP_MS, 'claims': str(tmp_path / 'claims')}
    with monkeypatch.context() as patch:
        patch.setattr(Queue, '_train', die)
        with pytest.raises(Died):
            make_queue(tmp_path / '1', '', **options).run([job])
    assert make_queue(tmp_path / '2', '', **options).run([job]) == []
    assert rows_of(tmp_path / '2') == [], 'the job is of another process'
    assert make_queue(tmp_path / '1', '', **options).run([job]) == []
    assert [row['seconds'] for row in rows_of(tmp_path / '1')] == list(job.seconds)


def test_processes_that_share_a_gpu():
    assert Limit(600, 30, shared_by=1).allows(560)
    assert not Limit(600, 30, shared_by=2).allows(300)
    assert Limit(600, 30, shared_by=2).allows(280)
    assert not Limit(600, 30, shared_by=2).allows(280, measuring=20)
    assert Limit(600, 30, shared_by=2, slowdown=1.8).allows(316)
    assert not Limit(600, 30, shared_by=2, slowdown=1.8).allows(317)
