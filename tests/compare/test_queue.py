"""`python -m jaxunet.compare.queue`: jobs in turn in one process, within a time limit."""

from __future__ import annotations

import csv
import dataclasses
import math
import pathlib
import shutil
import time
import types

import jax
import pytest
from PIL import Image
from support.commands import call_each
from support.untrained_features import write_untrained

from jaxunet.compare import collected, job_runner, work
from jaxunet.compare.job_files import read_jobs
from jaxunet.compare.job_runner import Limit, Queue, summary
from jaxunet.compare.measure import Measurements
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError
from jaxunet.training.held_out import HeldOutLoss, Losses
from jaxunet.training.parallel import Parallel

pytestmark = pytest.mark.usefixtures('shared_steps')

RESULTS = pathlib.Path(__file__).parents[2] / 'docs/results'
JOBS, TINY = RESULTS / 'recipes/jobs.py', RESULTS / 'methods/tiny.toml'


@pytest.fixture(scope='module')
def features(tmp_path_factory):
    return write_untrained(tmp_path_factory.mktemp('features'))


@pytest.fixture(scope='module')
def jobs():
    """Two of the small jobs: one case with two seeds, of which only the first holds images out and
    chooses an average.
    """
    first = [job for job in read_jobs(str(TINY), '') if job.case == 'uniform']
    assert [job.seed for job in first] == [0, 1]
    often = {'train.holdout_every': 1, 'train.log_every': 1}
    plain = {k: v for k, v in first[1].fields.items() if k != 'data.holdout'}
    return [
        dataclasses.replace(
            first[0], fields={**first[0].fields, **often}, seconds=(0.05, 0.6), choosing=8
        ),
        dataclasses.replace(first[1], fields=plain, averages=(), seconds=(0.1, 0.3), picture=9),
    ]


def make_queue(
    output, features, *, limit=600.0, reserve=0.0, elapsed=0.0, measurements=None, **options
):
    began = time.perf_counter() - elapsed
    return Queue(
        output,
        measurements or Measurements(str(features), output / 'pictures'),
        limit=Limit(limit, reserve, began=began),
        command='the command',
        **options,
    )


@pytest.fixture(scope='module')
def done(jobs, features, tmp_path_factory):
    """A queue whose file of features appears only after the training of both jobs."""
    output = tmp_path_factory.mktemp('queue')
    late = output / 'features.npz'
    waited = []

    def appears(seconds):
        waited.append(rows_of(output))
        shutil.copyfile(features, late)

    with pytest.MonkeyPatch.context() as patch:
        clock = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=appears)
        patch.setattr(job_runner, 'time', clock)
        seed1 = dataclasses.replace(jobs[1], seconds=(0.05,))
        assert make_queue(output, late).run([jobs[0], seed1]) == []
    assert waited == [[]], 'it measured before there were features, or waited twice'
    return output, [jobs[0], seed1]


def rows_of(output):
    path = output / job_runner.ROWS
    return rows.read(path) if path.exists() else []


def test_a_row_for_each_checkpoint_and_sampler(done):
    output, jobs = done
    found = rows_of(output)
    wanted = [
        (job.seed, s, sampler) for job in jobs for s in job.seconds for sampler in job.samplers
    ]
    assert [(r['seed'], r['seconds'], r['sampler']) for r in found] == wanted
    assert not list((output / 'work').iterdir()), 'runs that are done are kept'
    for row in found:
        assert row['training_seconds'] >= row['seconds']
        assert row['step'] > 0
        assert row['num_samples'] == 20
        assert row['seconds_per_sample'] > 0
        assert row['references'] == {'train': 1797}
        assert set(row['values']['train']) >= {'fid', 'kid', 'precision', 'recall'}
        assert row['fields']['diffusion.schedule'] == 'linear'
        assert row['command'] == 'the command'
        assert f'{row["seconds"]:g} s' in summary(row)
        # With features other than Inception's it is no FID.
        assert ': train frechet_distance ' in summary(row)
        assert 'fid' not in summary(row)
    assert {r['evaluations'] for r in found} == {3, 2}


def test_the_average_with_the_smallest_distance_is_measured(done):
    """It is chosen anew at each time, and every sampler has the same."""
    output, _ = done
    chosen = [row for row in rows_of(output) if row['seed'] == 0]
    for row in chosen:
        distances = row['average_fid']
        assert list(distances) == ['0.995', '0.15']
        assert row['average'] == min(distances, key=distances.get)
        # The first time may be that of the first step, after which all averages are alike.
        assert len(set(distances.values())) == 2 or row['seconds'] == 0.05
        assert row['choosing'] == 8
    assert [row['average_fid'] for row in chosen[::2]] == [
        row['average_fid'] for row in chosen[1::2]
    ]
    assert 'average' not in rows_of(output)[-1], 'one average leaves no choice'


def test_rows_have_the_loss_on_held_out_images(done):
    output, _ = done
    losses = [row['losses']['held_out_loss'] for row in rows_of(output) if row['seed'] == 0]
    assert losses[0] == losses[1] != losses[2] == losses[3]
    assert losses[0] > losses[2], 'it learns'


def test_what_each_piece_of_work_took(done):
    output, jobs = done
    stretches = collected.read_stretches([output / collected.STRETCHES])
    assert [(row['seed'], row['outcome']) for row in stretches] == [
        (0, 'trained'),  # the features appear only later
        (1, 'trained'),
        *((job.seed, 'measured') for job in jobs for _ in job.seconds),
    ]
    for row in stretches[:2]:
        assert row['wall'].keys() == {'compiling', 'training', 'saving'}
    for row in stretches[2:]:
        assert {'sampling', 'measuring'} <= row['wall'].keys()
    assert 'waiting' in stretches[2]['wall']
    assert all(row['versions'] and row['command'] for row in stretches)


@pytest.fixture(scope='module')
def measurements(features, tmp_path_factory):
    """Measurements whose samplers several queues share."""
    return Measurements(str(features), tmp_path_factory.mktemp('shared'))


@pytest.fixture(scope='module')
def job(jobs):
    """A job whose steps count 20 ms: its times are after 2, 4 and 10 steps."""
    return dataclasses.replace(
        jobs[1],
        seconds=(0.04, 0.08, 0.2),
        samplers=('heun:2',),
        averages=jobs[0].averages,
        choosing=8,
        picture=0,
    )


@pytest.fixture(scope='module')
def undisturbed(job, measurements, tmp_path_factory):
    output = tmp_path_factory.mktemp('undisturbed')
    assert make_queue(output, '', measurements=measurements, step_ms=STEP_MS).run([job]) == []
    return results_of(output)


STEP_MS = {'uniform': 20.0}


def results_of(output):
    """Rows without what is of the process."""
    names = ('seconds', 'training_seconds', 'step', 'average', 'average_fid', 'values')
    return [{name: row[name] for name in names} for row in rows_of(output)]


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

    class Died(BaseException):
        pass

    def die(self, checkpoint):
        raise Died

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


def test_a_run_trains_on_several_devices(job, tmp_path, monkeypatch):
    local, found, compiled = Parallel.local, set(), []

    def spy(self, tree):
        found.add(len(jax.tree.leaves(tree)[0].sharding.device_set))
        return local(self, tree)

    monkeypatch.setattr(Parallel, 'local', spy)
    monkeypatch.setattr(Measurements, 'compile', lambda self, beside: compiled.append(len(beside)))
    monkeypatch.setattr(Measurements, 'measure', lambda self, checkpoint: iter(()))
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


def test_weights_of_another_time_give_other_values(done):
    output, _ = done
    values = [str(row['values']) for row in rows_of(output)]
    assert len(set(values)) == len(values)


def test_pictures_and_logs_are_kept(done):
    output, jobs = done
    for job in jobs:
        assert (output / 'logs' / f'{job.name}.csv').read_text().startswith('step,')
        for seconds in job.seconds:
            with Image.open(output / 'pictures' / f'{job.name}_{seconds:g}s.png') as image:
                assert image.width > 9 * 48, 'not a column a class'


def test_the_log_has_the_loss_on_held_out_images(done):
    output, jobs = done
    log = output / 'logs' / f'{jobs[0].name}.csv'
    losses = [row['held_out_loss'] for row in csv.DictReader(log.read_text().splitlines())]
    assert losses
    assert all(losses)


def test_the_same_command_repeats_nothing(done, features):
    output, jobs = done
    before = rows_of(output)
    assert make_queue(output, features).run(jobs) == []
    assert rows_of(output) == before


@pytest.mark.long
def test_times_of_known_rows_are_left_out(done, features, tmp_path):
    """Another process that shares the claims does not train for them either."""
    output, jobs = done
    known = tmp_path / 'known.jsonl'
    for row in rows_of(output):
        if row['seconds'] == 0.05:
            rows.append(known, row)
    options = {'known': str(known), 'claims': str(tmp_path / 'claims')}
    assert make_queue(tmp_path / 'a', features, **options).run(jobs) == []
    measured = {(row['seed'], row['seconds']) for row in rows_of(tmp_path / 'a')}
    assert measured == {(0, 0.6)}
    assert make_queue(tmp_path / 'b', features, **options).run(jobs) == []
    assert rows_of(tmp_path / 'b') == [], 'another process took the same job'


@pytest.mark.long
def test_weights_that_give_no_images_stop_nothing_else(jobs, features, tmp_path, monkeypatch):
    """The first checkpoint's samples are NaN; the second is measured. A step counts 20 ms."""
    real, calls = Measurements.measure, []

    def measure(self, checkpoint):
        calls.append(checkpoint.seconds)
        if len(calls) == 1:
            raise UserError('images: 100% of the pixels are NaN')
        yield from real(self, checkpoint)

    monkeypatch.setattr(Measurements, 'measure', measure)
    job = dataclasses.replace(jobs[1], seconds=(0.05, 0.2), samplers=('heun:2',))
    (problem,) = make_queue(tmp_path, features, step_ms={'uniform': 20.0}).run([job])
    assert problem == 'digits_uniform_seed1 at 0.05 s: images: 100% of the pixels are NaN'
    (row,) = rows_of(tmp_path)
    assert row['seconds'] == 0.2
    assert (row['step'], row['training_seconds'], row['step_ms']) == (10, pytest.approx(0.2), 20)
    assert 'seconds_per_sample' not in row, 'others may use the device'


@pytest.mark.parametrize('loss', [math.inf, math.nan])
def test_a_loss_that_is_not_finite_stops_nothing_else(loss, jobs, tmp_path, monkeypatch):
    """Only the checkpoint that has it is not measured."""
    real, calls = HeldOutLoss.measure, []

    def measure(self, params):
        found = real(self, params)
        calls.append(found)
        return Losses(found.held_out * loss, found.seen) if len(calls) == 1 else found

    monkeypatch.setattr(HeldOutLoss, 'measure', measure)
    # Only the measurements of checkpoints call it, not training.
    fields = {**jobs[0].fields, 'train.holdout_every': 0}
    options = {'samplers': ('heun:2',), 'averages': (), 'choosing': 0}
    job = dataclasses.replace(jobs[0], fields=fields, seconds=(0.05, 0.2), **options)
    measurements = Measurements('', tmp_path / 'pictures')
    queue = make_queue(tmp_path, '', measurements=measurements, step_ms={'uniform': 20.0})
    (problem,) = queue.run([job])
    assert problem == (
        'digits_uniform_seed0 at 0.05 s: losses.held_out_loss: expected a finite number, found '
        f'{loss}; training has diverged'
    )
    assert [row['seconds'] for row in rows_of(tmp_path)] == [0.2]


def test_what_is_not_done_is_reported(jobs, tmp_path, monkeypatch):
    """Jobs that fail, jobs and times beyond the limit, and features that never appear."""
    late = 0.0

    def sleep(seconds):
        nonlocal late
        late += 1000

    clock = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + late, sleep=sleep)
    monkeypatch.setattr(job_runner, 'time', clock)
    nowhere = {**jobs[1].fields, 'data.path': str(tmp_path / 'nowhere.zip')}
    failing = dataclasses.replace(jobs[1], case='failing', fields=nowhere)
    never = dataclasses.replace(jobs[1], case='never', seconds=(500.0,))
    cut = dataclasses.replace(jobs[1], seconds=(0.05, 500.0))
    queue = make_queue(
        tmp_path, tmp_path / 'none.npz', limit=700, reserve=100, elapsed=300, resume=False
    )
    failed, left_out, unmeasured = queue.run([failing, never, cut])
    assert failed.startswith('digits_failing_seed1: ')
    assert 'no such file' in failed
    assert left_out.startswith('digits_never_seed1: left out, ')
    assert unmeasured == 'digits_uniform_seed1: not measured at 0.05 s, as there are no features'
    assert rows_of(tmp_path) == []
    assert late == 1000


def test_a_job_of_another_process_is_not_left_out(job, tmp_path):
    """That process does it, or says why it does not."""
    (tmp_path / job.name).touch()
    free = dataclasses.replace(job, case='free')
    queue = make_queue(tmp_path / 'output', '', elapsed=590, reserve=30, claims=str(tmp_path))
    (problem,) = queue.run([job, free])
    assert problem.startswith('digits_free_seed1: left out, ')


def test_a_process_that_starts_again_takes_its_own_job(job, measurements, tmp_path, monkeypatch):
    """The earlier process ended in the middle of the job, and no other process does it."""

    class Stalled(BaseException):
        pass

    def stall(self, job, seconds):
        raise Stalled

    options = {'measurements': measurements, 'step_ms': STEP_MS, 'claims': str(tmp_path / 'claims')}
    with monkeypatch.context() as patch:
        patch.setattr(Queue, '_train', stall)
        with pytest.raises(Stalled):
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
