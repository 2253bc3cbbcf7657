"""The arithmetic of the samplers: which time steps they visit, and the coefficients of every evaluation of the network, in float64.

An evaluation at (x, t) gives x_0 and ε, with which every sampler here moves on by one linear rule,

    x ← state · x + x0 · x_0 + noise · ε + memory · M + draw · z,    z ~ N(0, 1),

where M is what the evaluation before has left: nothing, x_0 (DPM-Solver++) or ε (Heun). A sampler is its table of these factors.
ᾱ, α = √ᾱ, √(1 − ᾱ) and the noise-to-signal ratio σ = √((1 − ᾱ)/ᾱ) are those of the step that an evaluation starts from; a prime marks
those of the step it leads to. After the least noisy step comes the image itself, where ᾱ' = 1 and σ' = 0.

Sources: DDPM, Ho et al. 2020, arXiv 2006.11239; DDIM, Song et al. 2021, arXiv 2010.02502; respacing, Nichol & Dhariwal 2021, arXiv
2102.09672 (openai/guided-diffusion); DPM-Solver++, Lu et al. 2022, arXiv 2211.01095; EDM, Karras et al. 2022, arXiv 2206.00364.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float64, Int, Int32, Integer

from jaxunet.runtime.errors import UserError, near_misses

SKIP_SCHEDULES = ('linear', 'quadratic', 'log_snr', 'karras')
RHO = 7  # EDM eq. 5
# Where the strides in σ begin: EDM's table 1, and λ = −5.1, where the cosine schedule of DPM-Solver's code is cut. Beyond lies next to
# nothing of the image; the cosine schedule's σ goes to 20,000, and most of a few steps would be spent there.
HIGHEST = {'karras': 80.0, 'log_snr': float(np.exp(5.1))}
FEW_STEPS = 15  # below it, DPM-Solver++ does not extrapolate on the step to the lowest noise level (Lu et al., section 6 and code)

Alphas = Float64[np.ndarray, ' steps']
Subset = Int32[np.ndarray, ' subset']


@dataclass(frozen=True, eq=False)
class Coefficients:
    """One row an evaluation, in the order of execution: the noisiest first. Shapes (evaluations,)."""

    timesteps: Int32[np.ndarray, ' evaluations']  # t of each evaluation, as the network knows it
    state: Float64[np.ndarray, ' evaluations']
    x0: Float64[np.ndarray, ' evaluations']
    noise: Float64[np.ndarray, ' evaluations']
    memory: Float64[np.ndarray, ' evaluations']
    draw: Float64[np.ndarray, ' evaluations']


def _coefficients(
    timesteps: Int[np.ndarray, ' evaluations'], **factors: np.ndarray
) -> Coefficients:
    names = [field.name for field in fields(Coefficients)][1:]
    rows = {
        name: np.asarray(factors.get(name, np.zeros(len(timesteps))), np.float64) for name in names
    }
    return Coefficients(np.asarray(timesteps, np.int32), **rows)


def ancestral(alphas_cumprod: Alphas, timesteps: Subset, *, large: bool) -> Coefficients:
    """DDPM on `timesteps` (ascending): the posterior's mean (eq. 7) and the variance β̃, or β if `large` (section 3.2).

    The last evaluation, where β̃ = 0, adds no noise with either.
    """
    alphas, previous = _from_to(alphas_cumprod, timesteps)
    betas = 1 - alphas / previous
    small = betas * (1 - previous) / (1 - alphas)
    return _coefficients(
        timesteps[::-1],
        state=np.sqrt(1 - betas) * (1 - previous) / (1 - alphas),
        x0=np.sqrt(previous) * betas / (1 - alphas),
        draw=np.sqrt(np.where(small > 0, betas, 0) if large else small),
    )


def ddim(alphas_cumprod: Alphas, timesteps: Subset, *, eta: float) -> Coefficients:
    """DDIM (eq. 12) with the variance η² β̃ (eq. 16) on `timesteps` (ascending)."""
    alphas, previous = _from_to(alphas_cumprod, timesteps)
    variance = eta**2 * (1 - alphas / previous) * (1 - previous) / (1 - alphas)
    return _coefficients(
        timesteps[::-1],
        x0=np.sqrt(previous),
        noise=np.sqrt(np.maximum(1 - previous - variance, 0)),
        draw=np.sqrt(variance),
    )


def dpm_solver_2m(alphas_cumprod: Alphas, timesteps: Subset) -> Coefficients:
    """DPM-Solver++(2M) (Lu et al., algorithm 2) on `timesteps` (ascending). Memory: x_0 of the evaluation before.

    With λ = −log σ, h = λ' − λ and r = h_before / h it is x' = √(1−ᾱ')/√(1−ᾱ) x + α' (1 − e^−h) D, D = (1 + 1/2r) x_0 − 1/2r M.
    First order (D = x_0) where there is no evaluation before, on the step to the image, where h is infinite and x' = x_0, and with
    fewer than 15 steps also on the one to the lowest noise level.
    """
    alphas, previous = _from_to(alphas_cumprod, timesteps)
    log_snr = -np.log(noise_to_signal(alphas))  # λ, ascending
    h = np.diff(log_snr)
    x0 = np.append(-np.sqrt(previous[:-1]) * np.expm1(-h), 1.0)
    extrapolation = np.zeros(len(alphas))  # 1/2r
    extrapolation[1:-1] = h[1:] / (2 * h[:-1])
    if len(alphas) < FEW_STEPS:
        extrapolation[-2:] = 0
    return _coefficients(
        timesteps[::-1],
        state=np.sqrt((1 - previous) / (1 - alphas)),
        x0=x0 * (1 + extrapolation),
        memory=-x0 * extrapolation,
    )


def heun(
    alphas_cumprod: Alphas,
    timesteps: Subset,
    *,
    churn: float = 0.0,
    churn_range: tuple[float, float],
) -> Coefficients:
    """EDM's second-order sampler (algorithms 1 and 2) on `timesteps` (ascending): 2S − 1 evaluations. Memory: ε of the one before.

    In x̂ = x/α the probability flow is dx̂/dσ = ε. Euler's step to σ' is x' = α' x_0 + √(1−ᾱ') ε; the evaluation there corrects it by
    α' (σ' − σ)/2 · (ε' − ε). The step to the image has no correction (σ' = 0).

    Args:
      churn: EDM's S_churn. Before a step from σ within `churn_range` (S_tmin, S_tmax) fresh noise raises σ by the factor
        1 + min(S_churn/S, √2 − 1), or to the nearest noise level that the model knows; S_noise is 1.
    """
    sigmas = noise_to_signal(alphas_cumprod)
    start = timesteps[::-1].astype(np.int64)  # t of every step
    raised = _raised(sigmas, start, min(churn / len(start), np.sqrt(2) - 1), churn_range)
    alphas, hat = np.sqrt(alphas_cumprod[start]), np.sqrt(alphas_cumprod[raised])
    evaluations = 2 * len(start) - 1
    t = np.empty(evaluations, np.int64)
    t[::2], t[1::2] = raised, start[1:]
    state, x0, noise, memory, draw = np.zeros((5, evaluations))
    x0[::2] = np.append(alphas[1:], 1)
    noise[::2] = np.sqrt(1 - x0[::2] ** 2)
    correction = alphas[1:] * (sigmas[start[1:]] - sigmas[raised[:-1]]) / 2
    scale = hat[1:] / alphas[1:]  # of x when its noise is raised for the step that follows
    state[1::2], noise[1::2], memory[1::2] = scale, scale * correction, -scale * correction
    draw[1::2] = hat[1:] * np.sqrt(sigmas[raised[1:]] ** 2 - sigmas[start[1:]] ** 2)
    return _coefficients(t, state=state, x0=x0, noise=noise, memory=memory, draw=draw)


def _from_to(alphas_cumprod: Alphas, timesteps: Subset) -> tuple[Alphas, Alphas]:
    """(ᾱ, ᾱ') of every step, the noisiest first."""
    alphas = alphas_cumprod[timesteps]
    return alphas[::-1], np.append(1.0, alphas[:-1])[::-1]


def _raised(
    sigmas: Alphas, timesteps: np.ndarray, factor: float, churn_range: tuple[float, float]
) -> np.ndarray:
    """The time steps whose σ is nearest to (1 + factor) σ, never less noisy ones. The first step starts from noise alone: unchanged."""
    wanted = np.log(sigmas[timesteps]) + np.log1p(factor)
    nearest = np.rint(np.interp(wanted, np.log(sigmas), np.arange(len(sigmas)))).astype(np.int64)
    within = (sigmas[timesteps] >= churn_range[0]) & (sigmas[timesteps] <= churn_range[1])
    within[0] = False
    return np.where(within, np.maximum(nearest, timesteps), timesteps)


def noise_to_signal(alphas_cumprod: Alphas) -> Alphas:
    """σ = √((1 − ᾱ)/ᾱ), EDM's noise level; λ = −log σ is half the log-SNR."""
    return np.sqrt((1 - alphas_cumprod) / alphas_cumprod)


def timestep_subset(alphas_cumprod: Alphas, steps: int, skip_schedule: str) -> Subset:
    """`steps` different time steps of 0..T−1, ascending, the last one T − 1 (and the first one 0 if there are two or more).

    With `log_snr` and `karras` the last one is the noisiest whose σ is at most 164 or 80, if there are enough below it.

    Each has a uniform stride, as far as different integers allow, of: t (`linear`, IDDPM section 4), √t (`quadratic`, DDIM appendix
    D.2), log σ (`log_snr`, Lu et al. section 6), σ^(1/7) (`karras`, EDM eq. 5).

    Raises:
      UserError: `steps` outside 1..T, or an unknown schedule.
    """
    total = len(alphas_cumprod)
    if skip_schedule not in SKIP_SCHEDULES:
        allowed, hint = ', '.join(SKIP_SCHEDULES), near_misses(skip_schedule, SKIP_SCHEDULES)
        raise UserError(f'skip_schedule: expected one of {allowed}, found {skip_schedule!r}{hint}')
    if not 1 <= steps <= total:
        raise UserError(
            f'steps: expected 1 to {total}, the number of steps that the model was trained with, found {steps}'
        )
    if steps == 1:
        return np.array([total - 1], np.int32)  # from noise alone to the image
    index = np.arange(steps, dtype=np.int64)
    if skip_schedule in ('linear', 'quadratic'):
        power = 1 if skip_schedule == 'linear' else 2
        # Halves round to even, as in guided-diffusion, whose subsets the linear ones are.
        wanted = np.rint(index**power * (total - 1) / (steps - 1) ** power).astype(np.int64)
    else:
        sigmas = noise_to_signal(alphas_cumprod)
        total = max(int(np.searchsorted(sigmas, HIGHEST[skip_schedule], side='right')), steps)
        level = (
            np.log(sigmas[:total]) if skip_schedule == 'log_snr' else sigmas[:total] ** (1 / RHO)
        )
        wanted = np.rint(
            np.interp(np.linspace(level[0], level[-1], steps), level, np.arange(total))
        ).astype(np.int64)
    # The nearest strictly increasing sequence from above, then pushed down as far as the end requires.
    increasing = np.maximum.accumulate(wanted - index) + index
    return np.minimum(increasing, total - steps + index).astype(np.int32)


def respaced_timesteps(alphas_cumprod: Alphas, respacing: str) -> Subset:
    """guided-diffusion's `timestep_respacing`, ascending: the subset that its `space_timesteps` makes.

    'A,B,...' cuts 0..T−1 into equal sections and takes A, B, ... steps of uniform stride from them, from a section's first step to its
    last (one step: the first). 'ddimN' takes every k-th step from 0, for the smallest whole k that gives N of them.

    Raises:
      UserError: text of another form, more steps than a section has, or no such k.
    """
    total = len(alphas_cumprod)
    number = respacing.removeprefix('ddim')
    if respacing != number and number.isdecimal():
        for stride in range(1, total + 1):
            if len(range(0, total, stride)) == int(number):
                return np.arange(0, total, stride, dtype=np.int32)
        raise UserError(
            f'respacing: no whole stride takes {number} of {total} steps, found {respacing!r}; use steps, which takes any number'
        )
    counts = respacing.split(',')
    if not all(count.strip().isdecimal() and int(count) > 0 for count in counts):
        raise UserError(
            f"respacing: expected numbers of steps such as '250' or '10,20,30', or 'ddim50', found {respacing!r}"
        )
    sections: list[Integer[np.ndarray, ' section']] = []
    for section, count in zip(
        np.array_split(np.arange(total), len(counts)), map(int, counts), strict=True
    ):
        if count > len(section):
            raise UserError(
                f'respacing: {count} steps from a section of {len(section)} ({total} steps in {len(counts)}), found {respacing!r}'
            )
        picked = timestep_subset(alphas_cumprod[section], count, 'linear') if count > 1 else [0]
        sections.append(section[picked])
    return np.concatenate(sections).astype(np.int32)
