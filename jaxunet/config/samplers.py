"""The samplers: names, usual numbers of steps, and which one suits a model."""

from __future__ import annotations

from typing import NamedTuple

from jaxunet.config.run_sections import SUITS
from jaxunet.config.schema import CHOICES, Config

SAMPLERS = tuple(name for name in CHOICES['evaluation.sampler'] if name)
# The sampler that suits an objective (docs/results.md, "Recipes").
OBJECTIVE_SAMPLERS = {
    'epsilon': 'ddpm',
    'x0': 'ddpm',
    'v': 'dpmpp_2m',
    'edm': 'dpmpp_2m',
    'flow': 'heun',
    'consistency': 'consistency',
}
# The noise levels σ of `consistency`: that of the first evaluation, and those of the others by the
# number of evaluations. 0.821 is ECT's; those of larger images are the best of some that were tried
# (docs/few_steps.md, "Noise levels of the samples").
FIRST_LEVEL = 80.0
CONSISTENCY_LEVELS = {1: (), 2: (0.821,), 3: (2.5, 0.5), 4: (5.0, 1.1, 0.4)}
LEVELS_BY_SIDE = {  # by the fewest pixels of the shorter side
    0: CONSISTENCY_LEVELS,
    32: {1: (), 2: (2.0,), 3: (8.0, 2.0), 4: (12.0, 4.0, 1.5)},
    64: {1: (), 2: (3.0,), 3: (5.0, 1.0), 4: CONSISTENCY_LEVELS[4]},
}
# Usual steps. ddpm takes every timestep of a model, and 250 steps if it has none (edm, flow).
DEFAULT_STEPS = {'ddim': 50, 'dpmpp_2m': 20, 'unipc': 20, 'heun': 20, 'consistency': 2}
CONTINUOUS_STEPS = {**DEFAULT_STEPS, 'ddpm': 250}
DDPM_STEPS = 50  # of ddpm while a model trains


def samplers_of(objective: str) -> tuple[str, ...]:
    """Returns the samplers that draw with models of an objective."""
    tuned = objective == 'consistency'
    return tuple(name for name in SAMPLERS if (name == 'consistency') == tuned)


def usual_levels(steps: int, side: int) -> tuple[float, ...]:
    """Returns σ of the evaluations of `consistency` after the first, highest first.

    Args:
      side: pixels of the image's shorter side.
    """
    return LEVELS_BY_SIDE[max(least for least in LEVELS_BY_SIDE if least <= side)][steps]


class Choice(NamedTuple):
    """A sampler.

    Fields:
      steps: sampling steps; None = every timestep.
    """

    name: str
    steps: int | None

    @property
    def text(self) -> str:
        """The sampler in words."""
        return f'{self.name} in {self.steps or "all"} steps'


def grid_sampler(config: Config) -> Choice:
    """Returns the sampler of the sample grids while training: that of the objective.

    It takes `train.sample_steps` steps; 0 = its usual number, or `DDPM_STEPS` of ddpm.
    """
    return _while_training(config, '', config.train.sample_steps or None)


def evaluation_sampler(config: Config) -> Choice:
    """Returns the sampler that `config.evaluation` stands for.

    Where the section names no sampler or no number of steps, they are those of the sample grids.
    """
    evaluation = config.evaluation
    if evaluation.steps == 0:
        name = _while_training(config, evaluation.sampler, None).name
        return Choice(name, CONTINUOUS_STEPS[name] if config.diffusion.continuous else None)
    steps = None if evaluation.steps == SUITS else evaluation.steps
    return _while_training(config, evaluation.sampler, steps)


def _while_training(config: Config, name: str, steps: int | None) -> Choice:
    """Fills in the sampler ('') and its number of steps (None).

    The same sampler serves from the first grid to the last, so that they differ by the weights
    alone. ddpm suits epsilon and x0 from the first minutes on, in which a network leaves noise
    behind that the other samplers add up; later heun draws a little better.
    """
    sampler = name or OBJECTIVE_SAMPLERS[config.diffusion.objective]
    if steps is None:
        steps = DEFAULT_STEPS.get(sampler, DDPM_STEPS)
        if not config.diffusion.continuous:
            steps = min(steps, config.diffusion.steps)
    return Choice(sampler, steps)
