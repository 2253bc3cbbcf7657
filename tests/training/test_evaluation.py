"""Metrics during training, and the clock that counts training alone."""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest
from support.commands import call
from support.no_network import no_network
from support.tiny import tiny_config
from support.untrained_features import write_untrained

from jaxunet.checkpoint.state import fresh_state
from jaxunet.checkpoint.store import checksum, read
from jaxunet.data.source import ArraySource
from jaxunet.data.sources import open_source
from jaxunet.metrics.evaluation import Result, result_label
from jaxunet.ops.backends import choose
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.generator import StoppedError
from jaxunet.training.clock import Clock
from jaxunet.training.evaluation import (
    Evaluator,
    evaluation_network,
    evaluation_table,
    read_evaluations,
)
from jaxunet.training.logs import read_metrics
from jaxunet.training.loop import train
from jaxunet.training.parallel import Parallel


@pytest.fixture(scope='module', autouse=True)
def _no_network():
    with no_network():
        yield


@pytest.fixture(scope='module')
def features(tmp_path_factory):
    return write_untrained(tmp_path_factory.mktemp('features'))


def config_of(features, **changes):
    evaluation = {
        'samples': 10,
        'batch_size': 4,
        'steps': 2,
        'metrics': ('fid', 'precision'),
        'features': str(features),
    }
    return tiny_config(
        train={'evaluate_every': 3, 'log_every': 2},
        ema={'rates': (0.995, 0.5)},
        parallel={'devices': 2},
        evaluation=evaluation,
    ).replace(**changes)


def test_samples_are_drawn_as_the_config_says(features, source):
    options = {
        'sampler': 'ddim',
        'eta': 0.5,
        'skip_schedule': 'quadratic',
        'guidance_scale': 3.0,
    }
    plain = config_of(features, model={'num_classes': 10, 'zero_init': False})
    params = fresh_state(plain).params
    images = []
    for config, told in (
        (plain, 'ddpm fixed_small'),
        (
            plain.replace(evaluation=options),
            'ddim eta=0.5 skip_schedule=quadratic guidance_scale=3.0',
        ),
    ):
        evaluator = Evaluator(config, source, jax.local_devices()[:1])
        images.append(evaluator.sample(params))
        assert evaluator.row(Result('precision', 0.5, None, {}), 3, 1.0)['sampler'] == told
    assert (images[0] != images[1]).mean() > 0.1
    with pytest.raises(StoppedError):
        evaluator.measure(params, lambda: False)


@pytest.mark.parametrize('mode', ['jit', pytest.param('pmap', marks=pytest.mark.long)])
def test_a_run_is_evaluated_on_the_way(mode, features, source, tmp_path):
    config = config_of(features, parallel={'mode': mode})
    assert train(config, tmp_path, source) == 6
    rows = read_evaluations(tmp_path)
    assert [(row['step'], row['metric'].split('[')[0]) for row in rows] == [
        (step, metric) for step in ('3', '6') for metric in ('frechet_distance', 'precision')
    ]
    for row in rows:
        assert '[features=classifier-' in row['metric']
        assert (row['num_samples'], row['sampler'], row['evaluations'], row['reference']) == (
            '10',
            'ddpm fixed_small',
            '2',
            'digits:',
        )
        assert (row['num_reference'], row['resize'].split(';')[0]) == ('1797', 'none')
    assert [row['settings'] for row in rows] == ['', 'k=3'] * 2
    # The weights changed, and the last numbers are those of the average in the checkpoint, on any
    # devices.
    assert rows[0]['value'] != rows[2]['value']
    again = Evaluator(config, source, jax.local_devices()[:1]).measure(
        read(tmp_path).state.ema['0.995']
    )
    assert {result.protocol['samples'] for result in again} == {'samples of the model'}
    assert [result.value for result in again] == pytest.approx(
        [float(row['value']) for row in rows[2:]], rel=0.01, abs=0.11
    )
    assert float(rows[2]['training_seconds']) == pytest.approx(
        float(read_metrics(tmp_path / 'metrics.csv')[-1]['training_seconds']), abs=0.05
    )


def test_the_best_checkpoint_stays(features, source, tmp_path, monkeypatch):
    """The average of the first rate is evaluated."""
    values, evaluated = iter((5.0, 1.0, 3.0)), []

    def measure(self, params, *_):
        evaluated.append(checksum(jax.device_get(params)))
        label = result_label(self.config.evaluation.metrics[0], self.network)
        return [
            Result(label, next(values), None, {'num_samples': 10, 'reference': ''}),
            Result('precision[features=others]', 9.0, None, {}),
        ]

    monkeypatch.setattr(Evaluator, 'measure', measure)
    schedule = {'evaluate_every': 2, 'checkpoint_every': 2, 'keep': 1, 'keep_best': 1, 'steps': 6}
    train(config_of(features, train=schedule), tmp_path, source)
    assert sorted(path.name for path in (tmp_path / 'checkpoints').iterdir()) == ['4', '6']
    assert evaluated[-1] == checksum(read(tmp_path).state.ema['0.995'])


@pytest.mark.long
def test_evaluating_takes_no_time_of_training(features, source, tmp_path, monkeypatch):
    """A restart takes none either: its clock goes on."""
    measure = Evaluator.measure

    def slowly(self, *arguments):
        time.sleep(1.0)
        return measure(self, *arguments)

    monkeypatch.setattr(Evaluator, 'measure', slowly)
    began = time.perf_counter()
    train(config_of(features), tmp_path, source)
    seconds = read(tmp_path).facts.seconds
    assert 0 < seconds < time.perf_counter() - began - 2
    longer = config_of(features, train={'steps': 10})
    began = time.perf_counter()
    train(longer, tmp_path, source)
    assert 0 < read(tmp_path).facts.seconds - seconds < time.perf_counter() - began - 2
    rows = read_evaluations(tmp_path)
    assert [row['step'] for row in rows[::2]] == ['3', '6', '9', '10']
    times = [float(row['training_seconds']) for row in rows]
    assert sorted(times) == times
    assert times[-1] == pytest.approx(read(tmp_path).facts.seconds, abs=1e-6)


@pytest.mark.long
def test_an_error_on_the_way_takes_no_step_with_it(features, source, tmp_path, monkeypatch):
    def fail(*_):
        raise UserError('no room')

    monkeypatch.setattr(Evaluator, 'measure', fail)
    with pytest.raises(UserError, match='no room'):
        train(config_of(features), tmp_path, source)
    assert int(read(tmp_path).state.step) == 3  # its checkpoints are at 2, 4 and 6


def test_clock():
    now = [10.0]
    clock = Clock(5, 2.0, lambda: now[0])
    now[0] = 13.0
    assert clock.seconds == 5
    clock.pause()
    now[0] = 20.0
    assert clock.seconds == 5
    clock.resume()
    now[0] = 21.5
    assert clock.lap(9, 21.0) == (4, 4)
    clock.pause()
    now[0] = 23.0
    clock.pause()
    assert clock.lap(10, 21.25) == (0.25, 1)
    assert clock.at(24.0) == clock.seconds == 6.5


def test_a_statistics_file_or_other_images_as_the_reference(features, source, tmp_path):
    config = config_of(features, parallel={'devices': 1})
    state = Parallel(config, choose('xla')).local_devices
    images = source.load(np.arange(50))
    np.savez(tmp_path / 'few.npz', images=np.repeat(images, 3, axis=3))
    evaluator = Evaluator(
        config.replace(evaluation={'reference': str(tmp_path / 'few.npz')}), source, state
    )
    same, other = evaluator.compare(images), evaluator.compare(255 - images)
    assert same[0].value < 1e-3 * other[0].value
    assert same[1].value == 1
    assert same[0].protocol['num_reference'] == 50


def test_mistakes_are_told_before_training(features, source, tmp_path):
    """Not when the first samples are drawn."""
    for changes, message in (
        ({'evaluation': {'reference': str(tmp_path / 'nothere')}}, 'nothere: no such file'),
        (
            {'data': {'image_size': (16,)}},
            r'classifier-\w+ compares images of 8x8 pixels, found 16x16',
        ),
    ):
        config = config_of(features, parallel={'devices': 1}).replace(**changes)
        shape = config.image_shape
        with pytest.raises(UserError, match=message):
            train(config, tmp_path / 'run', open_source('digits:', image_shape=shape))
        assert not (tmp_path / 'run' / 'metrics.csv').exists()


def test_a_line_that_was_cut_short(tmp_path, features, source):
    config = config_of(features, parallel={'devices': 1})
    evaluator = Evaluator(config, source, jax.local_devices()[:1])
    results = evaluator.compare(source.load(np.arange(20)))
    log = evaluation_table(tmp_path, 0)
    for step in (3, 6):
        log.add([evaluator.row(result, step, 1.5) for result in results])
    text = log.path.read_text()
    log.path.write_text(text[: text.rindex(',digits:')])
    assert [row['step'] for row in read_evaluations(tmp_path)] == ['3', '3', '6']
    evaluation_table(tmp_path, 3)
    assert [row['step'] for row in read_evaluations(tmp_path)] == ['3', '3']


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'metrics': ('fid', 'inception_score')},
            'evaluation.metrics: inception_score needs the features inception, found classifier-',
        ),
        ({'features': '/nowhere.npz'}, 'found no file'),
        ({'sampler': 'ddpm', 'variance': 'learned'}, 'variance: learned needs a model with'),
    ],
)
def test_mistakes_come_before_training(changes, message, features, source, tmp_path):
    with pytest.raises(UserError, match=message):
        train(config_of(features).replace(evaluation=changes), tmp_path, source)
    assert not (tmp_path / 'evaluation.csv').exists()


@pytest.mark.parametrize(
    ('metric', 'least'), [('fid', 2), ('kid', 2), ('recall', 4), ('inception_score', 10)]
)
def test_too_few_samples_are_told_before_features_are_read(metric, least):
    """Fewer cannot be measured, with these features or others."""
    evaluation = {'samples': least - 1, 'metrics': (metric,), 'features': 'nothere.npz'}
    few = tiny_config(evaluation=evaluation)
    with pytest.raises(UserError, match=f'{metric} needs {least} or more, found {least - 1}'):
        evaluation_network(few)
    with pytest.raises(UserError, match='nothere'):
        evaluation_network(few.replace(evaluation={'samples': least}))


@pytest.mark.parametrize(
    ('metric', 'least'), [('fid', 2), ('kid', 2), ('recall', 4), ('copies', 5)]
)
def test_too_few_reference_images_are_told_before_training(
    metric, least, features, source, tmp_path
):
    images = source.load(np.arange(least))
    np.savez(tmp_path / 'few.npz', images=images[1:])
    config = config_of(features).replace(evaluation={'metrics': (metric,)})
    given = config.replace(evaluation={'reference': str(tmp_path / 'few.npz')})
    told = f'{metric} needs {least} reference images or more, found {least - 1}'
    with pytest.raises(UserError, match=rf'evaluation.reference: .*few.npz: {told}'):
        evaluation_network(given)
    few = ArraySource('few images', images[1:], (8, 8, 1))
    with pytest.raises(UserError, match=f'few images: {told}'):
        Evaluator(config, few, jax.local_devices()[:1])
    np.savez(tmp_path / 'few.npz', images=images)
    evaluation_network(given)


@pytest.mark.parametrize('metric', ['fid', 'precision'])
def test_too_few_reference_images_for_the_command(metric, features, source, tmp_path):
    np.savez(tmp_path / 'few.npz', images=source.load(np.arange(1)))
    paths = ['--samples=digits:', f'--reference={tmp_path}/few.npz', f'--features={features}']
    error = call('jaxunet.evaluate', *paths, f'--metrics={metric}', code=2)
    assert f'--reference: {tmp_path}/few.npz: {metric} needs ' in error
