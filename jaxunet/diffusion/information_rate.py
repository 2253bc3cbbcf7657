"""InfoNoise: timesteps drawn by the rate at which noise takes information from an image.

    p_t ∝ Δ_t m(σ_t)/σ_t² g(σ_t) / w(σ_t)        Raya et al. 2026, arXiv 2602.18647

for timesteps, or slices of noise levels, of noise-to-signal ratio σ. Here m is the least mean
squared error of x_0, and m/σ³ the rate per σ at which the entropy of x_0 given x_t rises (I-MMSE;
m/σ² per ln σ); w is the weight that the training loss puts on the squared error of x_0, and Δ_t
the width of timestep t in ln σ. The loss is not corrected for p: the method moves the effective
weights w p of the noise levels to the rate, whatever the objective and the loss weighting are.

From the paper: m is estimated by the unweighted losses of training, averaged in bins of ln σ
(algorithm 1, eq. 13); the gate g = σⁿ/(σⁿ + cⁿ), n = 3, closes the end of little noise, where
m/σ³ diverges (eq. 14); p divides by w (eq. 15) and is inverted at uniform numbers (eq. 16). Its
onset rule puts c at the largest σ whose m/σ³ reaches 0.002 of the maximum; `infonoise_pivot` sets c
instead, as the paper does for data that are not images.

The paper leaves open, and these are our choices:

- The averages are of the squared error of v, m (1 + σ²)/σ², which varies little within a bin, where
  m falls with σ². They decay by sample, as in `adaptive`, and ln of them is linear between bins.
- An error of v counts as at most 1, which that of the best linear estimate of pixels in [−1, 1]
  never exceeds. A network that predicts ε errs by more where x_t hardly depends on the image.
- p is computed anew in every step. It is uniform over timesteps for `infonoise_warmup` steps, and
  until every bin has had a sample.
- p has a uniform share, `infonoise_uniform`, so that every level keeps being measured.
- The range of levels is that of the objective's T timesteps or slices. The maximum in the onset
  rule is taken from σ = 0.002 on, the lower end of EDM's range, so that c does not depend on the
  objective; m falls with σ² below the lowest level.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int

from jaxunet.config import LossConfig, TimestepsConfig
from jaxunet.diffusion.levels import LOWEST
from jaxunet.diffusion.process import Diffusion
from jaxunet.diffusion.weighting import fixed_table, noise_error_factors

GATE_POWER, ONSET = 3, 0.002  # the paper's n and p

Probabilities = Float[Array, ' steps']


class Errors(NamedTuple):
    """State of `infonoise`: the mean squared error of v in each bin of ln σ.

    Fields:
      weight: 0 before the first sample in a bin; then tends to 1.
      error: decayed sum of the errors. The estimate of a bin is error / weight.
      updates: number of steps whose losses are in the sums.
    """

    weight: Float[Array, ' bins']
    error: Float[Array, ' bins']
    updates: Int[Array, '']


class Levels(NamedTuple):
    """Constants of the timesteps.

    Fields:
      log_sigma: ln σ.
      to_v: factor from the loss to the squared error of v.
      density: p without the gate, per squared error of v.
      bins: bin of each timestep. Bins have equal widths in ln σ; those without a timestep are left
        out.
      left, share: the centre of a bin before each timestep, and its position from there to the next
        centre, 0 to 1.
    """

    log_sigma: Float64[np.ndarray, ' steps']
    to_v: Float32[np.ndarray, ' steps']
    density: Float32[np.ndarray, ' steps']
    bins: Int[np.ndarray, ' steps']
    left: Int[np.ndarray, ' steps']
    share: Float32[np.ndarray, ' steps']

    @property
    def bin_count(self) -> int:
        """Number of bins."""
        return int(self.bins.max()) + 1


def make_levels(config: TimestepsConfig, loss: LossConfig, diffusion: Diffusion) -> Levels:
    """Returns the constants for a process of two timesteps or more and a fixed loss weighting."""
    # Levels of almost only noise, or almost none, round to 0 and 1 if the range is very wide.
    alphas = np.clip(diffusion.alphas_cumprod, 1e-15, 1 - 1e-15)
    log_sigma = (np.log1p(-alphas) - np.log(alphas)) / 2
    factors, weight = noise_error_factors(diffusion), fixed_table(loss, diffusion)
    # w(σ) on the error of x_0 is weight · SNR / factor, and m/σ² = ᾱ times the error of v.
    density = np.gradient(log_sigma) * factors * (1 - alphas)
    density = np.where(weight > 0, density / np.where(weight > 0, weight, 1), 0.0)
    place = (log_sigma - log_sigma[0]) / (log_sigma[-1] - log_sigma[0]) * config.infonoise_bins
    _, bins = np.unique(
        np.minimum(place.astype(int), config.infonoise_bins - 1), return_inverse=True
    )
    centres = np.bincount(bins, weights=log_sigma) / np.bincount(bins)
    last = max(len(centres) - 2, 0)
    left = np.clip(np.searchsorted(centres, log_sigma, side='right') - 1, 0, last)
    right = np.minimum(left + 1, len(centres) - 1)
    width = np.where(right > left, centres[right] - centres[left], 1.0)
    share = np.clip((log_sigma - centres[left]) / width, 0, 1)
    return Levels(
        log_sigma,
        (factors / alphas).astype(np.float32),
        (density / density.max()).astype(np.float32),
        bins,
        left,
        share.astype(np.float32),
    )


def start(levels: Levels) -> Errors:
    """Returns the state before the first step."""
    zeros = jnp.zeros(levels.bin_count, jnp.float32)
    return Errors(zeros, zeros, jnp.zeros((), jnp.int32))


def log_errors(state: Errors, levels: Levels) -> Float[Array, ' steps']:
    """Returns the estimated ln of the squared error of v at each timestep."""
    mean = state.error / jnp.where(state.weight > 0, state.weight, 1.0)
    log_error = jnp.log(jnp.clip(mean, 1e-30, 1.0))
    right = np.minimum(levels.left + 1, levels.bin_count - 1)
    return log_error[levels.left] * (1 - levels.share) + log_error[right] * levels.share


def onset(log_error: Float[Array, ' steps'], levels: Levels) -> Float[Array, '']:
    """Returns ln c by the onset rule: c is the largest σ whose m/σ³ reaches 0.002 of the peak."""
    sigma = levels.log_sigma
    # m/σ³ is the error of v over σ (1 + σ²).
    rate = log_error - jnp.asarray(sigma + np.log1p(np.exp(2 * sigma)), jnp.float32)
    below = log_error[0] - jnp.float32(np.log(LOWEST))
    lower = int(np.searchsorted(sigma, np.log(LOWEST)))  # levels that the maximum leaves out
    peak = below
    if lower < len(sigma):
        peak = jnp.maximum(jnp.max(rate[lower:] if lower else rate), below)
    reached = rate >= peak + jnp.float32(np.log(ONSET))
    at = jnp.max(jnp.where(reached, jnp.arange(len(sigma), dtype=jnp.int32), 0))
    return jnp.asarray(sigma, jnp.float32)[at]


def information_probabilities(
    state: Errors, levels: Levels, config: TimestepsConfig
) -> Probabilities:
    """Returns p of the timesteps; uniform during the warm-up."""
    log_error = log_errors(state, levels)
    if config.infonoise_pivot:
        log_pivot = jnp.float32(np.log(config.infonoise_pivot))
    else:
        log_pivot = onset(log_error, levels)
    distance = jnp.asarray(levels.log_sigma, jnp.float32) - log_pivot
    rate = jnp.exp(log_error - jnp.max(log_error)) / (1 + jnp.exp(-GATE_POWER * distance))
    rate = rate * levels.density
    total, steps = jnp.sum(rate), len(levels.density)
    share = config.infonoise_uniform
    p = (1 - share) * rate / jnp.where(total > 0, total, 1.0) + share / steps
    ready = (state.updates >= config.infonoise_warmup) & jnp.all(state.weight > 0) & (total > 0)
    return jnp.where(ready, p, jnp.full(steps, 1 / steps, jnp.float32))


def add_losses(
    state: Errors,
    t: Int[Array, ' batch'],
    loss: Float[Array, ' batch'],
    levels: Levels,
    memory: float,
) -> Errors:
    """Returns the state after the unweighted losses of a batch.

    Args:
      memory: length of a bin's moving average, in samples.
    """
    # A masked sum: a scatter adds in varying order on GPUs.
    bins = jnp.asarray(levels.bins, jnp.int32)[t]
    inside = bins[:, None] == jnp.arange(levels.bin_count, dtype=jnp.int32)[None, :]
    count = jnp.sum(inside.astype(jnp.float32), axis=0)
    error = loss * jnp.asarray(levels.to_v)[t]
    total = jnp.sum(jnp.where(inside, error[:, None], 0.0), axis=0)
    keep = jnp.exp(-count / memory)
    return Errors(
        keep * state.weight + (1 - keep),
        keep * state.error + (1 - keep) * total / jnp.maximum(count, 1.0),
        state.updates + 1,
    )
