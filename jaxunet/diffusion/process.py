"""The diffusion process: noise schedules, forward process, predictions and posteriors.

Timesteps are t = 0..T−1, where t = 0 is the least noisy; step t of the papers is t − 1 here. Tables
are computed in float64 and stored in float32; all arithmetic on images is float32.

Sources: DDPM, Ho et al. 2020, arXiv 2006.11239; IDDPM, Nichol & Dhariwal 2021, arXiv 2102.09672
(openai/guided-diffusion); v-prediction, Salimans & Ho 2022, arXiv 2202.00512.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int

from jaxunet.config import CHOICES, DiffusionConfig
from jaxunet.runtime.errors import UserError, near_misses

Images = Float32[Array, 'batch height width channels']
# outputs = channels, or 2 · channels with a learned variance.
Output = Float[Array, 'batch height width outputs']
Steps = Int[Array, ' batch']
Table = Float32[np.ndarray, ' steps']


@dataclass(frozen=True, eq=False)
class Diffusion:
    """The constants of one diffusion process of T steps; made by `make_diffusion` or `respace`.

    The tables are read-only NumPy arrays of shape (T,). Jitted functions close over them, so that
    XLA sees constants. Instances are compared by identity and can be static arguments.
    """

    prediction: str  # what the network outputs: epsilon | x0 | v
    learn_sigma: bool  # the network also outputs the variance, as C more channels
    vlb_weight: float  # weight of the variational bound in the hybrid loss
    betas: Float64[np.ndarray, ' steps']  # β
    alphas_cumprod: Float64[np.ndarray, ' steps']  # ᾱ
    signal: Table  # √ᾱ
    noise: Table  # √(1 − ᾱ)
    inverse_signal: Table  # 1/√ᾱ
    noise_to_signal: Table  # √(1/ᾱ − 1)
    posterior_x0: Table  # DDPM eq. 7: the posterior mean's factor on x_0
    posterior_xt: Table  # the posterior mean's factor on x_t
    posterior_log_variance: Table  # log β̃, clipped at t = 0
    log_betas: Table  # log β

    @property
    def steps(self) -> int:
        """T, the number of timesteps."""
        return len(self.betas)


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
    allowed = CHOICES['diffusion.schedule']
    raise UserError(
        f'diffusion.schedule: expected one of {", ".join(allowed)}, '
        f'found {schedule!r}{near_misses(schedule, allowed)}'
    )


def make_diffusion(config: DiffusionConfig) -> Diffusion:
    """Returns the process that `config.diffusion` describes.

    Raises:
      UserError: an unknown schedule or prediction, or too few steps.
    """
    allowed, found = CHOICES['diffusion.prediction'], config.prediction
    if found not in allowed:
        raise UserError(
            f'diffusion.prediction: expected one of {", ".join(allowed)}, '
            f'found {found!r}{near_misses(found, allowed)}'
        )
    alphas_cumprod = np.cumprod(1 - make_betas(config.schedule, config.steps))
    return _from_alphas_cumprod(
        alphas_cumprod, config.prediction, config.learn_sigma, config.vlb_weight
    )


def respace(diffusion: Diffusion, timesteps: Int[np.ndarray, ' subset']) -> Diffusion:
    """Returns the process that visits only `timesteps` (ascending), with the same ᾱ at each.

    β_i = 1 − ᾱ_{t_i} / ᾱ_{t_{i−1}} (IDDPM eq. 19).
    """
    return _from_alphas_cumprod(
        diffusion.alphas_cumprod[timesteps],
        diffusion.prediction,
        diffusion.learn_sigma,
        diffusion.vlb_weight,
    )


def _from_alphas_cumprod(
    alphas_cumprod: np.ndarray, prediction: str, learn_sigma: bool, vlb_weight: float
) -> Diffusion:
    previous = np.append(1.0, alphas_cumprod[:-1])
    betas = 1 - alphas_cumprod / previous
    posterior_variance = betas * (1 - previous) / (1 - alphas_cumprod)
    # β̃ is 0 at t = 0, where the posterior is a point; IDDPM's code uses the value of t = 1 there. A
    # process of one step has only its β.
    posterior_variance[0] = posterior_variance[1] if len(betas) > 1 else betas[0]

    def table(values: np.ndarray) -> np.ndarray:
        values = values.astype(np.float32)
        values.flags.writeable = False
        return values

    betas.flags.writeable = False
    alphas_cumprod.flags.writeable = False
    return Diffusion(
        prediction=prediction,
        learn_sigma=learn_sigma,
        vlb_weight=vlb_weight,
        betas=betas,
        alphas_cumprod=alphas_cumprod,
        signal=table(np.sqrt(alphas_cumprod)),
        noise=table(np.sqrt(1 - alphas_cumprod)),
        inverse_signal=table(np.sqrt(1 / alphas_cumprod)),
        noise_to_signal=table(np.sqrt(1 / alphas_cumprod - 1)),
        posterior_x0=table(np.sqrt(previous) * betas / (1 - alphas_cumprod)),
        posterior_xt=table(np.sqrt(1 - betas) * (1 - previous) / (1 - alphas_cumprod)),
        posterior_log_variance=table(np.log(posterior_variance)),
        log_betas=table(np.log(betas)),
    )


def at_timestep(table: np.ndarray, t: Steps) -> Float32[Array, 'batch 1 1 1']:
    """Returns the table's value at the t of each sample, broadcastable to images."""
    return jnp.asarray(table)[t][:, None, None, None]


def q_sample(diffusion: Diffusion, x0: Images, t: Steps, noise: Images) -> Images:
    """Returns x_t = √ᾱ_t x_0 + √(1 − ᾱ_t) ε, the forward process from x_0 to x_t (DDPM eq. 4)."""
    return at_timestep(diffusion.signal, t) * x0 + at_timestep(diffusion.noise, t) * noise


def split_output(
    diffusion: Diffusion, output: Output, channels: int
) -> tuple[Images, Images | None]:
    """Splits the network's output into float32 (prediction, variance values).

    The variance values are None without a learned variance.

    Raises:
      ValueError: the output does not have the expected number of channels.
    """
    expected = channels * (2 if diffusion.learn_sigma else 1)
    if output.shape[-1] != expected:
        raise ValueError(
            f'network output: expected {expected} channels for {channels} image channels with '
            f'learn_sigma={diffusion.learn_sigma}, found {output.shape[-1]}'
        )
    output = output.astype(jnp.float32)
    return output[..., :channels], output[..., channels:] if diffusion.learn_sigma else None


def predict_x0_and_noise(
    diffusion: Diffusion, prediction: Images, xt: Images, t: Steps
) -> tuple[Images, Images]:
    """Returns (x_0, ε) for the network's prediction at x_t.

    DDPM eq. 15 for a network that predicts ε, Salimans & Ho appendix D for v.
    """
    if diffusion.prediction == 'epsilon':
        scaled = at_timestep(diffusion.inverse_signal, t) * xt
        return scaled - at_timestep(diffusion.noise_to_signal, t) * prediction, prediction
    if diffusion.prediction == 'x0':
        return prediction, noise_from_x0(diffusion, prediction, xt, t)
    signal, noise = at_timestep(diffusion.signal, t), at_timestep(diffusion.noise, t)
    return signal * xt - noise * prediction, noise * xt + signal * prediction


def noise_from_x0(diffusion: Diffusion, x0: Images, xt: Images, t: Steps) -> Images:
    """Returns the ε that leads from x_0 to x_t (DDPM eq. 4, solved for ε)."""
    return (xt - at_timestep(diffusion.signal, t) * x0) / at_timestep(diffusion.noise, t)


def posterior(
    diffusion: Diffusion, x0: Images, xt: Images, t: Steps
) -> tuple[Images, Float32[Array, 'batch 1 1 1']]:
    """Returns the mean and log variance of q(x_{t−1} | x_t, x_0) (DDPM eq. 6–7).

    The variance is 0 at t = 0; its logarithm is clipped to the value at t = 1, as in
    guided-diffusion.
    """
    mean = at_timestep(diffusion.posterior_x0, t) * x0 + at_timestep(diffusion.posterior_xt, t) * xt
    return mean, at_timestep(diffusion.posterior_log_variance, t)


def learned_log_variance(diffusion: Diffusion, values: Images, t: Steps) -> Images:
    """Returns the learned log variance w log β + (1 − w) log β̃ (IDDPM eq. 15).

    Args:
      values: the network's variance channels; w = (values + 1)/2 as in guided-diffusion.
    """
    weight = (values + 1) / 2
    upper = weight * at_timestep(diffusion.log_betas, t)
    lower = (1 - weight) * at_timestep(diffusion.posterior_log_variance, t)
    return upper + lower
