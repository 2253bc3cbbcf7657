"""The timesteps that a sampler visits where it does not visit all.

Sources: respacing, Nichol & Dhariwal 2021, arXiv 2102.09672 (openai/guided-diffusion), and
tqch/ddpm-torch; the spacings, see `timestep_subset`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.sampling.solvers import Alphas, Subset, noise_to_signal

SKIP_SCHEDULES = ('linear', 'quadratic', 'log_snr', 'karras')
RHO = 7  # ρ of EDM eq. 5
# Highest σ of the schedules in σ: EDM's table 1, and λ = −5.1, at which DPM-Solver's code truncates
# the cosine schedule. Noisier timesteps contain almost nothing of the image, but the cosine
# schedule's σ reaches 20,000 and would take most of a small number of steps.
HIGHEST = {'karras': 80.0, 'log_snr': float(np.exp(5.1))}


def timestep_subset(alphas_cumprod: Alphas, steps: int, skip_schedule: str) -> Subset:
    """Returns `steps` distinct timesteps of 0..T−1, ascending.

    The first is 0 (if there are two or more) and the last T − 1. With `log_snr` and `karras` the
    last is the noisiest with σ at most 164 or 80, if enough timesteps lie below it.

    Args:
      steps: number of timesteps.
      skip_schedule: the quantity with a uniform stride, as far as distinct integers allow:
        `linear`: t (IDDPM section 4); `quadratic`: √t (DDIM appendix D.2); `log_snr`: log σ (Lu et
        al. section 6); `karras`: σ^(1/7) (EDM eq. 5).

    Raises:
      UserError: `steps` outside 1..T, or an unknown schedule.
    """
    total = len(alphas_cumprod)
    if skip_schedule not in SKIP_SCHEDULES:
        allowed, hint = ', '.join(SKIP_SCHEDULES), near_misses(skip_schedule, SKIP_SCHEDULES)
        raise UserError(f'skip_schedule: expected one of {allowed}, found {skip_schedule!r}{hint}')
    if not 1 <= steps <= total:
        raise UserError(
            f'steps: expected 1 to {total}, the number of steps that the model was trained with, '
            f'found {steps}'
        )
    if steps == 1:
        return np.array([total - 1], np.int32)  # from pure noise to the image
    if skip_schedule == 'linear':
        return uniform_stride(total, steps)
    index = np.arange(steps, dtype=np.int64)
    if skip_schedule == 'quadratic':
        wanted = np.rint(index**2 * (total - 1) / (steps - 1) ** 2).astype(np.int64)
    else:
        sigmas = noise_to_signal(alphas_cumprod)
        total = max(int(np.searchsorted(sigmas, HIGHEST[skip_schedule], side='right')), steps)
        level = (
            np.log(sigmas[:total]) if skip_schedule == 'log_snr' else sigmas[:total] ** (1 / RHO)
        )
        wanted = np.rint(
            np.interp(np.linspace(level[0], level[-1], steps), level, np.arange(total))
        ).astype(np.int64)
    # Makes the sequence strictly increasing by moving values up, then down where the end requires.
    increasing = np.maximum.accumulate(wanted - index) + index
    return np.minimum(increasing, total - steps + index).astype(np.int32)


def uniform_stride(total: int, steps: int) -> Subset:
    """Returns `steps` of 0..total−1 with a uniform stride, the first of them 0; ascending.

    The stride is added up in float64 and the sums are rounded, halves to even. Multiples of the
    stride would differ from guided-diffusion's `space_timesteps` where a sum lies near a half.
    """
    stride = (total - 1) / (steps - 1) if steps > 1 else 1.0
    return np.rint(np.cumsum([0.0] + [stride] * (steps - 1))).astype(np.int32)


def respaced_timesteps(alphas_cumprod: Alphas, respacing: str) -> Subset:
    """Returns the timesteps that other repositories take from a process, ascending.

    The subsets are those of `space_timesteps` in guided-diffusion, or, with 'linearN' and
    'quadraticN', of `get_selection_schedule` in ddpm-torch.

    Args:
      respacing: 'A,B,...' divides 0..T−1 into equal sections and takes A, B, ... timesteps from
        them, with uniform stride from a section's first timestep to its last (a single timestep is
        the first). 'ddimN' takes every k-th timestep from 0, with the smallest k that gives N;
        'linearN' every ⌊T/N⌋-th, which may be more than N; 'quadraticN' the squares of N numbers
        with a uniform stride from 0 to √(0.8 T), rounded, each once.

    Raises:
      UserError: text of another form, more timesteps than there are, or no such k.
    """
    total = len(alphas_cumprod)
    if (subset := _ddpm_torch_subset(total, respacing)) is not None:
        return subset
    number = respacing.removeprefix('ddim')
    if respacing != number and number.isdecimal():
        for stride in range(1, total + 1):
            if len(range(0, total, stride)) == int(number):
                return np.arange(0, total, stride, dtype=np.int32)
        raise UserError(
            f'respacing: no whole stride takes {number} of {total} steps, found {respacing!r}; '
            'use steps, which takes any number'
        )
    counts = respacing.split(',')
    if not all(count.strip().isdecimal() and int(count) > 0 for count in counts):
        raise UserError(
            "respacing: expected numbers of steps such as '250' or '10,20,30', or 'ddim50', "
            f"'linear50' or 'quadratic50', found {respacing!r}"
        )
    sections: list[Integer[np.ndarray, ' section']] = []
    for section, count in zip(
        np.array_split(np.arange(total), len(counts)), map(int, counts), strict=True
    ):
        if count > len(section):
            raise UserError(
                f'respacing: {count} steps from a section of {len(section)} '
                f'({total} steps in {len(counts)} sections), found {respacing!r}'
            )
        sections.append(section[uniform_stride(len(section), count)])
    return np.concatenate(sections).astype(np.int32)


def _ddpm_torch_subset(total: int, respacing: str) -> Subset | None:
    """Returns the timesteps of 'linearN' and 'quadraticN'; None for other text."""
    kind = respacing.rstrip('0123456789')
    if kind not in ('linear', 'quadratic') or kind == respacing:
        return None
    count = int(respacing.removeprefix(kind))
    if not 1 <= count <= total:
        raise UserError(
            f'respacing: expected {kind}N with N of 1 to {total}, the number of steps that the '
            f'model was trained with, found {respacing!r}'
        )
    if kind == 'linear':
        return np.arange(0, total, total // count, dtype=np.int32)
    # A timestep that comes twice changes nothing the second time: the step leads to itself.
    # In float32, as there: it decides where a square lies at a half.
    squares = np.linspace(0, np.sqrt(0.8 * total), count, dtype=np.float32) ** 2
    return np.unique(np.rint(squares).astype(np.int32))


def check_timesteps(alphas_cumprod: Alphas, timesteps: Sequence[int]) -> Subset:
    """Returns these timesteps in ascending order.

    Raises:
      UserError: none, one given twice, or one outside 0..T−1.
    """
    total = len(alphas_cumprod)
    if not timesteps:
        raise UserError('timesteps: expected one or more, such as 0,20,40, found none')
    for t in timesteps:
        if not 0 <= t < total:
            raise UserError(
                f'timesteps: expected numbers from 0 (the image) to {total - 1}, as the model was '
                f'trained with {total}, found {t}'
            )
        if timesteps.count(t) > 1:
            raise UserError(f'timesteps: {t} is given twice; give it once')
    return np.sort(np.array(timesteps, np.int32))
