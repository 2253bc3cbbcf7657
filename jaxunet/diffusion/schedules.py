"""The noise schedules of the objectives with timesteps, t = 0..T−1.

Timestep t = 0 is the least noisy; step t of the papers is t − 1 here.

Sources: DDPM, Ho et al. 2020, arXiv 2006.11239; IDDPM, Nichol & Dhariwal 2021, arXiv 2102.09672
(openai/guided-diffusion).
"""

from __future__ import annotations

import functools
import math

import numpy as np
from jaxtyping import Float64

from jaxunet.config.schema import FACTS
from jaxunet.runtime.errors import UserError


def make_betas(schedule: str, steps: int) -> Float64[np.ndarray, ' steps']:
    """Returns the β of every timestep, shape (T,).

    Args:
      schedule: `linear` (DDPM section 4: 1e-4 to 0.02, scaled by 1000/T as in guided-diffusion) or
        `cosine` (IDDPM eq. 17, at most 0.999).
      steps: T.

    Raises:
      UserError: an unknown schedule, or fewer steps than the schedule needs.
    """
    if steps < 1:
        raise UserError(f'diffusion.steps: expected 1 or more, found {steps}')
    if schedule == 'linear':
        scale = 1000 / steps
        if scale * 0.02 >= 1:
            raise UserError(
                f'diffusion.steps: the linear schedule needs more than 20 steps, found {steps} '
                '(its last beta, 0.02 * 1000 / steps, must stay below 1); '
                'use more steps or diffusion.schedule=cosine'
            )
        return np.linspace(scale * 1e-4, scale * 0.02, steps, dtype=np.float64)
    if schedule == 'cosine':
        offset = 0.008
        time = np.arange(steps + 1, dtype=np.float64) / steps
        f = np.cos((time + offset) / (1 + offset) * (math.pi / 2)) ** 2
        return np.minimum(1 - f[1:] / f[:-1], 0.999)
    raise UserError(f'diffusion.schedule: {FACTS["diffusion.schedule"].problem(schedule)}')


@functools.cache
def log_sigmas(schedule: str, steps: int) -> Float64[np.ndarray, ' steps']:
    """Returns ln σ of every timestep, σ = √((1 − ᾱ)/ᾱ), shape (T,), ascending.

    Raises:
      UserError: as `make_betas`.
    """
    alphas_cumprod = np.cumprod(1 - make_betas(schedule, steps))
    found = 0.5 * np.log((1 - alphas_cumprod) / alphas_cumprod)
    found.flags.writeable = False
    return found
