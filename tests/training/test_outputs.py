"""The sampler that draws the grids of a run and the samples that are measured."""

from __future__ import annotations

import pytest
from support.tiny import tiny_config

from jaxunet.config.samplers import OBJECTIVE_SAMPLERS, evaluation_sampler, grid_sampler
from jaxunet.config.samplers import SAMPLERS as SAMPLER_NAMES
from jaxunet.diffusion.process import make_diffusion
from jaxunet.sampling.options import SamplerConfig
from jaxunet.sampling.sampler import make_sampler

# Objective -> sampler and its evaluations of the network.
SAMPLERS = {
    'epsilon': ('ddpm', 50),
    'x0': ('ddpm', 50),
    'v': ('dpmpp_2m', 20),
    'edm': ('dpmpp_2m', 20),
    'flow': ('heun', 39),
    'consistency': ('consistency', 2),
}


def made(choice, config):
    """The sampler of a choice for the model of a config."""
    return make_sampler(SamplerConfig(*choice), make_diffusion(config.diffusion), num_classes=10)


def fields(objective):
    """The section diffusion of an objective."""
    tunes = objective == 'consistency'
    return {'objective': objective} | ({'consistency_of': 'edm'} if tunes else {})


def samplers(objective, timesteps=1000, **evaluation):
    """The samplers of the grids and of the evaluations."""
    config = tiny_config(
        diffusion=fields(objective) | {'steps': timesteps},
        train={'sample_steps': 0},
        evaluation=evaluation,
    )
    return made(grid_sampler(config), config), made(evaluation_sampler(config), config)


@pytest.mark.parametrize('objective', OBJECTIVE_SAMPLERS)
def test_the_sampler_of_the_objective(objective):
    """Every objective has one, with few enough evaluations to draw samples while training."""
    expected = SAMPLERS[objective]
    for sampler in samplers(objective):
        assert (sampler.config.name, sampler.evaluations) == expected
    config = tiny_config(
        diffusion=fields(objective),
        train={'sample_steps': 4},
        evaluation={'steps': 3},
    )
    assert grid_sampler(config) == (expected[0], 4)
    assert evaluation_sampler(config) == (expected[0], 3)


def test_a_model_of_few_timesteps():
    assert [sampler.evaluations for sampler in samplers('epsilon', 40)] == [40, 40]


def test_a_named_sampler_of_the_evaluations():
    """Takes its usual number of steps, or every timestep with 0."""
    for name, usual in {'ddpm': 50, 'ddim': 50, 'dpmpp_2m': 20, 'heun': 20}.items():
        grids, evaluations = samplers('v', sampler=name)
        assert (grids.config.name, grids.config.steps) == ('dpmpp_2m', 20)
        assert (evaluations.config.name, evaluations.config.steps) == (name, usual)
        _, evaluations = samplers('v', 100, sampler=name, steps=0)
        assert evaluations.config.steps == 100


@pytest.mark.parametrize('name', SAMPLER_NAMES)
def test_every_timestep_of_a_model_that_has_none(name):
    """The steps that a run tells (`--dry_run`) are those that it takes."""
    objective = 'consistency' if name == 'consistency' else 'flow'
    diffusion, evaluation = fields(objective), {'sampler': name, 'steps': 0}
    config = tiny_config(diffusion=diffusion, evaluation=evaluation)
    choice = evaluation_sampler(config)
    assert choice == (name, made(choice, config).config.steps)
    unnamed = made((name, None), config)
    assert unnamed.evaluations == made(choice, config).evaluations
