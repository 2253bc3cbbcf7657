"""diffusers' `scheduler_config.json`: our diffusion process in its schedulers, and the reverse.

A scheduler states the process that a network was trained for beside options of one sampler. Only
the process is taken over.

    objective         scheduler
    epsilon, x0, v    DDPMScheduler, prediction_type epsilon, sample, v_prediction; with a learned
                      variance variance_type=learned_range
    flow              FlowMatchEulerDiscreteScheduler, shift 1
    consistency       CMStochasticIterativeScheduler, of networks that predict edm; its levels from
                      sigma_max to sigma_min are spaced by rho, so that two steps visit ours
    edm               none: EDMEulerScheduler gives the network ln(σ)/4, ours reads 250 ln(σ), and
                      the frequencies of UNet2DModel's time embedding are constants

Source: huggingface/diffusers 0.42.1, `schedulers/`; rho is that of Karras et al. 2022, eq. 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxunet.config import Config
from jaxunet.config.samplers import FIRST_LEVEL, usual_levels
from jaxunet.config.schema import Fields
from jaxunet.diffusion.levels import TIME_SCALE
from jaxunet.diffusion.schedules import make_betas
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import NUMBER, check_fields, shown
from jaxunet.weights.diffusers import VERSION
from jaxunet.weights.diffusers_config import expect

PREDICTIONS = {'epsilon': 'epsilon', 'x0': 'sample', 'v': 'v_prediction'}
SCHEDULES = {'linear': 'linear', 'cosine': 'squaredcos_cap_v2'}
CONSISTENCY = 'CMStochasticIterativeScheduler'
JUMPS = 1001  # its timesteps; the second of two steps is half way, at timestep 500
# Its network is the image itself at sigma_min, ours at 0.
LOWEST = 1e-6
LOWEST_READ = 1e-4
FLOW = ('FlowMatchEulerDiscreteScheduler', 'FlowMatchHeunDiscreteScheduler')
# Schedulers of one process, whose config states it in the same fields.
DISCRETE = (
    'DDPMScheduler',
    'DDIMScheduler',
    'PNDMScheduler',
    'DPMSolverMultistepScheduler',
    'DPMSolverSinglestepScheduler',
    'DEISMultistepScheduler',
    'UniPCMultistepScheduler',
    'EulerDiscreteScheduler',
    'EulerAncestralDiscreteScheduler',
    'HeunDiscreteScheduler',
    'LMSDiscreteScheduler',
)
DEFAULTS: dict[str, Any] = {
    'num_train_timesteps': 1000,
    'beta_start': 0.0001,
    'beta_end': 0.02,
    'beta_schedule': 'linear',
    'prediction_type': 'epsilon',
}
ADVICE = 'give the whole folder of a diffusion model of images'
TOLERANCE = 1e-4  # of betas, relative; schedulers compute in float32


def process_problems(config: Config) -> Iterator[str]:
    """Yields `field: reason` for every field of the process that no scheduler has."""
    diffusion = config.diffusion
    if diffusion.objective == 'edm':
        scale = diffusion.edm_time_scale
        yield 'diffusion.objective: expected epsilon, x0, v or flow, found edm' + (
            ', whose scheduler is not among those that are written'
            if scale == 1
            else ': EDMEulerScheduler gives a network ln(sigma)/4, and the network here reads '
            f"{scale:g} times that, for which UNet2DModel's time embedding has no factor"
        )
    elif diffusion.objective == 'consistency' and diffusion.consistency_of != 'edm':
        yield (
            f'diffusion.consistency_of: expected edm, found {diffusion.consistency_of}, which '
            f'{CONSISTENCY} does not have'
        )
    elif diffusion.objective == 'consistency' and diffusion.time_scale != 1:
        yield (
            'diffusion.edm_time_scale: expected 1000 with diffusion.objective=consistency, found '
            f'{diffusion.edm_time_scale:g}'
        )
    elif diffusion.continuous and diffusion.learn_sigma:
        yield f'diffusion.learn_sigma: expected False with {diffusion.objective}, found True'


def scheduler_config(config: Config) -> dict[str, Any]:
    """Returns the `scheduler_config.json` of a config's diffusion process.

    Args:
      config: passed `process_problems`.
    """
    diffusion = config.diffusion
    if diffusion.objective == 'consistency':
        (level,) = usual_levels(2, min(config.data.image_size))
        return {
            '_class_name': CONSISTENCY,
            '_diffusers_version': VERSION,
            'num_train_timesteps': JUMPS,
            'sigma_min': LOWEST,
            'sigma_max': FIRST_LEVEL,
            'sigma_data': diffusion.edm_sigma_data,
            's_noise': 1.0,
            'rho': _rho(level),
            'clip_denoised': True,
        }
    if diffusion.continuous:
        return {
            '_class_name': FLOW[0],
            '_diffusers_version': VERSION,
            'num_train_timesteps': TIME_SCALE,
            'shift': 1.0,
        }
    linear, scale = diffusion.schedule == 'linear', 1000 / diffusion.steps
    return {
        '_class_name': DISCRETE[0],
        '_diffusers_version': VERSION,
        'num_train_timesteps': diffusion.steps,
        'beta_schedule': SCHEDULES[diffusion.schedule],
        **({'beta_start': scale * 1e-4, 'beta_end': scale * 0.02} if linear else {}),
        'prediction_type': PREDICTIONS[diffusion.objective],
        'variance_type': 'learned_range' if diffusion.learn_sigma else 'fixed_small',
        'clip_sample': True,
        # Both begin with the last timestep. DDIM steps only along `trailing` to timesteps that it
        # visits; the steps of a learned variance end at timestep 0, as here.
        'timestep_spacing': 'linspace' if diffusion.learn_sigma else 'trailing',
    }


def _rho(level: float) -> float:
    """Returns the rho with which this σ is half way from `FIRST_LEVEL` to `LOWEST`."""
    low, high = 1.0, 64.0  # half way falls with rho, from 40
    for _ in range(60):
        rho = (low + high) / 2
        middle = ((FIRST_LEVEL ** (1 / rho) + LOWEST ** (1 / rho)) / 2) ** rho
        low, high = (rho, high) if middle > level else (low, rho)
    return low


def process_fields(scheduler: Mapping[str, Any], *, learned: bool, source: str) -> Fields:
    """Returns the fields of `diffusion` that a `scheduler_config.json` states.

    Args:
      learned: the network predicts a variance, too.

    Raises:
      UserError: a process that is not implemented here.
    """
    kind = scheduler.get('_class_name')
    if learned and kind in (*FLOW, CONSISTENCY):
        raise UserError(
            f'{source}: _class_name: {kind} has no learned variance, but the network has twice as '
            'many output channels as input channels'
        )
    if kind in FLOW:
        values = {'num_train_timesteps': TIME_SCALE, 'invert_sigmas': False} | dict(scheduler)
        expect(source, 'num_train_timesteps', values['num_train_timesteps'], (TIME_SCALE,))
        expect(source, 'invert_sigmas', values['invert_sigmas'], (False,))
        return {'objective': 'flow', 'steps': TIME_SCALE, 'schedule': 'linear'}  # the defaults
    if kind == CONSISTENCY:
        return _consistency_fields(scheduler, source)
    expect(source, '_class_name', kind, (*DISCRETE, *FLOW, CONSISTENCY))
    values = DEFAULTS | dict(scheduler)
    kinds: dict[str, Any] = {name: type(value) for name, value in DEFAULTS.items()}
    kinds |= {'beta_start': NUMBER, 'beta_end': NUMBER}
    check_fields(values, kinds, source, advice=ADVICE)
    expect(source, 'prediction_type', values['prediction_type'], tuple(PREDICTIONS.values()))
    for name, ours in (('rescale_betas_zero_snr', False), ('timestep_type', 'discrete')):
        expect(source, name, values.get(name, ours), (ours,))
    variance = values.get('variance_type', 'fixed_small')
    if learned or variance in ('learned', 'learned_range'):
        wanted = ('learned_range',) if learned else ('fixed_small', 'fixed_large')
        expect(source, 'variance_type', variance, wanted)
    predicted = values['prediction_type']
    return {
        'objective': next(ours for ours, name in PREDICTIONS.items() if name == predicted),
        'steps': values['num_train_timesteps'],
        'schedule': _schedule(values, source),
    }


def _consistency_fields(scheduler: Mapping[str, Any], source: str) -> Fields:
    defaults = {'sigma_min': 0.002, 'sigma_max': 80.0, 'sigma_data': 0.5, 's_noise': 1.0}
    values = defaults | dict(scheduler)
    check_fields(values, dict.fromkeys(defaults, NUMBER), source, advice=ADVICE)
    expect(source, 'sigma_max', values['sigma_max'], (FIRST_LEVEL,))
    expect(source, 's_noise', values['s_noise'], (1,))
    if not 0 <= values['sigma_min'] <= LOWEST_READ:
        raise UserError(
            f'{source}: sigma_min: expected at most {LOWEST_READ:g}, found '
            f'{values["sigma_min"]:g}; here a consistency model is the image itself without noise'
        )
    return {
        'objective': 'consistency',
        'consistency_of': 'edm',
        'edm_sigma_data': float(values['sigma_data']),
        'edm_time_scale': float(TIME_SCALE),
        'steps': TIME_SCALE,
        'schedule': 'linear',
    }


def _schedule(values: Mapping[str, Any], source: str) -> str:
    """Returns our name of the noise schedule."""
    steps, given = values['num_train_timesteps'], values.get('trained_betas')
    if not 1 <= steps <= 10**6:
        raise UserError(f'{source}: num_train_timesteps: expected 1 or more, found {shown(steps)}')
    if given is not None:
        numbers = isinstance(given, list) and all(isinstance(beta, NUMBER) for beta in given)
        for name in SCHEDULES if numbers and len(given) == steps > 20 else ():
            if _close(given, make_betas(name, steps)):
                return name
        raise UserError(
            f'{source}: trained_betas: expected those of the linear or cosine schedule, or null; '
            f'found {shown(given)}'
        )
    expect(source, 'beta_schedule', values['beta_schedule'], tuple(SCHEDULES.values()))
    if values['beta_schedule'] == SCHEDULES['cosine']:
        return 'cosine'
    for name, ours in (('beta_start', 0.1 / steps), ('beta_end', 20 / steps)):
        if not _close(values[name], ours):
            raise UserError(
                f'{source}: {name}: expected {ours:g} for {steps} timesteps (linear from 1e-4 to '
                f'0.02, times 1000/T), found {values[name]:g}'
            )
    return 'linear'


def _close(found: Any, ours: Any) -> bool:
    return bool(np.allclose(np.asarray(found, np.float64), ours, rtol=TOLERANCE, atol=0))
