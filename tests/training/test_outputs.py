"""The outputs of a run: which sampler draws its grids."""

from __future__ import annotations

import pytest
from support.tiny import tiny_config

from jaxunet.diffusion.process import make_diffusion
from jaxunet.sampling.options import OBJECTIVE_DEFAULTS
from jaxunet.sampling.sampler import make_sampler
from jaxunet.training.outputs import grid_sampler

# Objective -> sampler and its evaluations of the network for a grid.
SAMPLERS = {
    'epsilon': ('ddpm', 50),
    'x0': ('ddpm', 50),
    'v': ('dpmpp_2m', 20),
    'edm': ('dpmpp_2m', 20),
    'flow': ('heun', 39),
}


def sampler_of(steps, sample_steps, objective):
    config = tiny_config(
        diffusion={'objective': objective, 'steps': steps}, train={'sample_steps': sample_steps}
    )
    return make_sampler(grid_sampler(config), make_diffusion(config.diffusion), num_classes=10)


@pytest.mark.parametrize('objective', OBJECTIVE_DEFAULTS)
def test_the_sampler_of_the_objective(objective):
    """Every objective has one, with few enough evaluations to draw a grid while training."""
    name, evaluations = SAMPLERS[objective]
    sampler = sampler_of(1000, 0, objective)
    assert (sampler.config.name, sampler.evaluations) == (name, evaluations)
    given = sampler_of(1000, 7, objective)
    assert (given.config.name, given.config.steps) == (name, 7)


def test_a_model_of_few_timesteps():
    assert sampler_of(40, 0, 'epsilon').evaluations == 40
