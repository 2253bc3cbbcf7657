"""Options of samplers: defaults, lists of timesteps, other repositories' choices, and messages."""

import dataclasses
import math

import numpy as np
import pytest
from support.diffusion import process

from jaxunet.runtime.errors import UserError
from jaxunet.sampling import sampler as s
from jaxunet.sampling.options import as_peer


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (
            {'name': 'dpm'},
            r'sampler: expected one of ddpm, ddim, dpmpp_2m, unipc, heun, consistency, found '
            r'\'dpm\'; did you mean "ddpm"',
        ),
        ({'steps': 0}, r'steps: expected 1 to 1000, .* found 0'),
        ({'steps': 1001}, r'steps: expected 1 to 1000, .* found 1001'),
        ({'eta': 0.0}, r'eta: only sampler=ddim or sampler=dpmpp_2m has it, found eta=0.0 with'),
        ({'name': 'ddim', 'eta': 1.5}, r'eta: expected 0 .* to 1 .*, found 1.5'),
        ({'name': 'ddim', 'eta': -0.1}, r'eta: .* found -0.1'),
        ({'name': 'ddim', 'eta': math.nan}, r'eta: .* found nan'),
        ({'name': 'ddim', 'variance': 'fixed_small'}, r'variance: only sampler=ddpm has it'),
        (
            {'variance': 'small'},
            r'variance: expected one of fixed_small, fixed_large, learned, found \'small\'',
        ),
        (
            {'variance': 'learned'},
            r'variance: learned needs a model with diffusion.learn_sigma=True',
        ),
        (
            {'skip_schedule': 'quad'},
            r'skip_schedule: expected one of linear, quadratic, log_snr, karras, found \'quad\'',
        ),
        (
            {'name': 'unipc', 'eta': 0.0},
            r'eta: only sampler=ddim or sampler=dpmpp_2m has it, found eta=0.0 with sampler=unipc',
        ),
        ({'name': 'ddim', 'churn': 1.0}, r'churn: only sampler=heun has it'),
        ({'name': 'ddim', 'churn_range': (0.0, 1.0)}, r'churn_range: only sampler=heun has it'),
        ({'name': 'heun', 'churn': -1.0}, r'churn: expected 0 .* or more, found -1.0'),
        ({'name': 'heun', 'churn': math.inf}, r'churn: .* found inf'),
        (
            {'name': 'heun', 'churn': 1.0, 'churn_range': (2.0, 1.0)},
            r'churn_range: .* lowest < highest, found 2.0, 1.0',
        ),
        ({'name': 'heun', 'churn_range': (1.0, 2.0)}, r'churn_range: .* no meaning without churn'),
        ({'name': 'heun', 'churn_noise': 1.01}, r'churn_noise: .* no meaning without churn'),
        ({'name': 'heun', 'churn': 1.0, 'churn_noise': 0.0}, r'churn_noise: .* found 0.0'),
        ({'name': 'ddim', 'churn_noise': 1.0}, r'churn_noise: only sampler=heun has it'),
        (
            {'name': 'heun', 'lower_order_below': 9},
            r'lower_order_below: only sampler=dpmpp_2m .*; leave .* out, or use sampler=dpmpp_2m$',
        ),
        ({'levels': (3.0,)}, r'levels: only sampler=consistency .*=ddpm; leave levels out$'),
        ({'name': 'dpmpp_2m', 'lower_order_below': -1}, r'lower_order_below: .* found -1'),
        ({'steps': 10, 'respacing': '10'}, r'respacing: .* found steps=10 beside it'),
        (
            {'skip_schedule': 'linear', 'respacing': '10'},
            r'respacing: .* found skip_schedule=linear beside it',
        ),
        (
            {'timesteps': (0, 5), 'steps': 2},
            r"timesteps: '0,5' already determines the steps, found steps=2 beside it",
        ),
        ({'timesteps': (0, 5), 'respacing': '10'}, r'timesteps: .* found respacing=10 beside it'),
        ({'timesteps': (0, 1000)}, r'timesteps: expected numbers from 0 .* to 999, .* found 1000'),
        ({'timesteps': (0, 5, 0)}, r'timesteps: 0 is given twice'),
        ({'timesteps': ()}, r'timesteps: expected one or more, such as 0,20,40, found none'),
        ({'guidance_scale': -1.0}, r'guidance_scale: expected 0 or more, found -1.0'),
        ({'guidance_scale': math.inf}, r'guidance_scale: expected 0 or more, found inf'),
        ({'guidance_scale': 2.0}, r'guidance_scale: 2.0 needs a class-conditional model'),
        (
            {'guidance_range': (0.1, 1.0)},
            r'guidance_range: 0.1, 1.0 has no meaning without guidance; set guidance_scale',
        ),
        (
            {'guidance_scale': 2.0, 'guidance_range': (1.0, 0.1)},
            r'guidance_range: .* lowest < highest, found 1.0, 0.1',
        ),
        (
            {'name': 'consistency'},
            r'sampler: expected ddpm or ddim or .* or heun, .*epsilon, found consistency',
        ),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UserError, match=message):
        s.make_sampler(s.SamplerConfig(**options), process())


def test_defaults_depend_on_sampler_and_model():
    assert s.make_sampler(s.SamplerConfig(), process()).config == s.SamplerConfig(
        name='ddpm', steps=1000, skip_schedule='linear', variance='fixed_small'
    )
    heun = s.SamplerConfig('heun', steps=9, skip_schedule='karras', churn=0.0)
    assert s.make_sampler(s.SamplerConfig('heun', steps=9), process()).config == heun
    learned = process(learn_sigma=True)
    assert s.make_sampler(s.SamplerConfig(steps=5), learned).config.variance == 'learned'
    assert (
        s.make_sampler(
            s.SamplerConfig('ddim', guidance_scale=2.0), learned, num_classes=10
        ).config.guidance_scale
        == 2.0
    )


def test_timesteps_by_hand():
    """A list of steps is a process of its own: the ᾱ of the visited timesteps, as in respacing."""
    listed = s.make_sampler(s.SamplerConfig('ddim', timesteps=(999, 0, 500)), process())
    assert listed.timesteps.tolist() == [999, 500, 0]
    by_hand = s.make_sampler(s.SamplerConfig(timesteps=tuple(range(1000))), process())
    every = s.make_sampler(s.SamplerConfig(), process())
    for name in ('timesteps', 'state', 'x0', 'noise', 'memory', 'draw'):
        found, expected = (getattr(x.coefficients, name) for x in (by_hand, every))
        np.testing.assert_array_equal(found, expected)
    assert by_hand.config.steps is by_hand.config.skip_schedule is None


@pytest.mark.parametrize(
    ('peer', 'given', 'learned', 'expected'),
    [
        ('guided_diffusion', {}, False, {'name': 'ddpm', 'variance': 'fixed_large', 'steps': 1000}),
        ('guided_diffusion', {}, True, {'name': 'ddpm', 'variance': 'learned', 'steps': 1000}),
        ('guided_diffusion', {'variance': 'fixed_small'}, False, {'variance': 'fixed_small'}),
        ('guided_diffusion', {'name': 'ddim', 'steps': 25}, False, {'steps': 25, 'eta': 0.0}),
        ('ddpm_torch', {}, False, {'variance': 'fixed_large', 'steps': 1000}),
        ('ddpm_torch', {'name': 'ddim'}, False, {'respacing': 'linear10', 'steps': None}),
        (
            'ddpm_torch',
            {'name': 'ddim', 'steps': 20, 'skip_schedule': 'quadratic'},
            False,
            {'respacing': 'quadratic20', 'skip_schedule': None},
        ),
        ('ddpm_torch', {'truncate': False}, False, {'truncate': None}),
    ],
)
def test_defaults_of_other_repositories(peer, given, learned, expected):
    diffusion = process(learn_sigma=learned)
    config = as_peer(s.SamplerConfig(**given), peer, diffusion)
    resolved = dataclasses.asdict(s.make_sampler(config, diffusion).config)
    assert {name: resolved[name] for name in expected} == expected
    if 'truncate' not in given:
        assert resolved['truncate'] is True


def test_defaults_of_ddpm_torch_for_a_model_of_few_steps():
    few = process(steps=8, schedule='cosine')
    config = as_peer(s.SamplerConfig('ddim'), 'ddpm_torch', few)
    np.testing.assert_array_equal(
        s.make_sampler(config, few).coefficients.timesteps, range(8)[::-1]
    )


def test_defaults_that_other_repositories_do_not_have():
    with pytest.raises(UserError, match='has the samplers ddpm and ddim, found heun'):
        as_peer(s.SamplerConfig('heun'), 'guided_diffusion', process())
    with pytest.raises(UserError, match=r'has no models with diffusion\.objective=flow'):
        as_peer(s.SamplerConfig(), 'ddpm_torch', process(objective='flow'))
    with pytest.raises(UserError, match=r'^steps: expected 1 to 1000, the number .*, found 1001$'):
        as_peer(s.SamplerConfig('ddim', steps=1001), 'ddpm_torch', process())
    with pytest.raises(UserError, match=r'timesteps: \(0, 5\) picks timesteps, which a model with'):
        s.make_sampler(s.SamplerConfig('ddim', timesteps=(0, 5)), process(objective='flow'))
