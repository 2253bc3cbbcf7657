"""Timestep samplers: which t are trained. Each is a few pure functions of a state that lives on the device.

Sample i draws its t from its own key, by inverting the distribution function at u ~ U(0, 1), so that t does not depend on how a batch is
split over devices. The state is updated from the timesteps and losses of the whole global batch, in the order of its rows: every device
computes the same. (States that follow losses inherit their rounding, so other device counts may round a draw at an edge differently.)

    uniform             p = 1/T
    loss_second_moment  p ∝ √mean(last H losses², each times its weight) mixed with a uniform share of 0.001; uniform until every t has H
                        losses; the loss is multiplied by 1/(T p_t), which keeps its expectation.  IDDPM, arXiv 2102.09672, section 3.3
    speed               p ∝ k for t < τ, 1 after that; rows in pairs, the second of which takes M − t if t < M, else t − M, where M is the
                        first t at which the slope of √(1 − ᾱ) falls below 1e-4, plus 1; no correction.  SpeeD, arXiv 2405.17403
    policy              `jaxunet.timestep_policy`
    adaptive            `_adaptive`: p follows the relative progress of each noise level
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
from jaxunet.diffusion import Diffusion
from jaxunet.errors import UserError, near_misses
from jaxunet.timestep_policy import Measure, draw_from_policy, init_policy, measure_policy

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
    draw: Callable[[State, Key[Array, ' batch'], Steps, Array], Draw]  # from keys, places in the global batch, clean images
    update: Callable[[State, Steps, PerSample, PerSample], State]  # from t, loss and loss weight of the global batch, in row order
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
            draw=lambda state, keys, row, x0: Draw(*draw(state.params, keys, x0)[1:], jnp.ones(keys.shape, jnp.float32)),
            update=_keep,
            measure=functools.partial(measure_policy, config, diffusion),
        )
    allowed = CHOICES['timesteps.sampler']
    raise UserError(f'timesteps.sampler: expected one of {", ".join(allowed)}, found {c.sampler!r}{near_misses(c.sampler, allowed)}')


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
    return jnp.where(jnp.all(state.counts >= history) & jnp.any(root > 0), p, jnp.full(steps, 1 / steps, jnp.float32))


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
        losses = state.losses.at[row, (state.counts[t] + place) % history].set(loss * weight, mode='drop')
        return LossHistory(losses, state.counts.at[t].add(1))

    return TimestepSampler(lambda: LossHistory(jnp.zeros((steps, history), jnp.float32), jnp.zeros(steps, jnp.int32)), draw, update)


def speed_tables(config: TimestepsConfig, diffusion: Diffusion) -> tuple[Float64[np.ndarray, ' steps'], Int[np.ndarray, ' steps']]:
    """SpeeD's p, and the t of a pair's second row. For linear betas and T = 1000, M is 642; for other T the slope is scaled by 1000/T."""
    t = np.arange(diffusion.steps)
    p = np.where(t < config.speed_tau * diffusion.steps, config.speed_k, 1.0)
    middle = int(np.argmax(np.gradient(np.sqrt(1 - diffusion.alphas_cumprod)) < 0.1 / diffusion.steps)) + 1
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


class Progress(NamedTuple):
    """Averages by bin, each over visits to that bin: rows are the weights' sum, the loss and its square."""

    fast: Float[Array, '3 bins']
    slow: Float[Array, '3 bins']


SLOWER = 4.0


def progress_probabilities(state: Progress, config: TimestepsConfig, steps: int) -> Probabilities:
    """The distribution of `_adaptive`."""
    memory, bins = config.adaptive_memory, config.adaptive_bins
    seen = state.fast[0] > 0
    weight = jnp.where(seen, state.fast[0], 1.0)
    fast, square = state.fast[1] / weight, state.fast[2] / weight
    slow = state.slow[1] / jnp.where(seen, state.slow[0], 1.0)
    known = seen & (fast > 0) & (slow > 0)
    safe = jnp.where(known, fast, 1.0)
    drop = jnp.log(jnp.where(known, slow, 1.0) / safe)
    variation = jnp.maximum(square - jnp.square(fast), 0.0) / jnp.square(safe)
    samples = 2 * memory * weight / (2 - weight)
    noise = jnp.where(known, jnp.minimum(jnp.sqrt(variation / samples), 1.0), 1.0)
    gain = jnp.maximum(drop - noise, 0.0)
    scale = (1 - config.adaptive_uniform) / jnp.maximum(jnp.sum(gain) + jnp.sum(noise), 1e-12)
    density = gain * scale + (1 - scale * jnp.sum(gain)) / bins
    centres = (np.arange(bins) + 0.5) * steps / bins - 0.5
    p = jnp.interp(jnp.arange(steps, dtype=jnp.float32), jnp.asarray(centres, jnp.float32), density)
    return p / jnp.sum(p)


def _adaptive(config: TimestepsConfig, steps: int) -> TimestepSampler:
    """Our own: train each noise level in proportion to the relative progress that a visit there still brings.

    A network's losses at different t are in no common unit: ε-losses span three decades, most of which no training can remove. What can
    be compared, and does not change with the loss weighting or with the quantity that is predicted, is the relative rate −d ln L_b/dn_b
    of the loss of a range b of timesteps per visit to it. It is estimated from the losses that the step computes anyway. T is cut
    into K bins; with c_b samples of a batch in bin b, of mean loss ℓ_b,

        F_b ← e^(−c_b/n) F_b + (1 − e^(−c_b/n)) ℓ_b,    S_b likewise with 4n,    both divided by the weight they have gathered,
        d_b = ln(S_b / F_b)                             the drop of ln L over the 3n visits that lie between the two averages
        σ_b = √(Var_b / N_b) / F_b                      its noise: an F_b of weight w counts N_b = 2n w/(2 − w) samples
        a_b = max(d_b − σ_b, 0)
        p_b = (1 − ω) a_b / (Σa + Σσ) + (1 − (1 − ω) Σa/(Σa + Σσ)) / K

    and p_t interpolates p_b between the bins' centres. Each bin keeps at least the share ω/K, whatever the statistics say. Where progress
    drowns in noise (Σσ ≫ Σa: the start, and late training) p returns to uniform by itself; and a bin that is trained more progresses less
    per visit, so the feedback is negative. The averages count visits, not steps, so that what is seldom drawn is not forgotten sooner.

    The gradient is not corrected by default (`adaptive_correction` = 0): the effective weight of t is T p_t, as in SpeeD and the policy
    sampler, which is what moves effort. With 1 the loss is multiplied by 1/(T p_t), and only its variance changes.

    Cost: K-element averages and a T-element cumulative sum each step, no forward passes.

    Considered and rejected: p ∝ √E[L²] (IDDPM's; spends its draws where the ε-loss is large and irreducible); absolute progress S − F
    (changes with the weighting and with the prediction, and sees only the least noisy timesteps); multiplicative updates
    p ← p · gain (equalise the gains in theory, but a noisy estimate is multiplied up step after step).
    These were rejected on paper; only the first exists as code (`loss_second_moment`).

    Not shown yet: a gain over uniform. On the digits (16 channels, T = 200, 600 steps, one seed) the average's mean ln L over t was
    −3.847, against −3.884 of uniform.
    """
    bins, memory = config.adaptive_bins, config.adaptive_memory

    def init() -> Progress:
        return Progress(jnp.zeros((3, bins), jnp.float32), jnp.zeros((3, bins), jnp.float32))

    def draw(state: Progress, keys: Key[Array, ' batch'], row: Steps, x0: Array) -> Draw:
        return draw_from(progress_probabilities(state, config, steps), keys, config.adaptive_correction)

    def update(state: Progress, t: Steps, loss: PerSample, weight: PerSample) -> Progress:
        # A masked sum, as a scatter's order of additions would vary on GPUs.
        inside = (t * bins // steps)[:, None] == jnp.arange(bins, dtype=t.dtype)[None, :]
        values = jnp.stack([jnp.ones_like(loss), loss, jnp.square(loss)])
        sums = jnp.sum(jnp.where(inside[None], values[:, :, None], 0.0), axis=1)
        mean = sums / jnp.maximum(sums[:1], 1.0)

        def average(old: Array, visits: float) -> Array:
            keep = jnp.exp(-sums[:1] / visits)
            return keep * old + (1 - keep) * mean

        return Progress(average(state.fast, memory), average(state.slow, SLOWER * memory))

    return TimestepSampler(init, draw, update)
