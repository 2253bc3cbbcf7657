"""The noise levels of the objectives that have no timesteps: EDM, rectified flow, consistency.

A consistency model has those of the one that its network predicts (`DiffusionConfig.prediction`),
or those of the schedule if it predicts v: a real time between timesteps stands for the level in
between, by ln σ.

All objectives share one coordinate system, x = √ᾱ x_0 + √(1 − ᾱ) ε. EDM's x_0 + σ ε is √(1 + σ²)
times x; flow's (1 − t) x_0 + t ε is √((1 − t)² + t²) times x, at the noise-to-signal ratio σ =
t/(1 − t). Samplers, guidance and posteriors are therefore the same for all of them; only what the
network sees and predicts differs (`jaxunet.diffusion.process`).

The *time* of a level is what the network's time embedding reads, on the scale of DDPM's timesteps,
0 to 1000: 1000 c_noise = 250 ln σ for EDM, and 1000 t for flow.

In training ln σ, which is flow's logit(t), is normal. It is a function of a quantile u ~ U(0, 1),
and timestep t of T stands for the slice of levels with t/T ≤ u < (t + 1)/T, so that timestep
samplers and loss weightings work on slices as they do on timesteps.

Sources: EDM, Karras et al. 2022, arXiv 2206.00364, table 1; rectified flow, Liu et al. 2022, arXiv
2209.03003; logit-normal times, Esser et al. 2024, arXiv 2403.03206, section 3.1.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64

from jaxunet.config import DiffusionConfig
from jaxunet.diffusion.schedules import log_sigmas
from jaxunet.runtime.errors import UserError, near_misses

T = TypeVar('T', bound=Array | np.ndarray)
Sigmas = Float64[np.ndarray, ' levels']

TIME_SCALE = 1000
RHO = 7  # ρ of EDM eq. 5
LOWEST, HIGHEST = 0.002, 80.0  # σ_min and σ_max of EDM table 1
SPACINGS = {'edm': ('karras', 'log_snr'), 'flow': ('linear', 'quadratic', 'karras', 'log_snr')}


def time_of_quantile(
    config: DiffusionConfig, quantile: Float[Array, ' levels']
) -> Float[Array, ' levels']:
    """Returns the times of the levels at quantiles, 0 to 1, of the training distribution."""
    # Uniform numbers in float32 may be 0, and may round to 1.
    tiny = float(jnp.finfo(quantile.dtype).eps) / 2
    quantile = jnp.clip(_within_schedule(config, quantile), tiny, 1 - tiny)
    normal = jax.scipy.special.ndtri(quantile)
    return _time_of_normal(config, normal)


def middle_times(config: DiffusionConfig) -> Sigmas:
    """Returns the time at the middle of each of the `config.steps` slices."""
    middles = _within_schedule(config, (np.arange(config.steps) + 0.5) / config.steps)
    return _time_of_normal(config, np.array([NormalDist().inv_cdf(middle) for middle in middles]))


def _within_schedule(config: DiffusionConfig, quantile: T) -> T:
    """Returns quantiles of the whole normal for those of the part that a schedule has levels of."""
    if config.prediction != 'v':
        return quantile
    ends = log_sigmas(config.schedule, config.steps)[[0, -1]]
    low, high = map(NormalDist(config.v_mean, config.v_std).cdf, ends)
    return cast(T, low + (high - low) * quantile)


def _time_of_normal(config: DiffusionConfig, normal: T) -> T:
    """Returns the times of the levels whose ln σ is `normal` standard deviations off the mean."""
    of = config.prediction
    log_sigma = getattr(config, f'{of}_mean') + getattr(config, f'{of}_std') * normal
    if of == 'flow':
        if isinstance(log_sigma, np.ndarray):
            return cast(T, TIME_SCALE / (1 + np.exp(-log_sigma)))
        return cast(T, TIME_SCALE * jax.nn.sigmoid(log_sigma))
    return _time_of_log(config, log_sigma)


def _time_of_log(config: DiffusionConfig, log_sigma: T) -> T:
    """Returns the times of the levels of edm or v with these ln σ, within those of a schedule."""
    if config.prediction == 'edm':
        return cast(T, TIME_SCALE / 4 * log_sigma)
    known = log_sigmas(config.schedule, config.steps)
    return _interpolated(log_sigma, known, np.arange(config.steps, dtype=np.float64))


def _interpolated(x: T, xs: np.ndarray, ys: np.ndarray) -> T:
    """Returns y at x of the lines through (xs, ys), and y of the ends beyond them."""
    if isinstance(x, np.ndarray):
        return cast(T, np.interp(x, xs, ys))
    # jnp.interp searches in a loop, which would part the step's CUDA graph.
    above = jnp.searchsorted(jnp.asarray(xs, x.dtype), x, side='right', method='compare_all')
    low = jnp.clip(above - 1, 0, len(xs) - 2)
    lines = jnp.asarray(np.stack([xs[:-1], xs[1:], ys[:-1], ys[1:]]), x.dtype)[:, low]
    share = jnp.clip((x - lines[0]) / (lines[1] - lines[0]), 0, 1)
    return cast(T, lines[2] + share * (lines[3] - lines[2]))


def signal_and_noise(config: DiffusionConfig, time: T) -> tuple[T, T]:
    """Returns √ᾱ and √(1 − ᾱ) of the levels with these times; any float type."""
    if config.prediction == 'edm':
        # √ᾱ = 1/√(1 + σ²) and √(1 − ᾱ) = σ/√(1 + σ²), from ln σ² so that neither overflows.
        log_variance = time * (8 / TIME_SCALE)
        both = _sqrt_sigmoid(-log_variance), _sqrt_sigmoid(log_variance)
    elif config.prediction == 'v':
        known = log_sigmas(config.schedule, config.steps)
        log_variance = 2 * _interpolated(time, np.arange(config.steps, dtype=np.float64), known)
        both = _sqrt_sigmoid(-log_variance), _sqrt_sigmoid(log_variance)
    else:
        t = time / TIME_SCALE
        length = ((1 - t) ** 2 + t**2) ** 0.5
        both = (1 - t) / length, t / length
    return cast(tuple[T, T], both)


def _sqrt_sigmoid(x: Array | np.ndarray) -> Array | np.ndarray:
    if isinstance(x, np.ndarray):
        return np.exp(-0.5 * np.logaddexp(0, -x))
    return jnp.sqrt(jax.nn.sigmoid(x))


def time_of_sigma(config: DiffusionConfig, sigma: T) -> T:
    """Returns the times of noise-to-signal ratios σ = √((1 − ᾱ)/ᾱ); only edm refuses infinite σ."""
    if config.prediction == 'flow':
        return cast(T, TIME_SCALE / (1 + 1 / sigma))
    log = np.log(sigma) if isinstance(sigma, np.ndarray) else jnp.log(sigma)
    return _time_of_log(config, cast(T, log))


def spaced_levels(config: DiffusionConfig, steps: int, spacing: str) -> Sigmas:
    """Returns the σ of `steps` noise levels for sampling, ascending.

    Args:
      steps: number of levels; the step from the lowest leads to the image.
      spacing: the quantity with a uniform stride. For EDM `karras`: σ^(1/7) (EDM eq. 5), or
        `log_snr`: log σ, from 0.002 to 80. For flow also `linear`: t = 1/steps, ..., 1, or
        `quadratic`: √t.

    Raises:
      UserError: a spacing that the objective does not have, or no steps.
    """
    allowed = SPACINGS[config.prediction]
    if spacing not in allowed:
        raise UserError(
            f'skip_schedule: expected one of {", ".join(allowed)} with diffusion.objective='
            f'{config.objective}, found {spacing!r}{near_misses(spacing, allowed)}'
        )
    if steps < 1:
        raise UserError(f'steps: expected 1 or more, found {steps}')
    if spacing in ('linear', 'quadratic'):
        t = (np.arange(1, steps + 1) / steps) ** (1 if spacing == 'linear' else 2)
        with np.errstate(divide='ignore'):
            return t / (1 - t)
    if steps == 1:
        return np.array([HIGHEST])
    if spacing == 'log_snr':
        return np.exp(np.linspace(np.log(LOWEST), np.log(HIGHEST), steps))
    return np.linspace(LOWEST ** (1 / RHO), HIGHEST ** (1 / RHO), steps) ** RHO
