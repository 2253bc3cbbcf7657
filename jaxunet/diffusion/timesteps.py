"""Timestep samplers: the distribution p of the timesteps t in training.

    uniform             p = 1/T.
    loss_second_moment  p ∝ √mean((w loss)²) over the last H losses of each t, with weights w, mixed
                        with a small uniform share; uniform until every t has H losses. The loss is
                        multiplied by 1/(T p_t), which preserves its expectation.
                        IDDPM, Nichol & Dhariwal 2021, arXiv 2102.09672, section 3.3.
    speed               p ∝ k for t < τ and p ∝ 1 for t ≥ τ. Rows come in pairs: if the first draws
                        t, the second takes M − t for t < M, else t − M. M is 1 plus the first t at
                        which the slope of √(1 − ᾱ) falls below 1e-4. The loss is not corrected.
                        SpeeD, Wang et al. 2024, arXiv 2405.17403; the pairs are its code's.
    speed_code          The same with p of its authors' code (1zeryu/SpeeD, 439c555), which differs
                        from the paper: k = 5 where that slope is above 1e-4, so τ is 641 of 1000
                        for linear betas, 958 for cosine. `loss.weighting=p2` is its weighting.
    adaptive            p ∝ √E[w² loss], the expected norm of the gradient of each timestep. The
                        loss is multiplied by 1/(T p_t). See `_adaptive`.
    infonoise           p follows the information that noise takes from an image; see
                        `jaxunet.diffusion.information_rate`. The loss is not corrected.
                        InfoNoise, Raya et al. 2026, arXiv 2602.18647.
    policy              A policy network proposes t; see `jaxunet.diffusion.timestep_policy`.

A sampler is a few pure functions of a state on the device. Sample i draws t from its own key by
inverting the distribution function at u ~ U(0, 1), so t does not depend on how a batch is split
over devices. Every device computes the same new state from the timesteps and losses of the global
batch, in row order. A state that depends on losses inherits their rounding, so another number of
devices may shift a draw at the edge of an interval.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int, Key, PyTree

from jaxunet.config import Config, TimestepsConfig
from jaxunet.config.schema import FACTS
from jaxunet.diffusion.information_rate import (
    Errors,
    add_losses,
    information_probabilities,
    make_levels,
    start,
)
from jaxunet.diffusion.process import Diffusion, PerSample, Steps
from jaxunet.diffusion.timestep_policy import Measure, draw_from_policy, init_policy, measure_policy
from jaxunet.runtime.errors import UserError

Probabilities = Float[Array, ' steps']
State: TypeAlias = PyTree  # () for a fixed distribution


class Draw(NamedTuple):
    """The timesteps of a batch and their weights.

    Fields:
      t: timesteps.
      importance: 1/(T p_t); a mean over the draws with these weights estimates the mean over
        uniform t.
      weight: factor on the loss: the importance, a power of it, or 1.
    """

    t: Steps
    importance: PerSample
    weight: PerSample


class TimestepSampler(NamedTuple):
    """Pure functions of a state on the device.

    Fields:
      init: returns the initial state.
      draw: draws timesteps from the state, one key per sample, the samples' rows in the global
        batch, and the clean images.
      update: returns the next state from the state and the timesteps, losses and loss weights of
        the global batch, in row order.
      keys_in_pairs: rows 2j and 2j + 1 need the same key.
      measure: returns the next state from the state and the optimizer step just taken; None if the
        sampler does not need it.
    """

    init: Callable[[], State]
    draw: Callable[[State, Key[Array, ' batch'], Steps, Array], Draw]
    update: Callable[[State, Steps, PerSample, PerSample], State]
    keys_in_pairs: bool = False
    measure: Measure | None = None


def make_sampler(config: Config, diffusion: Diffusion) -> TimestepSampler:
    """Returns the sampler that `config.timesteps.sampler` names.

    Raises:
      UserError: an unknown sampler.
    """
    c = config.timesteps
    if c.sampler == 'uniform':
        return _uniform(diffusion.steps)
    if c.sampler == 'loss_second_moment':
        return _loss_second_moment(c, diffusion.steps)
    if c.sampler in ('speed', 'speed_code'):
        return _speed(c, diffusion)
    if c.sampler == 'adaptive':
        return _adaptive(c, diffusion.steps)
    if c.sampler == 'infonoise':
        return _infonoise(config, diffusion)
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
    raise UserError(f'timesteps.sampler: {FACTS["timesteps.sampler"].problem(c.sampler)}')


def inverse_cdf(p: Probabilities, u: PerSample) -> Steps:
    """Returns the t with F(t − 1) ≤ u < F(t), where F is the distribution function of p.

    p need not sum to 1.
    """
    cumulative = jnp.cumsum(p)
    # Comparing with all T values is one small kernel; a binary search would take ten.
    t = jnp.searchsorted(cumulative / cumulative[-1], u, side='right', method='compare_all')
    return jnp.minimum(t, p.shape[0] - 1).astype(jnp.int32)


def draw_from(p: Probabilities, keys: Key[Array, ' batch'], correction: float) -> Draw:
    """Draws t ~ p with loss weights (1/(T p_t))^correction. p must sum to 1."""
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
    """State of `loss_second_moment`."""

    losses: Float[Array, 'steps history']  # last weighted losses of each t, a ring buffer
    counts: Int[Array, ' steps']  # number of losses seen for each t


def second_moment_probabilities(state: LossHistory, uniform: float) -> Probabilities:
    """Returns IDDPM's p (eq. 18) mixed with the share `uniform` of 1/T.

    Uniform until every timestep has a full history.
    """
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
        place = jnp.sum(jnp.tril(same, -1), axis=1)  # rank among the batch's losses of the same t
        total = jnp.sum(same, axis=1)
        # If the batch has more than `history` losses of one t, only the last ones are kept, so that
        # no slot is written twice.
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
    """Returns SpeeD's p, and the timestep of a pair's second row for each one of its first row.

    For T ≠ 1000 the slope is scaled by 1000/T. M is 642 for linear betas and T = 1000.
    """
    t = np.arange(diffusion.steps)
    slope = np.gradient(np.sqrt(1 - diffusion.alphas_cumprod))
    if config.sampler == 'speed_code':
        # Its change from 5 to 1 takes a few timesteps.
        p = 3 + 2 * np.tanh(1000 * (diffusion.steps * slope - 0.1))
    else:
        p = np.where(t < config.speed_tau * diffusion.steps, config.speed_k, 1.0)
    middle = int(np.argmax(slope < 0.1 / diffusion.steps)) + 1
    return p / p.sum(), np.where(t < middle, middle - t, t - middle)


def _speed(config: TimestepsConfig, diffusion: Diffusion) -> TimestepSampler:
    p, dual = speed_tables(config, diffusion)
    steps = diffusion.steps
    # The distribution of t over both rows of a pair.
    both = (p + np.bincount(dual, weights=p, minlength=steps)) / 2
    importance = (1 / (steps * both)).astype(np.float32)

    def draw(state: State, keys: Key[Array, ' batch'], row: Steps, x0: Array) -> Draw:
        t = inverse_cdf(jnp.asarray(p, jnp.float32), jax.vmap(jax.random.uniform)(keys))
        t = jnp.where(row % 2 == 1, jnp.asarray(dual, jnp.int32)[t], t)
        return Draw(t, jnp.asarray(importance)[t], jnp.ones(t.shape, jnp.float32))

    return TimestepSampler(lambda: (), draw, _keep, keys_in_pairs=True)


class GradientNorms(NamedTuple):
    """State of `adaptive`: estimates the expected norm of the gradient in each bin of timesteps.

    The T timesteps are divided into K = `adaptive_bins` bins of equal width. If c_b samples of a
    batch fall into bin b, and the mean of their w² loss is m_b, the batch updates the state to

        square_b ← e^(−c_b/n) square_b + (1 − e^(−c_b/n)) m_b
        weight_b ← e^(−c_b/n) weight_b + (1 − e^(−c_b/n))

    with n = `adaptive_memory` samples. The averages decay by sample rather than by step, so rarely
    drawn bins are not forgotten sooner.

    Fields:
      weight: 0 before the first sample in a bin; then tends to 1.
      square: decayed sum of w² loss. The estimate of the norm is √(square / weight).
    """

    weight: Float[Array, ' bins']
    square: Float[Array, ' bins']


def gradient_norm_probabilities(
    state: GradientNorms, config: TimestepsConfig, steps: int
) -> Probabilities:
    """Returns p_t = (1 − ω) G_t / Σ_s G_s + ω/T, with ω = `adaptive_uniform`.

    G is the estimated norm at the centre of each bin, and ln G is linear between the centres.
    p is uniform until every bin has had a sample.
    """
    bins, uniform = config.adaptive_bins, config.adaptive_uniform
    mean = state.square / jnp.where(state.weight > 0, state.weight, 1.0)
    largest = jnp.max(mean)
    log_norm = jnp.log(jnp.maximum(mean, 1e-12 * jnp.where(largest > 0, largest, 1.0))) / 2
    # The position of each timestep between the centres of two bins is constant. jnp.interp would
    # search for it in a loop of small kernels.
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
    """Draws each timestep in proportion to the expected norm of its gradient; corrects the loss.

    Training minimises J = Σ_t w_t L_t / T, where w is the loss weighting. With t ~ p, the sample's
    w_t ∇loss_t / (T p_t) estimates ∇J. Its mean is ∇J for every p; its variance is smallest for
    p_t ∝ √E‖w_t ∇loss_t‖² (importance sampling; Alain et al. 2015, arXiv 1511.06481).

    The gradient with respect to the network's output stands in for that of the weights
    (Katharopoulos & Fleuret 2018, arXiv 1803.00942), because the losses already computed give its
    norm. loss_t is the mean of the squared errors r² of the d output values, so its gradient is
    2r/d, and ‖∂(w_t loss_t)/∂output‖² = 4 w_t² loss_t / d. Therefore p_t ∝ √E[w_t² loss_t].

    `GradientNorms` estimates this root, and `gradient_norm_probabilities` turns it into p. The
    factor on the loss is (1/(T p_t))^`adaptive_correction`; a correction of 1 keeps the objective
    J, and `adaptive_uniform` = ω then bounds the factor by 1/ω.

    IDDPM's p ∝ √E[(w loss)²] follows the loss itself and needs ten losses per timestep. The cost of
    this p per step is averages of K elements and a cumulative sum of T; there are no extra forward
    passes. The sampler is our own; `docs/results/methods` compares it with the others.
    """
    bins, memory = config.adaptive_bins, config.adaptive_memory
    # First timestep of each bin, and `steps`. Computed here, as int32 would overflow on the device.
    edges = (-(-np.arange(bins + 1)[None, :] * steps // bins)).astype(np.int32)

    def init() -> GradientNorms:
        return GradientNorms(jnp.zeros(bins, jnp.float32), jnp.zeros(bins, jnp.float32))

    def draw(state: GradientNorms, keys: Key[Array, ' batch'], row: Steps, x0: Array) -> Draw:
        return draw_from(
            gradient_norm_probabilities(state, config, steps), keys, config.adaptive_correction
        )

    def update(state: GradientNorms, t: Steps, loss: PerSample, weight: PerSample) -> GradientNorms:
        # A masked sum: a scatter adds in varying order on GPUs.
        inside = (t[:, None] >= edges[:, :-1]) & (t[:, None] < edges[:, 1:])
        count = jnp.sum(inside.astype(jnp.float32), axis=0)
        total = jnp.sum(jnp.where(inside, (jnp.square(weight) * loss)[:, None], 0.0), axis=0)
        keep = jnp.exp(-count / memory)
        return GradientNorms(
            keep * state.weight + (1 - keep),
            keep * state.square + (1 - keep) * total / jnp.maximum(count, 1.0),
        )

    return TimestepSampler(init, draw, update)


def _infonoise(config: Config, diffusion: Diffusion) -> TimestepSampler:
    levels, options = make_levels(config.timesteps, config.loss, diffusion), config.timesteps

    def draw(state: Errors, keys: Key[Array, ' batch'], row: Steps, x0: Array) -> Draw:
        return draw_from(information_probabilities(state, levels, options), keys, 0.0)

    def update(state: Errors, t: Steps, loss: PerSample, weight: PerSample) -> Errors:
        return add_losses(state, t, loss, levels, options.infonoise_memory)

    return TimestepSampler(functools.partial(start, levels), draw, update)
