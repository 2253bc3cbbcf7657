"""Fields that belong to another choice than the config's."""

import dataclasses

import pytest
from absl import logging

from jaxunet.config import CHOICES, Config, LossConfig, TimestepsConfig
from jaxunet.config.unused import check_used, owners
from jaxunet.runtime.errors import UserError

POLICY = Config().replace(timesteps={'sampler': 'policy', 'adaptive_bins': 64})
ADAPTIVE = Config().replace(timesteps={'sampler': 'adaptive', 'adaptive_bins': 64})


@pytest.mark.parametrize(
    ('section', 'chooser', 'fields'),
    [('loss', 'weighting', LossConfig), ('timesteps', 'sampler', TimestepsConfig)],
)
def test_every_field_belongs_to_a_choice(section, chooser, fields):
    names = {field.name for field in dataclasses.fields(fields)} - {chooser}
    found = {choice for name in names for choice in owners()[f'{section}.{name}']}
    assert found <= {(f'{section}.{chooser}', choice) for choice in CHOICES[f'{section}.{chooser}']}


def test_fields_of_an_objective():
    names = {path.partition('.')[2] for path in owners() if path.startswith('diffusion.')}
    objectives = {
        'edm_mean',
        'edm_std',
        'edm_sigma_data',
        'flow_mean',
        'flow_std',
        'v_mean',
        'v_std',
    }
    consistency = {f'consistency_{name}' for name in ('of', 'q', 'stages', 'c', 'guidance')}
    assert names == {*objectives, *consistency, 'edm_time_scale', 'vlb_weight'}


def test_a_field_of_another_sampler_is_refused():
    with pytest.raises(UserError) as error:
        check_used(POLICY)
    assert str(error.value) == (
        'the config is not valid: timesteps.adaptive_bins: 64 has no effect: it belongs to '
        'timesteps.sampler=adaptive, found policy; leave it out'
    )


@pytest.mark.parametrize(
    ('section', 'fields', 'needed'),
    [
        ('loss', {'weighting': 'soft_min_snr', 'min_snr_gamma': 3.0}, 'loss.weighting=min_snr'),
        ('loss', {'soft_min_snr_sigma': 0.3}, 'loss.weighting=soft_min_snr'),
        ('timesteps', {'history': 3}, 'timesteps.sampler=loss_second_moment'),
        ('timesteps', {'speed_k': 2.0}, 'timesteps.sampler=speed'),
        ('diffusion', {'objective': 'edm', 'flow_std': 2.0}, 'diffusion.objective=flow'),
        ('diffusion', {'objective': 'v', 'v_std': 1.0}, 'diffusion.consistency_of=v'),
        (
            'diffusion',
            {'objective': 'consistency', 'consistency_of': 'edm', 'flow_std': 2.0},
            'diffusion.objective=flow',
        ),
        ('diffusion', {'consistency_c': 0.1}, 'diffusion.objective=consistency'),
        ('diffusion', {'vlb_weight': 0.1}, 'diffusion.learn_sigma=True'),
        (
            'diffusion',
            {'vlb_weight': 0.1, 'learn_sigma': True, 'kl_loss': True},
            'diffusion.kl_loss=False',
        ),
    ],
)
def test_the_message_names_the_choice(section, fields, needed):
    with pytest.raises(UserError, match=f'it belongs to {needed}, found '):
        check_used(Config().replace(**{section: fields}))


def test_fields_with_an_effect_and_defaults_pass():
    check_used(Config())
    check_used(ADAPTIVE)
    check_used(Config().replace(loss={'weighting': 'p2', 'p2_k': 2.0, 'p2_gamma': 0.5}))
    levels = {'edm_mean': -1.1, 'edm_std': 2.0, 'consistency_q': 4}
    tunes = {'objective': 'consistency', 'consistency_of': 'edm'}
    check_used(Config().replace(diffusion=tunes | levels))
    check_used(Config().replace(diffusion={'learn_sigma': True, 'vlb_weight': 0.1}))


def test_a_value_may_serve_one_of_several_configs():
    check_used(POLICY, ADAPTIVE)
    with pytest.raises(UserError, match='64 has no effect'):
        check_used(POLICY, ADAPTIVE.replace(timesteps={'adaptive_bins': 16}))


def test_a_run_that_began_with_the_value_goes_on(monkeypatch):
    said = []
    monkeypatch.setattr(logging, 'warning', lambda text, *values: said.append(text % values))
    check_used(POLICY, earlier=[POLICY])
    assert len(said) == 1
    assert 'timesteps.adaptive_bins: 64 has no effect' in said[0]
    with pytest.raises(UserError, match='adaptive_bins: 65'):
        check_used(POLICY.replace(timesteps={'adaptive_bins': 65}), earlier=[POLICY])


@pytest.mark.parametrize(
    ('fields', 'taken'),
    [({'steps': 0}, 1000), ({'steps': 1000}, 1000), ({'steps': 1, 'sampler': 'ddim'}, 1)],
)
def test_a_spacing_of_timesteps_where_none_are_skipped(fields, taken):
    config = Config().replace(evaluation={'skip_schedule': 'quadratic', **fields})
    with pytest.raises(UserError) as error:
        check_used(config)
    assert str(error.value) == (
        f'the config is not valid: evaluation.skip_schedule: quadratic has no effect on {taken} of '
        '1000 timesteps; leave it out, or set evaluation.steps to 2 to 999'
    )
    check_used(config, earlier=[config])
    check_used(config, config.replace(evaluation={'steps': 50}))


def test_spacings_that_skip_timesteps_or_have_none_pass():
    check_used(Config().replace(evaluation={'skip_schedule': 'linear'}))  # the usual 50 steps
    check_used(Config().replace(evaluation={'steps': 0}))
    noise_levels = {'diffusion': {'objective': 'edm'}, 'evaluation': {'skip_schedule': 'log_snr'}}
    check_used(Config().replace(**noise_levels).replace(evaluation={'steps': 0}))
    with pytest.raises(UserError, match='karras has no effect on 40 of 40 timesteps'):
        check_used(
            Config().replace(diffusion={'steps': 40}, evaluation={'skip_schedule': 'karras'})
        )
