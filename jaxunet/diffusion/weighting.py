"""Loss weightings: how much the loss of each timestep counts. Each is a table over the timesteps, fixed or a function of a small state.

A training step minimises mean_i(w(t_i) · loss_i). Weightings that are defined by the signal-to-noise ratio, SNR_t = ᾱ_t / (1 − ᾱ_t),
are meant for the squared error of one quantity; they follow the network's prediction through
    ‖ε − ε̂‖² = SNR ‖x_0 − x̂_0‖² = ᾱ ‖v − v̂‖²,
so that min_snr, soft_min_snr and p2 pose the same problem whatever the network predicts:

    uniform       1
    min_snr       min(SNR, γ) / SNR of ε; x_0: min(SNR, γ), v: min(SNR, γ) / (SNR + 1)    Hang et al. 2023, arXiv 2303.09556
    soft_min_snr  1 / (1 + σ_d² SNR) of ε; x_0: 1 / (σ² + σ_d²), a smooth min(SNR, 1/σ_d²)   crowsonkb/k-diffusion
    p2            1 / (k + SNR)^γ of ε                                                     Choi et al. 2022, arXiv 2204.00227
    speed         the slope of 1 − ᾱ scaled to [1 − λ, λ] for t < τ, then 1                Wang et al. 2024, arXiv 2405.17403
    uncertainty   e^(−u(t)), with u learned                                                Karras et al. 2024, EDM2, arXiv 2312.02696

k-diffusion states its weight, (σ σ_d)² / (σ² + σ_d²)², for the output of EDM's preconditioned network; divided by c_out² that is
1 / (σ² + σ_d²) of the denoised image, with σ² = 1/SNR.

`speed` and `uncertainty` multiply the network's own loss. With a learned variance all of them multiply the whole hybrid loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Float64, Int

from jaxunet.config import CHOICES, LossConfig
from jaxunet.diffusion.process import Diffusion
from jaxunet.runtime.errors import UserError, near_misses

Table = Float[Array, ' steps']
Steps = Int[Array, ' batch']
PerSample = Float[Array, ' batch']
State = Any  # () for a fixed table


class Weighting(NamedTuple):
    """Pure functions of a state that lives on the device."""

    init: Callable[[], State]
    table: Callable[[State], Table]  # the weight of each timestep, float32
    update: Callable[
        [State, Steps, PerSample, PerSample], State
    ]  # from timesteps, losses and 1/(T p_t) of the global batch


class Uncertainty(NamedTuple):
    """What `uncertainty` learns: u(t) = Σ_j weights_j φ_j(t)."""

    weights: Float[Array, ' features']
    optimizer: optax.OptState


def make_weighting(config: LossConfig, diffusion: Diffusion) -> Weighting:
    """The weighting that `config.loss` names. Raises `UserError` for one that does not exist."""
    if config.weighting == 'uncertainty':
        return _uncertainty(config, diffusion)
    table = fixed_table(config, diffusion).astype(np.float32)
    return Weighting(
        lambda: (), lambda _: jnp.asarray(table), lambda state, t, loss, importance: state
    )


def fixed_table(config: LossConfig, diffusion: Diffusion) -> Float64[np.ndarray, ' steps']:
    """The weights of a weighting without a state; the module's docstring has the equations."""
    alphas = diffusion.alphas_cumprod
    snr = alphas / (1 - alphas)
    if config.weighting == 'uniform':
        return np.ones_like(alphas)
    if config.weighting == 'speed':
        return speed_table(alphas, config.speed_lambda, config.speed_tau)
    if config.weighting == 'min_snr':
        of_noise = np.where(
            snr > 0, np.minimum(snr, config.min_snr_gamma) / np.where(snr > 0, snr, 1), 1.0
        )
    elif config.weighting == 'soft_min_snr':
        of_noise = 1 / (1 + config.soft_min_snr_sigma**2 * snr)
    elif config.weighting == 'p2':
        of_noise = (config.p2_k + snr) ** -config.p2_gamma
    else:
        allowed, found = CHOICES['loss.weighting'], config.weighting
        raise UserError(
            f'loss.weighting: expected one of {", ".join(allowed)}, found {found!r}{near_misses(found, allowed)}'
        )
    return of_noise * {'epsilon': 1.0, 'x0': snr, 'v': alphas}[diffusion.prediction]


def speed_table(
    alphas_cumprod: np.ndarray, upper: float, tau: float
) -> Float64[np.ndarray, ' steps']:
    """SpeeD's change-aware weights: `upper` is λ, `tau` is τ/T."""
    slope = np.gradient(1 - alphas_cumprod)
    scaled = (1 - upper) + (2 * upper - 1) * (slope - slope.min()) / (slope.max() - slope.min())
    return np.where(np.arange(len(slope)) < tau * len(slope), scaled, 1.0)


def noise_level_features(diffusion: Diffusion, count: int) -> Float32[np.ndarray, 'steps features']:
    """EDM2's Fourier features √2 cos(2π(f_j c + φ_j)) of c = ln(σ)/4, with fixed f ~ N(0, 1) and φ ~ U(0, 1)."""
    alphas = diffusion.alphas_cumprod
    level = np.log((1 - alphas) / alphas) / 8
    rng = np.random.default_rng(0)
    frequency, phase = rng.standard_normal(count), rng.random(count)
    return (np.sqrt(2) * np.cos(2 * np.pi * (level[:, None] * frequency + phase))).astype(
        np.float32
    )


def _uncertainty(config: LossConfig, diffusion: Diffusion) -> Weighting:
    """EDM2 eq. 14–15 (multi-task uncertainty, Kendall et al. 2018): minimise E[e^(−u(t)) loss + u(t)] over the network and u.

    At its minimum u(t) = ln E[loss | t], so that every timestep contributes the same. u is linear in fixed Fourier features of the noise
    level. Its gradient needs no second pass through the network: with g_i = 1 − e^(−u(t_i)) loss_i it is mean_i(g_i φ(t_i)), from the
    losses that are there already, times 1/(T p_t) if timesteps are not drawn uniformly. Adam takes the steps. u starts at 0 (uniform).
    """
    features = noise_level_features(diffusion, config.uncertainty_features)
    optimizer = optax.adam(config.uncertainty_learning_rate)

    def init() -> Uncertainty:
        weights = jnp.zeros(features.shape[1], jnp.float32)
        return Uncertainty(weights, optimizer.init(weights))

    def table(state: Uncertainty) -> Table:
        return jnp.exp(-jnp.matmul(features, state.weights, precision='highest'))

    def update(state: Uncertainty, t: Steps, loss: PerSample, importance: PerSample) -> Uncertainty:
        residual = (1 - table(state)[t] * loss) * importance / jnp.sum(importance)
        gradient = jnp.matmul(residual, jnp.asarray(features)[t], precision='highest')
        with (
            jax.numpy_dtype_promotion('standard'),
            jax.numpy_rank_promotion('allow'),
        ):  # optax mixes types freely
            steps, moments = optimizer.update(gradient, state.optimizer)
        return Uncertainty(state.weights + steps, moments)

    return Weighting(init, table, update)
