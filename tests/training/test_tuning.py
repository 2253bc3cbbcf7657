"""Runs that tune a network: what they choose, what they refuse, and how they resume."""

from __future__ import annotations

import contextlib
import json

import jax
import numpy as np
import pytest
from support.configs import CONFIGS, load
from support.tiny import tiny_config

from jaxunet.checkpoint import store as checkpoint
from jaxunet.checkpoint.load import load_initial
from jaxunet.checkpoint.newest import config_at
from jaxunet.checkpoint.state import fresh_state
from jaxunet.config import Config, resolve, to_dict
from jaxunet.config.unused import check_used
from jaxunet.data import automatic
from jaxunet.data.automatic import complete
from jaxunet.runtime.errors import UserError
from jaxunet.training.loop import train
from jaxunet.training.tuning import CHOSEN, for_tuning, init_from_config
from jaxunet.weights import write_weights

pytestmark = pytest.mark.usefixtures('shared_steps')

TEACHER = tiny_config(
    diffusion={'objective': 'flow', 'flow_mean': -0.5},
    model={'num_classes': 3, 'label_dropout': 0.2, 'dropout': 0.1},
    data={'path': 'digits:', 'augment': 'flip'},
)
TUNES = {'diffusion.objective': 'consistency', 'init_from': 'runs/teacher'}
# What is chosen for the 1,797 digits.
BY_IMAGES = {
    'model.dropout': 0.0,
    'optimizer.learning_rate': 2e-3,
    'ema.rates': (0.995,),
    'train.steps': 8000,
}


def recipe(name, **changes):
    raw = load(next(path for path in CONFIGS if path.stem == name)).to_dict()
    for path, value in (TUNES | changes).items():
        section, _, field = path.rpartition('.')
        (raw[section] if section else raw)[field] = value
    return raw


def test_any_recipe_takes_the_network_and_the_images_of_the_teacher(caplog):
    for name in ('images', 'cifar10', 'digits'):
        with caplog.at_level('INFO', logger='absl'):
            config = complete(for_tuning(recipe(name), None, TEACHER, TUNES))
        assert config.model == TEACHER.replace(model={'dropout': 0.0}).model
        assert (config.data, config.train.holdout_every) == (TEACHER.data, 0)
        d = config.diffusion
        assert (d.objective, d.consistency_of) == ('consistency', 'flow')
        assert (d.consistency_q, d.consistency_stages) == (2, 4)
        assert (d.flow_mean, d.flow_std, d.steps) == (-1.1, 2.0, TEACHER.diffusion.steps)
        raw = to_dict(config)
        for path, value in CHOSEN.items():
            section, field = path.split('.')
            expected = BY_IMAGES.get(path, value)
            assert raw[section][field] == expected, path
        assert (config.evaluation.sampler, config.evaluation.variance) == ('', '')
        check_used(config)
        taken, chosen, by_images, ends = (record.message for record in caplog.records[-4:])
        assert taken.startswith('as in the run of init_from: ')
        assert ('data.path=digits:' in taken) == (name != 'digits')  # which has it already
        assert chosen.startswith('chosen to tune the network: diffusion.flow_mean=-1.1, ')
        assert 'diffusion.consistency_q=2, ' in chosen
        assert not any(path in chosen for path in BY_IMAGES)
        assert chosen.endswith('; q^stages is about 16 (docs/few_steps.md)')
        assert by_images.startswith('chosen for 1,797 images ')
        assert by_images.endswith(
            ': model.dropout=0.0, optimizer.learning_rate=0.002, ema.rates=0.995, train.steps=8000'
        )
        assert ends.startswith('the run ends after 8,000 steps, when it has seen each image about ')


def test_the_rate_goes_with_the_optimizer_and_the_number_of_images(tmp_path):
    few, many = ({'data.path': str(tmp_path / f'{count}.npz')} for count in (1999, 2000))
    for count, named in ((1999, few), (2000, many)):
        np.savez(named['data.path'], images=np.zeros((count, 8, 8, 3), np.uint8))
    adamw = few | {'optimizer.name': 'adamw'}
    for named, rate in ((few, 2e-3), (many, 6e-4), (adamw, 1e-4)):
        config = complete(for_tuning(recipe('images', **named), None, TEACHER, [*TUNES, *named]))
        assert config.optimizer.learning_rate == rate


@pytest.mark.parametrize(
    ('images', 'objective', 'dropout', 'rate'),
    [
        (999, 'consistency', 0.2, 0.9993),
        (1000, 'consistency', 0.0, 0.995),
        (999, 'edm', 0.0, 0.995),
    ],
)
def test_few_images_are_tuned_with_dropout(images, objective, dropout, rate):
    raw = recipe('images', **{'model.dropout': -1.0, 'ema.rates': ()})
    raw['diffusion']['objective'] = objective
    chosen = automatic.choose(raw, automatic.Facts(images, [(64, 64)], False))
    assert (chosen['model.dropout'], chosen['ema.rates']) == (dropout, (rate,))


@pytest.mark.parametrize(
    ('images', 'batch', 'dropout', 'steps'),
    [
        (100, 32, -1.0, 4000),
        (350, 32, -1.0, 7000),
        (500, 32, -1.0, 8000),
        (500, 32, 0.1, 8000),
        (500, 32, 0.0, 5000),
        (2000, 32, -1.0, 8000),
        (2000, 128, -1.0, 5000),
        (50_000, 128, -1.0, 8000),
    ],
)
def test_few_images_are_tuned_for_fewer_steps(images, batch, dropout, steps):
    fields = {'data.batch_size': batch, 'train.steps': 0, 'model.dropout': dropout}
    raw = recipe('images', **fields)
    facts = automatic.Facts(images, [(64, 64)], False)
    assert automatic.choose(raw, facts)['train.steps'] == steps


def test_named_fields_keep_their_values(tmp_path):
    path = tmp_path / 'others.npz'
    np.savez(path, images=np.zeros((16, 8, 8, 3), np.uint8))
    named = {
        'train.steps': 100,
        'model.dropout': 0.3,
        'data.path': str(path),
        'diffusion.consistency_stages': 3,
        'optimizer.clip_norm': 1.0,
    }
    config = complete(for_tuning(recipe('images', **named), None, TEACHER, [*TUNES, *named]))
    assert (config.train.steps, config.model.dropout, config.data.path) == (100, 0.3, str(path))
    assert (config.optimizer.clip_norm, config.optimizer.warmup_steps) == (1.0, 0)
    assert config.diffusion.consistency_q == 3  # 3³ = 27, and 2³ = 8


@pytest.mark.parametrize(('q', 'stages'), [(2, 4), (4, 2), (16, 1), (64, 1)])
def test_stages_go_with_a_named_q(q, stages):
    named = {'diffusion.consistency_q': q}
    d = complete(for_tuning(recipe('images', **named), None, TEACHER, [*TUNES, *named])).diffusion
    assert (d.consistency_q, d.consistency_stages) == (q, stages)


def test_a_config_file_that_tunes_keeps_what_it_sets():
    """Its fields differ from the defaults; the command line names none of them."""
    raw = recipe('elephants64', **{'data.path': 'digits:'})
    config = complete(for_tuning(raw, None, TEACHER, ['train.log_every']))
    assert (config.train.steps, config.optimizer.warmup_steps) == (40_000, 500)
    assert config.ema.rates == (0.9995,)
    assert (config.optimizer.clip_norm, config.diffusion.flow_std) == (0.0, 2.0)


def test_other_objectives_are_left_alone():
    raw = recipe('cifar10', **{'diffusion.objective': 'flow'})
    assert for_tuning(raw, None, TEACHER, ['diffusion.objective']) is raw


def test_a_resumed_run_keeps_what_was_chosen():
    first = complete(for_tuning(recipe('images'), None, TEACHER, TUNES))
    again = recipe('images', precision='float32', **{'train.steps': 9000})
    gone = complete(for_tuning(again, first, None, [*TUNES, 'train.steps']), first)
    assert gone == first.replace(precision='float32', train={'steps': 9000})
    for length in ({'minutes': 3.0}, {'epochs': 2.0}):  # does not outlast one that is named
        began = first.replace(train=length)
        assert complete(for_tuning(again, began, None, [*TUNES, 'train.steps']), began) == gone
    further = complete(for_tuning(recipe('images'), None, first, TUNES))  # tunes a tuned network
    assert further.diffusion == first.diffusion


def test_only_a_new_run_needs_the_model_of_init_from(tmp_path):
    path = tmp_path / 'teacher.safetensors'
    teacher = tuning('').replace(diffusion={'objective': 'edm', 'consistency_of': ''})
    write_weights(path, fresh_state(teacher).params, teacher)
    flow = recipe('images', **{'diffusion.objective': 'flow', 'init_from': str(path)})
    tunes = recipe('images', **{'init_from': str(path)})
    first = complete(for_tuning(recipe('images'), None, TEACHER, TUNES))
    for values, known, needed in (
        (flow, None, True),
        (flow, teacher, False),
        (tunes, None, True),
        (tunes, first, False),
        (tunes, teacher, True),  # ends with an error that lists what differs
    ):
        assert init_from_config(values, known) == (teacher if needed else None)


def test_an_open_objective_is_that_of_a_tuned_network():
    """A run that resumes or starts from one keeps all that tuning chose."""
    first = complete(for_tuning(recipe('images'), None, TEACHER, TUNES))
    left_open = recipe('images', **{'diffusion.objective': ''})
    assert complete(for_tuning(left_open, None, first, [])) == first
    assert complete(for_tuning(left_open, first, None, []), first) == first


@pytest.mark.parametrize(
    ('start', 'changes', 'message'),
    [
        (None, {'init_from': ''}, 'diffusion.objective: consistency tunes a trained network: set '),
        (None, {}, 'runs/teacher: no such file or folder'),
        (
            None,
            {'init_from': '.'},
            'init_from: .: expected the run, .*, found none there that says so$',
        ),
        (None, {'init_from': 'held'}, 'found none there that says so; it holds the workdirs a, b$'),
        (Config(), {}, 'init_from: runs/teacher: .* predicts v, edm or flow, found epsilon'),
    ],
)
def test_nothing_to_tune_is_one_line(start, changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('a', 'b'):
        (tmp_path / 'held' / name / 'checkpoints').mkdir(parents=True)
    with pytest.raises(UserError, match=message) as error:
        for_tuning(recipe('images', **changes), None, start, TUNES)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'diffusion': {'consistency_of': ''}},
            'diffusion.consistency_of: expected v, edm or flow',
        ),
        ({'loss': {'weighting': 'min_snr'}}, 'loss.weighting: expected uniform .* found min_snr'),
        ({'timesteps': {'sampler': 'adaptive'}}, 'timesteps.sampler: expected uniform .*adaptive'),
        ({'evaluation': {'steps': 5}}, 'evaluation.steps: expected 1 to 4 evaluations .* found 5'),
        ({'train': {'sample_steps': 9}}, 'train.sample_steps: expected 1 to 4 .* found 9'),
        ({'evaluation': {'sampler': 'heun'}}, 'evaluation.sampler: expected consistency, .*heun'),
        ({'evaluation': {'skip_schedule': 'karras'}}, 'evaluation.skip_schedule: karras spaces'),
        ({'evaluation': {'guidance_scale': 2.0}}, 'evaluation.guidance_scale: .* found 2'),
        (
            {'diffusion': {'consistency_q': 256, 'consistency_stages': 3}},
            r'diffusion.consistency_stages: .* at most 1048576, found 256\^3',
        ),
        ({'diffusion': {'schedule': 'cosine'}}, 'schedule: .*set by diffusion.edm_mean and edm_st'),
    ],
)
def test_wrong_fields_are_one_line(changes, message):
    fields = {'objective': 'consistency', 'consistency_of': 'edm'}
    diffusion = fields | changes.get('diffusion', {})
    with pytest.raises(UserError, match=message) as error:
        tiny_config(**(changes | {'diffusion': diffusion}))
    assert '\n' not in str(error.value)


def test_only_consistency_models_have_their_sampler():
    with pytest.raises(UserError, match=r'evaluation.sampler: consistency .* found edm'):
        tiny_config(diffusion={'objective': 'edm'}, evaluation={'sampler': 'consistency'})


def tuning(path, **changes):
    """A short run that tunes the network in a file."""
    diffusion = {'objective': 'consistency', 'consistency_of': 'edm', 'edm_std': 2.0}
    model = {'num_classes': 0, 'label_dropout': 0.0, 'dropout': 0.25}
    changes = {'diffusion': diffusion, 'model': model, 'init_from': str(path)} | changes
    changes['parallel'] = {'devices': 1}
    return tiny_config(**changes)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'objective': 'epsilon'}, 'needs a network that predicts edm, found epsilon'),
        ({'objective': 'flow'}, 'needs a network that predicts edm, found flow'),
        (
            {'objective': 'edm', 'edm_sigma_data': 0.25},
            'diffusion.edm_sigma_data: expected 0.25, with which .* was trained, found 0.5',
        ),
        ({}, 'consistency tunes a trained network: set init_from'),
    ],
)
def test_other_weights_are_refused(tmp_path, fields, message):
    path = ''
    if fields:
        path = tmp_path / 'teacher.safetensors'
        teacher = tuning('').replace(diffusion={'consistency_of': '', **fields})
        write_weights(path, fresh_state(teacher).params, teacher)
        assert config_at(str(path)) == teacher
    with pytest.raises(UserError, match=message) as error:
        load_initial(tuning(path))
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({}, ''),
        ({'schedule': 'linear'}, 'diffusion.schedule: expected cosine, .* found linear; leave it'),
        ({'steps': 500}, 'diffusion.steps: expected 100, with which .* found 500; leave it out'),
    ],
)
def test_networks_of_v_are_tuned_with_their_own_schedule(changes, message, tmp_path):
    path = tmp_path / 'teacher.safetensors'
    fields = {'objective': 'v', 'schedule': 'cosine', 'steps': 100, 'rescale_timesteps': True}
    none = {'num_classes': 0, 'label_dropout': 0.0}
    teacher = tiny_config(diffusion=fields, model=none)
    params = fresh_state(teacher).params
    write_weights(path, params, teacher)
    named = {**TUNES, 'init_from': str(path), 'train.steps': 2}
    named |= {f'diffusion.{name}': value for name, value in changes.items()}
    start = init_from_config(recipe('digits', **named), None)
    named['data.path'] = 'digits:'
    config = complete(for_tuning(recipe('digits', **named), None, start, named))
    d = config.diffusion
    assert (d.prediction, d.v_mean, d.v_std, d.time_scale) == ('v', -1.1, 2.0, 1000 / d.steps)
    check_used(config)
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        jax.tree.map(np.testing.assert_array_equal, load_initial(config).params, params)
    with pytest.raises(UserError, match=r'predicts v, .*, found v and the variance$'):
        for_tuning(
            recipe('digits', **named), None, start.replace(diffusion={'learn_sigma': True}), named
        )


def test_a_run_resumes_bit_for_bit(tmp_path, source, caplog):
    path = tmp_path / 'teacher.safetensors'
    teacher = tuning('').replace(diffusion={'objective': 'edm', 'consistency_of': ''})
    params = jax.tree.map(np.asarray, fresh_state(teacher).params)
    write_weights(path, params, teacher)
    config = tuning(path, train={'steps': 4, 'checkpoint_every': 1, 'keep': 4})
    with caplog.at_level('INFO', logger='absl'):
        initial = load_initial(config)
    assert 'tuned: the prediction of edm, for consistency' in caplog.text
    jax.tree.map(np.testing.assert_array_equal, initial.params, params)
    train(config, tmp_path / 'whole', source, initial)
    train(config.replace(train={'steps': 2}), tmp_path / 'parts', source, initial)
    train(config, tmp_path / 'parts', source, None)
    whole, parts = (checkpoint.read(tmp_path / name) for name in ('whole', 'parts'))
    jax.tree.map(np.testing.assert_array_equal, parts.state, whole.state)
    assert int(whole.state.step) == 4
    assert whole.config == config
    assert (whole.state.params['conv_out']['kernel'] != params['conv_out']['kernel']).any()
    stored = resolve(json.loads(json.dumps(to_dict(whole.config))))
    assert (stored.diffusion.objective, stored.diffusion.prediction) == ('consistency', 'edm')
