"""`python -m jaxunet.compare.queue`: jobs in turn in one process, within a time limit."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import shutil
import time
import types

import numpy as np
import pytest
from PIL import Image
from support.queues import make_queue, rows_of, small_jobs
from support.tiny import tiny_config
from support.untrained_features import write_untrained

from jaxunet.compare import collected, job_runner
from jaxunet.compare.job_runner import summary
from jaxunet.compare.jobs import Job
from jaxunet.compare.measure import Measurements
from jaxunet.compare.stopwatch import Limit
from jaxunet.runtime import rows
from jaxunet.runtime.errors import UserError
from jaxunet.training.held_out import HeldOutLoss, Losses

pytestmark = pytest.mark.usefixtures('shared_steps')


@pytest.fixture(scope='module')
def features(tmp_path_factory):
    return write_untrained(tmp_path_factory.mktemp('features'))


@pytest.fixture(scope='module')
def jobs():
    return small_jobs()


@pytest.fixture(scope='module')
def done(jobs, features, tmp_path_factory):
    """A queue that has to wait for its file of features."""
    output = tmp_path_factory.mktemp('queue')
    late = output / 'features.npz'
    judge = write_untrained(tmp_path_factory.mktemp('judge'), scale=2)
    measurements = Measurements(str(late), output / 'pictures', str(judge))
    waited = []

    def appears(seconds):
        waited.append(rows_of(output))
        shutil.copyfile(features, late)

    with pytest.MonkeyPatch.context() as patch:
        clock = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=appears)
        patch.setattr(job_runner, 'time', clock)
        options = {'all_pictures': True, 'kept': True, 'fields': jobs[0].fields}  # the same step
        seed1 = dataclasses.replace(jobs[1], seconds=(0.05,), **options)
        queue = make_queue(output, late, measurements=measurements)
        assert queue.run([jobs[0], seed1]) == []
    assert waited == [[]], 'it measured before there were features, or waited twice'
    return output, [jobs[0], seed1]


def test_a_row_for_each_checkpoint_and_sampler(done):
    output, jobs = done
    found = rows_of(output)
    wanted = [
        (job.seed, s, sampler) for job in jobs for s in job.seconds for sampler in job.samplers
    ]
    assert [(r['seed'], r['seconds'], r['sampler']) for r in found] == wanted
    kept = [path.name for path in (output / 'work').iterdir()]
    assert kept == [jobs[1].name], 'runs that are done are kept unless they ask for it'
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


def test_a_second_network_judges_too(done):
    """Its features are twice those of the first, so that the distance is four times as large."""
    for row in rows_of(done[0]):
        assert set(row['judged']) == {'train'}
        assert set(row['judged']['train']) == {'fid', 'kid'}
        assert row['judged']['train']['fid'] == pytest.approx(4 * row['values']['train']['fid'])
        assert row['judge'] != row['features']


def test_a_judge_that_is_not_there_ends_before_training(features, tmp_path):
    with pytest.raises(UserError, match='found no file'):
        Measurements(str(features), tmp_path, str(tmp_path / 'judge.npz'))


def test_the_average_with_the_smallest_distance_is_measured(done):
    """It is chosen anew at each time, and every sampler has the same."""
    output, _ = done
    chosen = [row for row in rows_of(output) if row['seed'] == 0]
    for row in chosen:
        distances = row['average_fid']
        assert list(distances) == ['0.995', '0.15']
        assert row['average'] == min(distances, key=distances.get)
        # After the first step all averages are alike.
        assert len(set(distances.values())) == 2 or row['step'] == 1
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
        (job.seed, outcome)
        for job in jobs
        for outcome in (*['measured'] * len(job.seconds), 'trained')
    ]
    for row in stretches:
        measuring = {'training', 'sampling', 'measuring'} if row['outcome'] == 'measured' else set()
        assert measuring <= row['wall'].keys()
    assert {'waiting', 'compiling'} <= stretches[0]['wall'].keys()
    assert 'saving' in stretches[1]['wall']
    assert all(row['versions'] and row['command'] for row in stretches)


def test_weights_of_another_time_give_other_values(done):
    output, _ = done
    values = [str(row['values']) for row in rows_of(output)]
    assert len(set(values)) == len(values)


def test_pictures_and_logs_are_kept(done):
    output, jobs = done
    for job in jobs:
        assert (output / 'logs' / f'{job.name}.csv').read_text().startswith('step,')
        each = [f'_{name.replace(":", "")}' for name in job.samplers]
        for seconds, ending in itertools.product(job.seconds, each if job.all_pictures else ['']):
            path = output / 'pictures' / f'{job.name}_{seconds:g}s{ending}.png'
            with Image.open(path) as image:
                assert image.width > 9 * 48, 'not a column a class'


@dataclasses.dataclass(frozen=True)
class Continued(Job):
    """A job that starts from the weights of another."""

    start: str = ''

    def load_config(self, devices=1, step_seconds=0.0):
        return super().load_config(devices, step_seconds).replace(init_from=self.start)


@pytest.mark.usefixtures('counted_steps')
def test_a_run_starts_from_the_weights_of_one_that_was_kept(done, features, tmp_path):
    output, (_, job) = done
    start = str(output / 'work' / job.name)
    further = Continued(**{**vars(job), 'case': 'further', 'start': start})
    assert make_queue(tmp_path, features).run([further]) == []
    values = [row['values'] for row in rows_of(output) if row['seed'] == job.seed]
    assert [row['values'] for row in rows_of(tmp_path)] == values


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

    def measure(self, checkpoint, keep_on):
        calls.append(checkpoint.seconds)
        if len(calls) == 1:
            raise UserError('images: 100% of the pixels are NaN')
        yield from real(self, checkpoint, keep_on)

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


@pytest.mark.usefixtures('counted_steps')
def test_what_is_not_done_is_reported(jobs, features, tmp_path):
    """Jobs that fail, and jobs and times beyond the limit."""
    nowhere = {**jobs[1].fields, 'data.path': str(tmp_path / 'nowhere.zip')}
    failing = dataclasses.replace(jobs[1], case='failing', fields=nowhere)
    never = dataclasses.replace(jobs[1], case='never', seconds=(500.0,))
    cut = dataclasses.replace(jobs[1], seconds=(0.05, 500.0))
    queue = make_queue(tmp_path, features, limit=700, reserve=100, elapsed=300, resume=False)
    failed, left_out = queue.run([failing, never, cut])
    assert failed.startswith('digits_failing_seed1: ')
    assert 'no such file' in failed
    assert left_out.startswith('digits_never_seed1: left out, ')
    assert {row['seconds'] for row in rows_of(tmp_path)} == {0.05}


def test_a_run_that_saves_nothing_is_measured_after_the_limit(jobs, tmp_path, monkeypatch):
    """Otherwise what it has learned would be lost."""
    draw = Measurements._draw

    def late(self, *arguments):
        queue.limit = Limit(0.0)
        return draw(self, *arguments)

    monkeypatch.setattr(Measurements, '_draw', late)
    job = dataclasses.replace(jobs[1], seconds=(0.05,), samplers=('heun:2',))
    queue = make_queue(tmp_path, '', step_ms={'uniform': 20.0}, resume=False)
    assert queue.run([job]) == []
    assert [row['seconds'] for row in rows_of(tmp_path)] == [0.05]


def test_feature_networks_are_compiled_beside_training(jobs, features, tmp_path, monkeypatch):
    measurements, order = Measurements(str(features), tmp_path, str(features)), []
    extract, measure = Measurements._extract, Measurements.measure

    def compiled(self, features, shape):
        order.append(shape)
        extract(self, features, shape)

    def measured(self, *arguments):
        self.wait()
        order.append('measured')
        yield from measure(self, *arguments)

    monkeypatch.setattr(Measurements, '_extract', compiled)
    monkeypatch.setattr(Measurements, 'measure', measured)
    job = dataclasses.replace(jobs[1], seconds=(0.05,), samplers=('heun:2',))
    queue = make_queue(tmp_path, '', measurements=measurements, step_ms={'uniform': 20.0})
    assert queue.run([job]) == []
    assert order == [(20, 8, 8, 3), 'measured']


def test_images_read_in_another_way_are_opened_anew(tmp_path):
    """Methods may differ in data.background; then they do not share their images."""
    (tmp_path / 'images').mkdir()
    for i in range(2):
        Image.new('RGBA', (8, 8), (0, 0, 0, 0)).save(tmp_path / 'images' / f'{i}.png')
    queue = make_queue(tmp_path, '')
    config = tiny_config(
        data={'path': f'{tmp_path}/images', 'batch_size': 2}, model={'image_channels': 3}
    )
    white, black = (
        queue._source(config.replace(data={'background': colour})) for colour in ('white', 'black')
    )
    assert (white.load(np.arange(2)) == 255).all()
    assert (black.load(np.arange(2)) == 0).all()
    assert queue._source(config) is white


def test_features_that_never_appear(jobs, tmp_path, monkeypatch):
    queue = make_queue(tmp_path, tmp_path / 'none.npz')

    def sleep(seconds):
        queue.limit = Limit(0.0)

    clock = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=sleep)
    monkeypatch.setattr(job_runner, 'time', clock)
    assert queue.run(jobs) == [f'nothing was done, as there is no {tmp_path}/none.npz']
