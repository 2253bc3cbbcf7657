"""Timestep samplers: which t are trained. Each is a few pure functions of a state that lives on the device.

Sample i draws its t from its own key, by inverting the distribution function at u ~ U(0, 1), so that t does not depend on how a batch is
split over devices. The state is updated from the timesteps and losses of the whole global batch, in the order of its rows: every device
computes the same. (States that follow losses inherit their rounding, so other device counts may round a draw at an edge differently.)

    uniform             p = 1/T
    loss_second_moment  p ∝ √mean(last H losses², each times its weight) mixed with a uniform share of 0.001; uniform until every t has H
                        losses; the loss is multiplied by 1/(T p_t), which keeps its expectation.  IDDPM, arXiv 2102.09672, section 3.3
    speed               p ∝ k for t < τ, 1 after that; rows in pairs, the second of which takes M − t if t < M, else t − M, where M is the
                        first t at which the slope of √(1 − ᾱ) falls below 1e-4, plus 1; no correction.  SpeeD, arXiv 2405.17403
    policy              `jaxunet.diffusion.timestep_policy`
    adaptive            `_adaptive`: p ∝ √E[w² loss], the expected norm of each timestep's gradient; the loss is multiplied by 1/(T p_t)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int, Key

from jaxunet.config import CHOICES, Config, TimestepsConfig
from jaxunet.diffusion.process import Diffusion
from jaxunet.diffusion.timestep_policy import Measure, draw_from_policy, init_policy, measure_policy
from jaxunet.runtime.errors import UserError, near_misses

Steps = Int[Array, ' batch']
PerSample = Float[Array, ' batch']
Probabilities = Float[Array, ' steps']
State = Any  # () for a fixed distribution


class Draw(NamedTuple):
    t: Steps
    importance: PerSample  # 1/(T p_t): the weight with which a mean over the draws estimates the mean over uniform t
    weight: PerSample  # the factor on the loss: importance, a power of it, or 1


class TimestepSampler(NamedTuple):
    """Pure functions of a state."""

    init: Callable[[], State]
    draw: Callable[
        [State, Key[Array, ' batch'], Steps, Array], Draw
    ]  # from keys, places in the global batch, clean images
    update: Callable[
        [State, Steps, PerSample, PerSample], State
    ]  # from t, loss and loss weight of the global batch, in row order
    paired: bool = False  # rows 2j and 2j + 1 are to be drawn with the same key
    measure: Measure | None = None  # what else is to be done after each optimizer step


def make_sampler(config: Config, diffusion: Diffusion) -> TimestepSampler:
    """The sampler that `config.timesteps` names. Raises `UserError` for one that does not exist."""
    c = config.timesteps
    if c.sampler == 'uniform':
        return _uniform(diffusion.steps)
    if c.sampler == 'loss_second_moment':
        return _loss_second_moment(c, diffusion.steps)
    if c.sampler == 'speed':
        return _speed(c, diffusion)
    if c.sampler == 'adaptive':
        return _adaptive(c, diffusion.steps)
    if c.sampler == 'policy':
        draw = functools.partial(draw_from_policy, steps=diffusion.steps)
        return TimestepSampler(
            init=functools.partial(init_policy, config),
            draw=lambda state, keys, row, x0: Draw(
                *draw(state.params, keys, x0)[1:], jnp.ones(keys.shape, jnp.float32)
            ),
            update=_keep,
            measure=functools.partial(measure_policy, config, diffusion),
        )
    allowed = CHOICES['timesteps.sampler']
    raise UserError(
        f'timesteps.sampler: expected one of {", ".join(allowed)}, found {c.sampler!r}{near_misses(c.sampler, allowed)}'
    )


def inverse_cdf(p: Probabilities, u: PerSample) -> Steps:
    """The t with F(t − 1) ≤ u < F(t), where F is the distribution function of p (which need not sum to 1)."""
    cumulative = jnp.cumsum(p)
    # All T comparisons at once are one small kernel; a binary search would be ten.
    t = jnp.searchsorted(cumulative / cumulative[-1], u, side='right', method='compare_all')
    return jnp.minimum(t, p.shape[0] - 1).astype(jnp.int32)


def draw_from(p: Probabilities, keys: Key[Array, ' batch'], correction: float) -> Draw:
    """t ~ p, with weights (1/(T p_t))^correction. p sums to 1."""
    t = inverse_cdf(p, jax.vmap(jax.random.uniform)(keys))
    importance = 1 / (p.shape[0] * p[t])
    return Draw(t, importance, importance**correction)


def _keep(state: State, t: Steps, loss: PerSample, weight: PerSample) -> State:
    return state


def _uniform(steps: int) -> TimestepSampler:
    def draw(state: State, keys: Key[Array, ' batch'], row: Steps, x0: Array) -> Draw:
        ones = jnp.ones(keys.shape, jnp.float32)
        return Draw(jax.vmap(lambda k: jax.random.randint(k, (), 0, steps))(keys), ones, ones)

    return TimestepSampler(lambda: (), draw, _keep)


class LossHistory(NamedTuple):
    losses: Float[Array, 'steps history']  # the last ones of each t, in a ring
    counts: Int[Array, ' steps']  # how many each t has had


def second_moment_probabilities(state: LossHistory, uniform: float) -> Probabilities:
    """IDDPM eq. 18, with its uniform share; uniform until every history is full."""
    steps, history = state.losses.shape
    root = jnp.sqrt(jnp.mean(jnp.square(state.losses), axis=1))
    p = (1 - uniform) * root / jnp.maximum(jnp.sum(root), 1e-30) + uniform / steps
    return jnp.where(
        jnp.all(state.counts >= history) & jnp.any(root > 0),
        p,
        jnp.full(steps, 1 / steps, jnp.float32),
    )


def _loss_second_moment(config: TimestepsConfig, steps: int) -> TimestepSampler:
    history = config.history

    def draw(state: LossHistory, keys: Key[Array, ' batch'], row: Steps, x0: Array) -> Draw:
        return draw_from(second_moment_probabilities(state, config.history_uniform), keys, 1.0)

    def update(state: LossHistory, t: Steps, loss: PerSample, weight: PerSample) -> LossHistory:
        same = t[:, None] == t[None, :]
        place = jnp.sum(jnp.tril(same, -1), axis=1)  # among the batch's losses of the same t
        total = jnp.sum(same, axis=1)
        # A t drawn more than `history` times keeps its last ones, so that no slot is written twice.
        row = jnp.where(total - place <= history, t, steps)
        losses = state.losses.at[row, (state.counts[t] + place) % history].set(
            loss * weight, mode='drop'
        )
        return LossHistory(losses, state.counts.at[t].add(1))

    return TimestepSampler(
        lambda: LossHistory(jnp.zeros((steps, history), jnp.float32), jnp.zeros(steps, jnp.int32)),
        draw,
        update,
    )


def speed_tables(
    config: TimestepsConfig, diffusion: Diffusion
) -> tuple[Float64[np.ndarray, ' steps'], Int[np.ndarray, ' steps']]:
    """SpeeD's p, and the t of a pair's second row. For linear betas and T = 1000, M is 642; for other T the slope is scaled by 1000/T."""
    t = np.arange(diffusion.steps)
    p = np.where(t < config.speed_tau * diffusion.steps, config.speed_k, 1.0)
    middle = (
        int(np.argmax(np.gradient(np.sqrt(1 - diffusion.alphas_cumprod)) < 0.1 / diffusion.steps))
        + 1
    )
    return p / p.sum(), np.where(t < middle, middle - t, t - middle)


def _speed(config: TimestepsConfig, diffusion: Diffusion) -> TimestepSampler:
    p, dual = speed_tables(config, diffusion)
    steps = diffusion.steps
    # How often a t comes in either row of a pair.
    both = (p + np.bincount(dual, weights=p, minlength=steps)) / 2
    importance = (1 / (steps * both)).astype(np.float32)

    def draw(state: State, keys: Key[Array, ' batch'], row: Steps, x0: Array) -> Draw:
        t = inverse_cdf(jnp.asarray(p, jnp.float32), jax.vmap(jax.random.uniform)(keys))
        t = jnp.where(row % 2 == 1, jnp.asarray(dual, jnp.int32)[t], t)
        return Draw(t, jnp.asarray(importance)[t], jnp.ones(t.shape, jnp.float32))

    return TimestepSampler(lambda: (), draw, _keep, paired=True)


class GradientNorms(NamedTuple):
    """Of bins of timesteps: averages over the visits to each, as sums and the weights that these have gathered."""

    weight: Float[Array, ' bins']  # 0: never visited; goes to 1
    square: Float[Array, ' bins']  # of w² loss


def gradient_norm_probabilities(
    state: GradientNorms, config: TimestepsConfig, steps: int
) -> Probabilities:
    """The distribution of `_adaptive`; uniform until every bin was visited."""
    bins, uniform = config.adaptive_bins, config.adaptive_uniform
    mean = state.square / jnp.where(state.weight > 0, state.weight, 1.0)
    largest = jnp.max(mean)
    log_norm = jnp.log(jnp.maximum(mean, 1e-12 * jnp.where(largest > 0, largest, 1.0))) / 2
    # Where each timestep lies between the centres of two bins is fixed; jnp.interp would look for it in a loop of small kernels.
    place = np.clip((np.arange(steps) + 0.5) * bins / steps - 0.5, 0, bins - 1)
    left = np.minimum(place.astype(np.int32), max(bins - 2, 0))
    right, share = np.minimum(left + 1, bins - 1), jnp.asarray(place - left, jnp.float32)
    log_norm -= jnp.max(log_norm)
    norm = jnp.exp(log_norm[left] * (1 - share) + log_norm[right] * share)
    p = (1 - uniform) * norm / jnp.sum(norm) + uniform / steps
    return jnp.where(
        jnp.all(state.weight > 0) & (largest > 0), p, jnp.full(steps, 1 / steps, jnp.float32)
    )


def _adaptive(config: TimestepsConfig, steps: int) -> TimestepSampler:
    """Our own: draw each timestep in proportion to the norm of the gradient that it is expected to bring, and divide by that.

    A step estimates the gradient of J = Σ_t w_t L_t / T, w the loss weighting, from g = w_t/(T p_t) ∇loss_t at t ~ p. Any p gives the
    same mean; the variance is least for p_t ∝ √E‖w_t ∇loss_t‖² (importance sampling; Alain et al. 2015, arXiv 1511.06481). That norm is
    known, up to what lies behind the network's output, without another pass: loss_t is a mean of squares r², whose gradient there is
    2 r/d, so that ‖∂(w_t loss_t)/∂output‖² = 4 w_t² loss_t/d (the output layer as a stand-in for all: Katharopoulos & Fleuret 2018,
    arXiv 1803.00942). So the losses at hand tell it. T is cut into K bins; with c_b samples of a batch in bin b, of mean m_b of w² loss,

        S_b ← e^(−c_b/n) S_b + (1 − e^(−c_b/n)) m_b,    W_b ← e^(−c_b/n) W_b + (1 − e^(−c_b/n)),    G_b = √(S_b / W_b)
        p_t = (1 − ω) G_t / Σ_s G_s + ω/T,    ln G_t in straight lines between the centres of the bins
        factor on the loss: 1/(T p_t)                               (`adaptive_correction` = 1; its power otherwise)

    The averages count visits, not steps, so that what is seldom drawn is not forgotten sooner; ω bounds the factor by 1/ω. A batch's
    gradients then have the same norm whatever their t: the few least noisy timesteps, whose ε-loss is large and mostly irreducible,
    no longer drown the others, nor are the noisiest ones drawn, where there is next to nothing to learn, as often as all others.
    It serves the weighting that is configured rather than replacing it: with `loss.weighting` = p2 it draws the middle.

    Against IDDPM's p ∝ √E[(w loss)²]: the gradient goes with the root of the loss; ten losses of each of T timesteps, against K averages.

    Cost: K-element averages and a T-element cumulative sum each step, no forward passes.

    Tried and rejected, in runs of CIFAR-10 of 7,000 steps (64 channels, one H200, one seed each but for two; Fréchet distance of a
    classifier's features, 10,000 samples in 50 steps; the rows were not kept). uniform: 288 and 285, of half as many steps 312; two seeds
    of one method lie up to 9 apart. This sampler, with K = 64: 275 with weighting uniform, 251 and 259 with min_snr, 246 with p2; the
    weightings alone: min_snr 274, p2 267.
        relative progress (drop of ln L_b per visit, without correction): only tried on digits (16 channels, T = 200, 600 steps, one seed),
            where the mean of ln L over t came to −3.847, with uniform to −3.884
        a rate of information, p per unit of log-SNR ∝ L/√SNR (between those of entropy, L, and of variance, L/SNR): 302; each draw
            weighted to the same gradient norm 298, to the same loss 311: too many draws at the least noisy timesteps
        p normal in log-SNR, each draw weighted to the same norm: 301; about EDM's: 520, as the noisiest timesteps starve
        ω = 0.25: 255; stratified draws over the batch: 247; IDDPM's square of the loss in bins: 250
        p2 with γ = 1/2: 265, 3/2: 245; k = 1/4: 251, 4: 259
    Much of such a distance is the sampler's: the network of `configs/cifar10.py` came to 277 in 50 steps after 4,500 of training, and to
    200 in 100 after 4,780. So the table of `docs/results/methods` is in 100: with min_snr this sampler has after 155 s of an H200 the
    distance of uniform after 300 (two seeds); at 225 s p2 alone is level with uniform, and this sampler with uniform weights with the one
    with min_snr; at 300 s IDDPM's is ahead of it (169.8, one seed; 174.0, 175.5).
    """
    bins, memory = config.adaptive_bins, config.adaptive_memory

    def init() -> GradientNorms:
        return GradientNorms(jnp.zeros(bins, jnp.float32), jnp.zeros(bins, jnp.float32))

    def draw(state: GradientNorms, keys: Key[Array, ' batch'], row: Steps, x0: Array) -> Draw:
        return draw_from(
            gradient_norm_probabilities(state, config, steps), keys, config.adaptive_correction
        )

    def update(state: GradientNorms, t: Steps, loss: PerSample, weight: PerSample) -> GradientNorms:
        # A masked sum, as a scatter's order of additions would vary on GPUs.
        inside = (t * bins // steps)[:, None] == jnp.arange(bins, dtype=t.dtype)[None, :]
        count = jnp.sum(inside.astype(jnp.float32), axis=0)
        total = jnp.sum(jnp.where(inside, (jnp.square(weight) * loss)[:, None], 0.0), axis=0)
        keep = jnp.exp(-count / memory)
        return GradientNorms(
            keep * state.weight + (1 - keep),
            keep * state.square + (1 - keep) * total / jnp.maximum(count, 1.0),
        )

    return TimestepSampler(init, draw, update)
