"""The options of a sampling run: their defaults and the combinations that make sense."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxunet.config import Config
from jaxunet.config.consistency import check_guidance
from jaxunet.config.samplers import (
    CONSISTENCY_LEVELS,
    CONTINUOUS_STEPS,
    DEFAULT_STEPS,
    FIRST_LEVEL,
    OBJECTIVE_SAMPLERS,
    SAMPLERS,
    samplers_of,
)
from jaxunet.diffusion.levels import SPACINGS
from jaxunet.diffusion.process import Diffusion
from jaxunet.runtime.errors import UserError, near_misses

VARIANCES = ('fixed_small', 'fixed_large', 'learned')
DEFAULT_SKIP_SCHEDULES = {
    'ddpm': 'linear',
    'ddim': 'linear',
    'dpmpp_2m': 'log_snr',
    'unipc': 'log_snr',
    'heun': 'karras',
}


# Repositories whose scripts' defaults `as_peer` gives.
PEERS = ('guided_diffusion', 'ddpm_torch')
DDPM_TORCH_STEPS = 10  # default of its DDIM
# Options that only some samplers have.
OWNERS = {
    'eta': ('ddim', 'dpmpp_2m'),
    'variance': ('ddpm',),
    'churn': ('heun',),
    'churn_range': ('heun',),
    'churn_noise': ('heun',),
    'lower_order_below': ('dpmpp_2m',),
    'levels': ('consistency',),
}


@dataclass(frozen=True)
class SamplerConfig:
    """The options of a sampling run.

    None stands for the default of the chosen sampler. Setting an option that the sampler does not
    have is an error.
    """

    # ddpm: ancestral sampling | ddim | dpmpp_2m: DPM-Solver++(2M) | unipc: UniPC of order 2 |
    # heun: EDM's second-order sampler, with 2 · steps − 1 evaluations of the network |
    # consistency: of consistency models, at most 4 steps. None: that of the model's objective
    # (OBJECTIVE_SAMPLERS), with its usual number of steps.
    name: str | None = None
    # None: every timestep of the model, or CONTINUOUS_STEPS if it has none.
    steps: int | None = None
    # ddim and dpmpp_2m, in [0, 1]: 0 is deterministic (default), 1 adds as much noise as ddpm with
    # fixed_small, or as SDE-DPM-Solver++(2M).
    eta: float | None = None
    # Quantity with a uniform stride where steps are skipped: t (linear) | √t (quadratic) |
    # log σ (log_snr) | σ^(1/7) (karras). Defaults: linear for ddpm and ddim, log_snr for dpmpp_2m
    # and unipc, karras for heun; edm: karras, or log_snr; flow: linear, or log_snr too, and karras
    # with churn. Not for consistency, which has levels.
    skip_schedule: str | None = None
    # ddpm only: fixed_small | fixed_large | learned; default learned if the model has it, else
    # fixed_small.
    variance: str | None = None
    # Classifier-free guidance: 0 unconditional, 1 conditional; larger values exaggerate the class.
    guidance_scale: float = 1.0
    # Range of noise-to-signal ratios σ, lowest (exclusive) and highest, in which guidance acts;
    # None = all.
    guidance_range: tuple[float, float] | None = None
    clip: bool = True  # clip the predicted x_0 to [−1, 1]
    churn: float | None = None  # heun only: EDM's S_churn, 0 or more; 0 is deterministic (default)
    # heun only: EDM's S_tmin and S_tmax, the range of σ with churn; default all.
    churn_range: tuple[float, float] | None = None
    churn_noise: float | None = None  # heun only: EDM's S_noise, factor of that noise; default 1
    # dpmpp_2m only: the fewest steps with a second-order step to the lowest noise level; 0 = always
    # second order; default solvers.FEW_STEPS.
    lower_order_below: int | None = None
    # consistency only: σ of the evaluations after the first, which is at 80; falling. Default by
    # the steps and the size of the images (jaxunet.config.samplers.usual_levels).
    levels: tuple[float, ...] | None = None
    # guided-diffusion's timestep_respacing, such as '250', '10,20,30' or 'ddim50', or ddpm-torch's
    # 'linear50' and 'quadratic50'; replaces steps and skip_schedule.
    respacing: str | None = None
    # The timesteps to visit; replaces steps, skip_schedule and respacing.
    timesteps: tuple[int, ...] | None = None
    # Cut pixels down to whole numbers, as guided-diffusion and ddpm-torch do, instead of rounding.
    truncate: bool | None = None


def as_peer(config: SamplerConfig, peer: str, diffusion: Diffusion) -> SamplerConfig:
    """Returns the options with the defaults of another repository where none are given.

    Args:
      peer: a name of `PEERS`.

    Raises:
      UserError: a sampler or an objective that these repositories do not have, or more steps than
        the model has.
    """
    if diffusion.continuous:
        raise UserError(
            f'like: {peer} has no models with diffusion.objective={diffusion.objective}; '
            'leave it out'
        )
    name = config.name or 'ddpm'
    if name not in ('ddpm', 'ddim'):
        raise UserError(f'like: {peer} has the samplers ddpm and ddim, found {name}; leave it out')
    truncate = True if config.truncate is None else config.truncate
    config = dataclasses.replace(config, name=name, truncate=truncate)
    if name == 'ddpm' and not diffusion.learn_sigma and config.variance is None:
        config = dataclasses.replace(config, variance='fixed_large')
    spacing = config.skip_schedule or 'linear'
    listed = config.respacing is not None or config.timesteps is not None
    if (
        peer == 'ddpm_torch'
        and name == 'ddim'
        and spacing in ('linear', 'quadratic')
        and not listed
    ):
        steps = config.steps or min(DDPM_TORCH_STEPS, diffusion.steps)
        if steps > diffusion.steps:
            raise UserError(
                f'steps: expected 1 to {diffusion.steps}, the number of steps that the model was '
                f'trained with, found {steps}'
            )
        respacing = f'{spacing}{steps}'
        return dataclasses.replace(config, respacing=respacing, steps=None, skip_schedule=None)
    return config


def check_can_be_guided(config: Config, scale: float, option: str) -> None:
    """Raises `UserError` if a scale needs an unconditional model that was not trained.

    Args:
      option: the option that gave the scale, for messages.
    """
    if scale != 1 and config.model.num_classes and config.model.label_dropout == 0:
        raise UserError(
            f'{option}: the model was trained with every label (model.label_dropout=0) '
            'and cannot be guided; leave it at 1'
        )


def usual_steps(name: str | None, diffusion: Diffusion) -> int | None:
    """Returns the steps of a sampler that is named without them; None = its own default."""
    if name is None or diffusion.continuous:
        return None
    return min(DEFAULT_STEPS.get(name, diffusion.steps), diffusion.steps)


def resolve_options(
    config: SamplerConfig, diffusion: Diffusion, num_classes: int, *, weaker: bool = False
) -> SamplerConfig:
    """Checks the options against the model and fills in the defaults.

    Args:
      num_classes: number of classes of the model; 0 = unconditional.
      weaker: a weaker model guides the samples, which needs no classes.

    Raises:
      UserError: an invalid value, or an option that this sampler or model does not support.
    """
    if config.name is None:
        config = dataclasses.replace(config, name=OBJECTIVE_SAMPLERS[diffusion.objective])
        free = config.steps is None and config.respacing is None and config.timesteps is None
        if free and config.name in DEFAULT_STEPS:
            config = dataclasses.replace(config, steps=usual_steps(config.name, diffusion))
    name = config.name
    assert name is not None
    _check_sampler(config, name, samplers_of(diffusion.objective))
    _check_consistency(config, name, diffusion)
    variance = resolve_variance(config.variance, diffusion)
    _check_solver(config)
    _check_guidance(config, can_be_guided=weaker or num_classes > 0)
    _check_one_spacing(config)
    if diffusion.continuous:
        config = _continuous(config, name, diffusion)
    respaced = config.respacing is not None or config.timesteps is not None
    steps = diffusion.steps if config.steps is None else config.steps
    schedule = config.skip_schedule or DEFAULT_SKIP_SCHEDULES.get(name)
    return dataclasses.replace(
        config,
        steps=None if respaced else steps,
        skip_schedule=None if respaced else schedule,
        eta=(config.eta or 0.0) if name == 'ddim' else config.eta or None,
        variance=variance if name == 'ddpm' else None,
        churn=(config.churn or 0.0) if name == 'heun' else None,
        churn_noise=(config.churn_noise or 1.0) if config.churn else None,
        truncate=config.truncate or None,
    )


def resolve_variance(variance: str | None, diffusion: Diffusion) -> str:
    """Returns the variance of DDPM's steps; None = learned if the model has it, else fixed_small.

    Raises:
      UserError: the model has no learned variance.
    """
    if variance == 'learned' and not diffusion.learn_sigma:
        raise UserError(
            'variance: learned needs a model with diffusion.learn_sigma=True, '
            'which this one does not have; use fixed_small or fixed_large'
        )
    return variance or ('learned' if diffusion.learn_sigma else 'fixed_small')


def _check_one_spacing(config: SamplerConfig) -> None:
    """Checks that at most one of timesteps, respacing and (steps, skip_schedule) is given."""
    given = {
        'timesteps': None if config.timesteps is None else ','.join(map(str, config.timesteps)),
        'respacing': config.respacing,
    }
    for first, others in (
        ('timesteps', ('respacing', 'steps', 'skip_schedule')),
        ('respacing', ('steps', 'skip_schedule')),
    ):
        for other in others if given[first] is not None else ():
            if (value := getattr(config, other)) is not None:
                raise UserError(
                    f'{first}: {given[first]!r} already determines the steps, '
                    f'found {other}={value} beside it; leave one of them out'
                )


def _continuous(config: SamplerConfig, name: str, diffusion: Diffusion) -> SamplerConfig:
    """Fills in the steps and the spacing of an objective without timesteps."""
    for option in ('timesteps', 'respacing'):
        if (value := getattr(config, option)) is None:
            continue
        raise UserError(
            f'{option}: {value!r} picks timesteps, which a model with '
            f'diffusion.objective={diffusion.objective} does not have; use steps'
        )
    if name == 'consistency':
        steps = CONTINUOUS_STEPS[name] if config.levels is None else len(config.levels) + 1
        return dataclasses.replace(config, steps=config.steps or steps)
    allowed = SPACINGS[diffusion.objective]
    schedule = DEFAULT_SKIP_SCHEDULES[name] if name in ('dpmpp_2m', 'unipc') else allowed[0]
    if config.churn:  # raises σ, which must be finite
        schedule = DEFAULT_SKIP_SCHEDULES['heun']
        if config.skip_schedule in ('linear', 'quadratic'):
            raise UserError(
                'churn: raises noise levels in σ, but skip_schedule='
                f'{config.skip_schedule} begins at pure noise, where σ is infinite; '
                'use karras or log_snr'
            )
    return dataclasses.replace(
        config,
        steps=CONTINUOUS_STEPS[name] if config.steps is None else config.steps,
        skip_schedule=config.skip_schedule or schedule,
    )


def _check_consistency(config: SamplerConfig, name: str, diffusion: Diffusion) -> None:
    """Checks that a consistency model, and no other, has its sampler, and that this has levels."""
    if name not in (known := samplers_of(diffusion.objective)):
        raise UserError(
            f'sampler: expected {" or ".join(known)}, as the model has '
            f'diffusion.objective={diffusion.objective}, found {name}'
        )
    if name != 'consistency':
        return
    most, levels = max(CONSISTENCY_LEVELS), config.levels
    if levels is not None:
        falling = (FIRST_LEVEL, *levels, 0.0)
        if not all(high > low for high, low in itertools.pairwise(falling)):
            raise UserError(
                f'levels: expected falling noise levels below {FIRST_LEVEL:g} and above 0, such as '
                f'3, found {", ".join(f"{level:g}" for level in levels)}'
            )
        if config.steps not in (None, len(levels) + 1):
            raise UserError(
                f'steps: expected {len(levels) + 1}, one more than levels, found {config.steps}; '
                'leave one of them out'
            )
    elif config.steps is not None and not 1 <= config.steps <= most:
        raise UserError(
            f'steps: expected 1 to {most}, as many as sampler=consistency has noise levels for, '
            f'found {config.steps}; or give the levels'
        )
    if config.skip_schedule is not None:
        raise UserError(
            f'skip_schedule: {config.skip_schedule} spaces noise levels, of which '
            'sampler=consistency has few; leave it out, or set levels'
        )
    folded = diffusion.config.consistency_guidance
    check_guidance(config.guidance_scale, 'guidance_scale', folded)


def _check_sampler(config: SamplerConfig, name: str, usable: Sequence[str]) -> None:
    """Checks the sampler's name, the options that belong to other samplers, eta and variance.

    Args:
      usable: samplers that the model can have, for messages.
    """
    eta, variance = config.eta, config.variance
    if name not in SAMPLERS:
        raise UserError(
            f'sampler: expected one of {", ".join(SAMPLERS)}, '
            f'found {name!r}{near_misses(name, SAMPLERS)}'
        )
    for option, owners in OWNERS.items():
        value = getattr(config, option)
        if value is not None and name not in owners:
            those = ' or '.join(f'sampler={owner}' for owner in owners)
            other = f', or use {those}' if set(owners) <= set(usable) else ''
            raise UserError(
                f'{option}: only {those} has it, found {option}={value} with sampler={name}; '
                f'leave {option} out{other}'
            )
    if eta is not None and not 0 <= eta <= 1:
        raise UserError(
            f'eta: expected 0 (deterministic) to 1 (as much noise as ddpm), found {eta}'
        )
    if variance is not None and variance not in VARIANCES:
        raise UserError(
            f'variance: expected one of {", ".join(VARIANCES)}, '
            f'found {variance!r}{near_misses(variance, VARIANCES)}'
        )


def _check_solver(config: SamplerConfig) -> None:
    churn = config.churn
    if churn is not None and not (math.isfinite(churn) and churn >= 0):
        raise UserError(f'churn: expected 0 (deterministic) or more, found {churn}')
    noise, below = config.churn_noise, config.lower_order_below
    if below is not None and below < 0:
        raise UserError(f'lower_order_below: expected 0 (never) or more, found {below}')
    if noise is not None and not (math.isfinite(noise) and noise > 0):
        raise UserError(f'churn_noise: expected more than 0, found {noise}')
    if noise is not None and not churn:
        raise UserError(
            f'churn_noise: {noise} has no meaning without churn; '
            'set churn to more than 0, or leave churn_noise out'
        )
    if config.churn_range is None:
        return
    low, high = config.churn_range
    if not 0 <= low < high:
        raise UserError(
            f'churn_range: expected two noise levels, 0 <= lowest < highest, found {low}, {high}'
        )
    if not churn:
        raise UserError(
            f'churn_range: {low}, {high} has no meaning without churn; '
            'set churn to more than 0, or leave churn_range out'
        )


def _check_guidance(config: SamplerConfig, *, can_be_guided: bool) -> None:
    scale, limits = config.guidance_scale, config.guidance_range
    if limits is not None and not 0 <= limits[0] < limits[1]:
        raise UserError(
            'guidance_range: expected two noise levels, 0 <= lowest < highest, found '
            f'{limits[0]}, {limits[1]}'
        )
    if limits is not None and scale == 1:
        raise UserError(
            f'guidance_range: {limits[0]}, {limits[1]} has no meaning without guidance; '
            'set guidance_scale, or leave guidance_range out'
        )
    if not (math.isfinite(scale) and scale >= 0):
        raise UserError(f'guidance_scale: expected 0 or more, found {scale}')
    if scale != 1 and not can_be_guided:
        raise UserError(
            f'guidance_scale: {scale} needs a class-conditional model, '
            'this one has model.num_classes=0; leave it at 1, or give a guide'
        )
