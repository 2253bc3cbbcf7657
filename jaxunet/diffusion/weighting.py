"""Loss weightings: the weight w(t) of each timestep's loss.

A weighting is a table over the timesteps, either fixed or a function of a small state. A training
step minimises mean_i(w(t_i) · loss_i).

    uniform       1
    min_snr       min(SNR, γ) / SNR for ε                        Hang et al. 2023, arXiv 2303.09556
                  min(SNR, γ) for x_0
                  min(SNR, γ) / (SNR + 1) for v
    soft_min_snr  1 / (1 + σ_d² SNR) for ε                       crowsonkb/k-diffusion
                  1 / (σ² + σ_d²) for x_0, a smooth min(SNR, 1/σ_d²)
    p2            1 / (k + SNR)^γ for ε                          Choi et al. 2022, arXiv 2204.00227
    speed         slope of 1 − ᾱ, scaled to [1 − λ, λ], t < τ    Wang et al. 2024, arXiv 2405.17403
                  1 for t ≥ τ; its authors' code has p2 instead
    uncertainty   e^(−u(t)) with a learned u                    Karras et al. 2024, arXiv 2312.02696

SNR_t = ᾱ_t / (1 − ᾱ_t) is the signal-to-noise ratio, and σ² = 1/SNR. Weightings that are functions
of the SNR apply to the squared error of one quantity. They are converted to the network's
prediction by
    ‖ε − ε̂‖² = SNR ‖x_0 − x̂_0‖² = ᾱ ‖v − v̂‖²
             = σ_d²/(σ² + σ_d²) ‖F − F̂‖² (edm) = (1 − t)² ‖u − û‖² (flow),
so that min_snr, soft_min_snr and p2 define the same problem for every prediction.

k-diffusion states its weight as (σ σ_d)² / (σ² + σ_d²)² for the output of EDM's preconditioned
network; dividing by c_out² gives 1 / (σ² + σ_d²) for the denoised image.

For edm and flow a timestep is a slice of noise levels (`jaxunet.diffusion.levels`). It has the
weight of its middle level.

`speed` and `uncertainty` multiply the network's own loss. With a learned variance, every weighting
multiplies the whole hybrid loss; the code of SpeeD multiplies the squared error alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Float64, PyTree

from jaxunet.config import LossConfig
from jaxunet.config.schema import FACTS
from jaxunet.diffusion.process import Diffusion, PerSample, Steps
from jaxunet.runtime.errors import UserError

Table = Float[Array, ' steps']
State: TypeAlias = PyTree  # () for a fixed table


class Weighting(NamedTuple):
    """Pure functions of a state on the device.

    Fields:
      init: returns the initial state.
      table: returns the weight of each timestep, float32 of shape (T,).
      update: returns the next state from the state and the timesteps, losses and 1/(T p_t) of the
        global batch, each of shape (batch,).
    """

    init: Callable[[], State]
    table: Callable[[State], Table]
    update: Callable[[State, Steps, PerSample, PerSample], State]


class Uncertainty(NamedTuple):
    """State of `uncertainty`: the coefficients of u(t) = Σ_j weights_j φ_j(t)."""

    weights: Float[Array, ' features']
    optimizer: optax.OptState


def make_weighting(config: LossConfig, diffusion: Diffusion) -> Weighting:
    """Returns the weighting that `config.weighting` names.

    Raises:
      UserError: an unknown weighting.
    """
    if config.weighting == 'uncertainty':
        return _uncertainty(config, diffusion)
    table = fixed_table(config, diffusion).astype(np.float32)
    return Weighting(
        lambda: (), lambda _: jnp.asarray(table), lambda state, t, loss, importance: state
    )


def fixed_table(config: LossConfig, diffusion: Diffusion) -> Float64[np.ndarray, ' steps']:
    """Returns w(t) of a weighting without a state; equations in the module's docstring.

    Raises:
      UserError: an unknown weighting.
    """
    alphas = diffusion.alphas_cumprod
    snr = alphas / (1 - alphas)
    if config.weighting == 'uniform':
        return np.ones_like(alphas)
    if config.weighting == 'speed':
        return speed_table(alphas, config.speed_lambda, config.speed_tau)
    if config.weighting == 'min_snr':
        clipped = np.minimum(snr, config.min_snr_gamma)
        noise_weight = np.where(snr > 0, clipped / np.where(snr > 0, snr, 1), 1.0)
    elif config.weighting == 'soft_min_snr':
        noise_weight = 1 / (1 + config.soft_min_snr_sigma**2 * snr)
    elif config.weighting == 'p2':
        noise_weight = (config.p2_k + snr) ** -config.p2_gamma
    else:
        raise UserError(f'loss.weighting: {FACTS["loss.weighting"].problem(config.weighting)}')
    return noise_weight * noise_error_factors(diffusion)


def noise_error_factors(diffusion: Diffusion) -> Float64[np.ndarray, ' steps']:
    """Returns the squared error of ε per squared error of the network's prediction."""
    alphas = diffusion.alphas_cumprod
    variance, data = (1 - alphas) / alphas, diffusion.config.edm_sigma_data**2  # σ², σ_d²
    factors = {
        'epsilon': np.ones_like(alphas),
        'x0': 1 / variance,
        'v': alphas,
        'edm': data / (variance + data),
        'flow': 1 / (1 + np.sqrt(variance)) ** 2,
    }
    return factors[diffusion.prediction]


def speed_table(
    alphas_cumprod: np.ndarray, upper: float, tau: float
) -> Float64[np.ndarray, ' steps']:
    """Returns SpeeD's change-aware weights; `upper` is λ and `tau` is τ/T."""
    slope = np.gradient(1 - alphas_cumprod)
    scaled = (1 - upper) + (2 * upper - 1) * (slope - slope.min()) / (slope.max() - slope.min())
    return np.where(np.arange(len(slope)) < tau * len(slope), scaled, 1.0)


def noise_level_features(diffusion: Diffusion, count: int) -> Float32[np.ndarray, 'steps features']:
    """Returns EDM2's Fourier features √2 cos(2π(f_j c + φ_j)) of the noise level c = ln(σ)/4.

    f ~ N(0, 1) and φ ~ U(0, 1) are fixed.
    """
    alphas = diffusion.alphas_cumprod
    level = np.log((1 - alphas) / alphas) / 8
    rng = np.random.default_rng(0)
    frequency, phase = rng.standard_normal(count), rng.random(count)
    return (np.sqrt(2) * np.cos(2 * np.pi * (level[:, None] * frequency + phase))).astype(
        np.float32
    )


def _uncertainty(config: LossConfig, diffusion: Diffusion) -> Weighting:
    """Minimises E[e^(−u(t)) loss + u(t)] over the network and u (EDM2 eq. 14–15).

    This is the multi-task uncertainty of Kendall et al. 2018. At the minimum u(t) = ln E[loss | t],
    so every timestep contributes equally. u is linear in fixed Fourier features φ of the noise
    level and starts at 0 (uniform weights). Its gradient is mean_i(g_i φ(t_i)) with
    g_i = 1 − e^(−u(t_i)) loss_i, which needs no second pass through the network; each term is
    multiplied by 1/(T p_t) if timesteps are not drawn uniformly. Adam takes the steps.
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
        # Optax relies on implicit promotion.
        with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
            steps, moments = optimizer.update(gradient, state.optimizer)
        return Uncertainty(state.weights + steps, moments)

    return Weighting(init, table, update)
