"""Config: defaults are valid, mistakes are all named, files and flags agree with the schema."""

import json
import re

import pytest
from support.configs import CONFIGS, load

from jaxunet.config import CHOICES, Config, default_config, diff, identity, resolve, to_dict
from jaxunet.config.fields import POSITIVE, Facts
from jaxunet.config.samplers import OBJECTIVE_SAMPLERS
from jaxunet.config.schema import FACTS
from jaxunet.data.automatic import complete
from jaxunet.diffusion.process import make_diffusion
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.options import SamplerConfig, resolve_options


@pytest.mark.parametrize('path', CONFIGS, ids=lambda p: p.stem)
def test_config_files_resolve(path):
    values = load(path)
    values.data.path = values.data.path or 'digits:'
    config = complete(values)
    assert f'--config configs/{path.name}' in path.read_text()  # its docstring gives the command
    assert resolve(json.loads(json.dumps(to_dict(config)))) == config  # as checkpoints store it


def test_fields_added_later_with_their_defaults_identify_nothing():
    stored = json.loads(json.dumps(to_dict(Config())))
    assert identity(to_dict(Config()))['ema'] == {'rates': (0.995,), 'warmup': True}
    assert identity(stored)['ema'] == {'rates': [0.995], 'warmup': True}
    evaluation = identity(to_dict(Config()))['evaluation']
    assert (evaluation['sampler'], evaluation['steps']) == ('ddim', 50)
    wide = Config().replace(ema={'widths': (0.05,)})
    assert identity(to_dict(wide))['ema']['widths'] == (0.05,)


def test_default_config_has_the_defaults_of_the_schema():
    assert resolve(default_config()) == Config()


WRONG = [
    ({'seeed': 1}, r'seeed: unknown field; did you mean "seed"'),
    ({'see\x7fd': 1}, r'see\\x7fd: unknown field; did you mean "seed"'),
    (
        {'model': {'base_chanels': 1}},
        r'model.base_chanels: unknown field; did you mean "base_channels"',
    ),
    ({'model': 3}, r'model: expected a section .* found 3'),
    ({'seed': 'a'}, r"seed: expected int, found 'a' \(str\)"),
    ({'seed': -1}, r'seed: expected 0 to 4294967295, found -1'),
    ({'seed': True}, r'seed: expected int, found True'),
    *(
        (
            {'model': {'channel_mult': (1, number)}},
            rf'model.channel_mult\[1\]: expected a finite number of float32, found {found}',
        )
        for number, found in (
            (1e308, r'1e\+308'),
            (float('nan'), 'nan'),
            (-float('inf'), '-inf'),
            (2**200, 'a number of 201 bits'),
        )
    ),
    (
        {'diffusion': {'edm_mean': float('nan')}},
        'diffusion.edm_mean: expected a finite number of float32, found nan',
    ),
    (
        {'backend': 'pallas+adam=cuda'},
        r'backend: expected pallas\+OP=BACKEND with one of conv3x3, .*, adamw, found '
        r'.adam=cuda.; did you mean "adamw"',
    ),
    (
        {'backend': 'pallas+adamw=pallas'},
        r'backend: adamw: expected one of xla, cuda, found .pallas.',
    ),
    ({'backend': 'cuda+attention=xla+attention=xla'}, r'backend: attention is given twice'),
    (
        {'backend': 'xls'},
        r'backend: expected one of auto, xla, pallas, cuda, found .xls.; did you mean "xla"',
    ),
    ({'precision': 'bf16'}, r'precision: expected one of float32, bfloat16, float16'),
    (
        {'train': {'holdout_every': 50}},
        r'train.holdout_every: 50 needs images held out of training; set data.holdout, or this',
    ),
    (
        {'data': {'holdout': 9}, 'train': {'holdout_every': 30}},
        r'train.holdout_every: 30 is not a multiple of train.log_every \(25\)',
    ),
    ({'data': {'holdout': -3}}, r'data.holdout: expected 0 or more, found -3'),
    (
        {'data': {'holdout': 2.5}},
        r'data.holdout: expected a whole number of images or a share below 1, found 2.5',
    ),
    ({'parallel': {'mode': 'ddp'}}, r'parallel.mode: expected one of jit, pmap'),
    ({'parallel': {'devices': -2}}, r'parallel.devices: expected 0 or more'),
    ({'model': {'channel_mult': ()}}, r'model.channel_mult: expected at least one level'),
    (
        {'model': {'channel_mult': 2}},
        r'model.channel_mult: expected a tuple, found 2; write \(2,\)',
    ),
    ({'model': {'channel_mult': (1, 'x')}}, r"model.channel_mult\[1\]: expected float, found 'x'"),
    ({'model': {'channel_mult': (1, -1)}}, r'model.channel_mult: expected more than 0, found -1'),
    ({'model': {'base_channels': 20}}, r'20 channels, not a multiple of model.norm_groups \(32\)'),
    (
        {'model': {'base_channels': 1, 'norm_groups': 1, 'num_head_channels': 1}},
        r'model.base_channels: expected 2 or more, as the sine .*, found 1',
    ),
    (
        {'model': {'attention_resolutions': (5,)}},
        r'model.attention_resolutions: expected some of \[8, 4\], .* found 5',
    ),
    ({'model': {'num_heads': 4}}, r'model.num_heads, model.num_head_channels: set exactly one'),
    ({'model': {'num_heads_upsample': 4}}, r'model.num_heads_upsample: 4 needs model.num_heads'),
    (
        {'model': {'num_head_channels': 48}},
        r'model.num_head_channels: 48 does not divide the 64 channels of level 1',
    ),
    ({'model': {'dropout': 1.0}}, r'model.dropout: expected 0, or more than .*, found 1.0'),
    (
        {'model': {'dropout': 1e-6}},
        r'dropout: expected 0, or more than 2⁻¹⁷ \(7.6e-06\) and less than 1 − 2⁻¹⁷, found 1e-06',
    ),
    ({'model': {'num_classes': 0}}, r'model.label_dropout: 0.1 needs model.num_classes > 0'),
    (
        {'model': {'norm_eps': float('nan')}},
        r'model.norm_eps: expected a finite number of float32, found nan',
    ),
    ({'model': {'conv_resample': 1}}, r'model.conv_resample: expected bool, found 1'),
    (
        {'evaluation': {'metrics': ('fdi',)}},
        r'evaluation.metrics: expected some of fid, .*, found .fdi.; did you mean "fid"',
    ),
    (
        {'evaluation': {'metrics': ()}},
        r'evaluation.metrics: expected one or more, each once, found none',
    ),
    (
        {'evaluation': {'metrics': ('fid', 'fid')}},
        r'evaluation.metrics: expected one or more, each once, found fid, fid',
    ),
    (
        {'train': {'evaluate_every': 1}, 'evaluation': {'steps': 1001}},
        r'evaluation.steps: 1001 is more than diffusion.steps \(1000\)',
    ),
    (
        {'diffusion': {'objective': 'v'}, 'evaluation': {'variance': 'fixed_large'}},
        r'evaluation.variance: fixed_large needs evaluation.sampler=ddpm, found .* dpmpp_2m for',
    ),
    (
        {'evaluation': {'sampler': 'ddim', 'variance': 'fixed_large', 'metrics': ('fid', 'fid')}},
        r'evaluation.variance: fixed_large needs evaluation.sampler=ddpm, found ddim',
    ),
    (
        {'evaluation': {'sampler': 'ddpm', 'eta': 0.5}},
        r'evaluation.eta: 0.5 needs evaluation.sampler=ddim or dpmpp_2m, found ddpm',
    ),
    (
        {'model': {'num_classes': 0, 'label_dropout': 0.0}, 'evaluation': {'guidance_scale': 4.0}},
        r'evaluation.guidance_scale: 4.0 needs a model with classes',
    ),
    ({'evaluation': {'skip_schedule': 'cosine'}}, r'evaluation.skip_schedule: expected one of '),
    (
        {'evaluation': {'sampler': 'dpm'}},
        r'evaluation.sampler: expected one of \'\', ddpm, ddim, dpmpp_2m, unipc, heun',
    ),
    ({'evaluation': {'steps': -2}}, r'evaluation.steps: expected -1 or more, found -2'),
    ({'train': {'evaluate_every': -1}}, r'train.evaluate_every: expected 0 or more'),
    ({'diffusion': {'schedule': 'cosin'}}, r'did you mean "cosine"'),
    ({'diffusion': {'steps': 0}}, r'diffusion.steps: expected more than 0'),
    (
        {'data': {'image_size': (9,)}},
        r'data.image_size: 9x9 must be divisible by 2, as model.channel_mult has 2 levels',
    ),
    (
        {'data': {'image_size': (8, 8, 3)}},
        r'data.image_size: expected \(side,\) or \(height, width\)',
    ),
    ({'data': {'image_size': 8}}, r'data.image_size: expected a tuple, found 8; write \(8,\)'),
    ({'data': {'batch_size': 0}}, r'data.batch_size: expected more than 0'),
    (
        {'data': {'classes': tuple('abcdefghijk')}},
        r'data.classes: 11 names for model.num_classes=10',
    ),
    ({'optimizer': {'betas': (0.9,)}}, r'optimizer.betas: expected two numbers'),
    (
        {'optimizer': {'accumulate_steps': 3}},
        r'data.batch_size: 64 is not a multiple of optimizer.accumulate_steps \(3\)',
    ),
    (
        {'train': {'steps_per_call': 8}},
        r'train.log_every: 25 is not a multiple of train.steps_per_call \(8\)',
    ),
    (
        {'optimizer': {'name': 'adam', 'weight_decay': 0.1}},
        r'optimizer.weight_decay: 0.1 has no effect with optimizer.name=adam',
    ),
    (
        {'optimizer': {'learning_rate': float('inf')}},
        r'optimizer.learning_rate: expected a finite number of float32, found inf',
    ),
    ({'ema': {'rates': ()}}, r'ema.rates: expected at least one rate'),
    ({'ema': {'rates': (0.9, 0.9)}}, r'ema.rates: expected distinct rates'),
    ({'ema': {'widths': (0.05, 0.05)}}, r'ema.widths: expected distinct widths'),
    ({'ema': {'widths': (0.29,)}}, r'ema.widths: expected less than 0.2887'),
    ({'ema': {'widths': (0.0,)}}, r'ema.widths: expected more than 0, found 0.0'),
    (
        {'ema': {'rates': (0.2,), 'widths': (0.05,)}},
        r'ema.rates: 0.2 could be mistaken for a width by --ema',
    ),
    ({'ema': {'snapshot_every': 5}}, r'ema.snapshot_every: 5 needs ema.widths'),
    (
        {
            'ema': {'widths': (0.1,), 'snapshot_every': 30},
            'train': {'steps_per_call': 25, 'checkpoint_every': 400},
        },
        r'ema.snapshot_every: 30 is not a multiple of train.steps_per_call \(25\)',
    ),
    (
        {'train': {'keep_every': 401}},
        r'train.keep_every: 401 is not a multiple of .* \(400\)',
    ),
    ({'train': {'keep_best': 1}}, r'train.keep_best: needs a checkpoint at every evaluation'),
    (
        {'train': {'keep_best': 1, 'evaluate_every': 600}},
        r'train.keep_best: needs .* a multiple of train.checkpoint_every \(400\), found 600',
    ),
    ({'train': {'keep': 0}}, r'train.keep: expected more than 0'),
    (
        {'diffusion': {'steps': 20}},
        r'diffusion.steps: the linear schedule needs more than 20, found 20',
    ),
    (
        {'diffusion': {'steps': 24, 'schedule': 'cosine'}, 'timesteps': {'sampler': 'speed'}},
        r'timesteps.sampler: speed needs diffusion.steps of 25 or more, found 24',
    ),
    (
        {
            'diffusion': {'steps': 1, 'schedule': 'cosine'},
            'timesteps': {'sampler': 'policy', 'policy_probes': 1},
        },
        r'timesteps.sampler: policy needs diffusion.steps of 2 or more, found 1',
    ),
    (
        {'diffusion': {'steps': 2, 'schedule': 'cosine'}, 'loss': {'weighting': 'speed'}},
        r'loss.weighting: speed needs diffusion.steps of 3 or more, found 2',
    ),
    (
        {'diffusion': {'steps': 10, 'schedule': 'cosine'}, 'train': {'sample_steps': 50}},
        r'train.sample_steps: 50 is more than diffusion.steps \(10\)',
    ),
    (
        {'model': {'image_channels': 2}},
        r'model.image_channels: sample grids need 1 \(grey\) or 3 \(RGB\), found 2; other channels',
    ),
]


@pytest.mark.parametrize('sampler', ['ddim', 'dpmpp_2m'])
def test_evaluations_take_eta_with_the_samplers_that_have_it(sampler):
    evaluation = {'sampler': sampler, 'steps': 4, 'eta': 0.5}
    config = resolve(to_dict(Config().replace(evaluation=evaluation)))
    how = SamplerConfig(name=sampler, steps=4, eta=config.evaluation.eta)
    assert resolve_options(how, make_diffusion(config.diffusion), 0).eta == 0.5


@pytest.mark.parametrize(
    ('values', 'message'), WRONG, ids=[re.sub(r'\W+', '-', str(v)) for v, _ in WRONG]
)
def test_mistakes_are_named(values, message):
    merged = to_dict(Config())
    for name, value in values.items():
        merged[name] = merged[name] | value if isinstance(value, dict) else value
    with pytest.raises(UserError, match=message):
        resolve(merged)


def test_all_mistakes_at_once():
    with pytest.raises(UserError) as error:
        resolve({'seed': 'x', 'model': {'dropout': 'y'}, 'nope': 1})
    assert len(str(error.value).splitlines()) == 4


def test_a_single_mistake_is_one_line():
    with pytest.raises(UserError) as error:
        resolve({'train': {'epochs': -1.0}})
    expected = 'the config is not valid: train.epochs: expected 0 or more, found -1.0'
    assert str(error.value) == expected


def test_what_is_no_config():
    for value in (3, None):
        with pytest.raises(
            UserError, match=f'the config: expected the ConfigDict .*found {value}$'
        ):
            resolve(value)


def test_names_that_are_numbers():
    assert resolve({'data': {'classes': [7, '1']}}).data.classes == ('7', '1')


def test_what_a_field_refers_to_is_a_field():
    for path, facts in FACTS.items():
        assert dict(facts.belongs_to).keys() <= FACTS.keys(), path
    assert set(CHOICES['diffusion.objective']) == set(OBJECTIVE_SAMPLERS)


@pytest.mark.parametrize(
    ('facts', 'value', 'problem'),
    [
        (Facts(POSITIVE), 0, 'expected more than 0, found 0'),
        (Facts(POSITIVE), 2**31, 'expected at most 2147483647, found 2147483648'),
        (Facts(POSITIVE, limit=9), 9.5, 'expected at most 9, found 9.5'),
        (Facts(POSITIVE), 1e30, None),
        (Facts(choices=('', 'a')), 'b', "expected one of '', a, found 'b'"),
        (Facts(), 'b', None),
        (Facts(), True, None),
    ],
)
def test_a_value_is_held_against_the_facts(facts, value, problem):
    assert facts.problem(value) == problem


def test_locked_config_file_names_near_misses():
    with pytest.raises(AttributeError, match='base_channels'):
        default_config().model.base_channel = 3


def test_diff():
    old, new = Config(), Config().replace(train={'steps': 9}, seed=4)
    assert diff(old, new) == ['seed: 0 -> 4', f'train.steps: {old.train.steps} -> 9']
