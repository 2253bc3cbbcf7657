"""The diffusion process: noise schedules, forward process, predictions and posteriors.

Timesteps are t = 0..T−1, where t = 0 is the least noisy; step t of the papers is t − 1 here. Tables
are computed in float64 and stored in float32.

The *time* of a noise level is what the network's time embedding reads: the timestep t, or a real
number where noise levels are continuous (`jaxunet.diffusion.levels`). Functions of a time take
either. Images are x_t = √ᾱ x_0 + √(1 − ᾱ) ε for every objective. The objectives differ in what the
network sees and in what it predicts:

    objective   network's input             network's prediction
    epsilon     x_t                         ε
    x0          x_t                         x_0
    v           x_t                         √ᾱ ε − √(1 − ᾱ) x_0
    edm         x_t / √(1 − ᾱ + ᾱ σ_d²)     (√(1 − ᾱ)/σ_d x_0 − √ᾱ σ_d ε) / √(1 − ᾱ + ᾱ σ_d²)
    flow        x_t / (√ᾱ + √(1 − ᾱ))       ε − x_0

In these coordinates the row of edm is the input c_in x and the output F of EDM's preconditioned
network (table 1), and the input of flow is (1 − t) x_0 + t ε.

Sources: DDPM, Ho et al. 2020, arXiv 2006.11239; IDDPM, Nichol & Dhariwal 2021, arXiv 2102.09672
(openai/guided-diffusion); v-prediction, Salimans & Ho 2022, arXiv 2202.00512; those of
`jaxunet.diffusion.levels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int, Key, Real

from jaxunet.config import DiffusionConfig
from jaxunet.config.schema import FACTS
from jaxunet.diffusion.levels import middle_times, signal_and_noise, time_of_quantile
from jaxunet.diffusion.schedules import make_betas
from jaxunet.runtime.errors import UserError

Images = Float[Array, 'batch height width channels']
# outputs = channels, or 2 · channels with a learned variance.
Output = Float[Array, 'batch height width outputs']
Steps = Int[Array, ' batch']
Times = Real[Array, ' batch']  # timesteps, or real times
PerSample = Float[Array, ' batch']
Factor = Float[Array, 'batch 1 1 1']  # broadcasts to images
Table = Float32[np.ndarray, ' steps']


@dataclass(frozen=True, eq=False)
class Diffusion:
    """The constants of one diffusion process of T steps; made by `make_diffusion` or `respace`.

    The tables are read-only NumPy arrays of shape (T,). Jitted functions close over them, so that
    XLA sees constants. Instances are compared by identity and can be static arguments.
    """

    config: DiffusionConfig
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
    def objective(self) -> str:
        """The objective of training: a prediction, or consistency."""
        return self.config.objective

    @property
    def prediction(self) -> str:
        """The network's prediction: epsilon, x0, v, edm or flow."""
        return self.config.prediction

    @property
    def continuous(self) -> bool:
        """Noise levels are continuous; the tables are those at the middle of each slice."""
        return self.config.continuous

    @property
    def learn_sigma(self) -> bool:
        """The network also outputs the variance, as C more channels."""
        return self.config.learn_sigma

    @property
    def vlb_weight(self) -> float:
        """Weight of the variational bound in the hybrid loss."""
        return self.config.vlb_weight

    @property
    def steps(self) -> int:
        """T, the number of timesteps."""
        return len(self.betas)


def make_diffusion(config: DiffusionConfig) -> Diffusion:
    """Returns the process that `config.diffusion` describes.

    Raises:
      UserError: an unknown schedule or objective, or too few steps.
    """
    if problem := FACTS['diffusion.objective'].problem(config.objective):
        raise UserError(f'diffusion.objective: {problem}')
    if config.continuous:
        signal, _ = signal_and_noise(config, middle_times(config))
        return _from_alphas_cumprod(signal**2, config)
    return _from_alphas_cumprod(np.cumprod(1 - make_betas(config.schedule, config.steps)), config)


def respace(diffusion: Diffusion, timesteps: Int[np.ndarray, ' subset']) -> Diffusion:
    """Returns the process that visits only `timesteps` (ascending), with the same ᾱ at each.

    β_i = 1 − ᾱ_{t_i} / ᾱ_{t_{i−1}} (IDDPM eq. 19).
    """
    return _from_alphas_cumprod(diffusion.alphas_cumprod[timesteps], diffusion.config)


def _from_alphas_cumprod(alphas_cumprod: np.ndarray, config: DiffusionConfig) -> Diffusion:
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
        config=config,
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


def signal_at(diffusion: Diffusion, time: Times) -> Factor:
    """Returns √ᾱ at the time of each sample."""
    if diffusion.continuous:
        return signal_and_noise(diffusion.config, time)[0][:, None, None, None]
    return at_timestep(diffusion.signal, time)


def noise_at(diffusion: Diffusion, time: Times) -> Factor:
    """Returns √(1 − ᾱ) at the time of each sample."""
    if diffusion.continuous:
        return signal_and_noise(diffusion.config, time)[1][:, None, None, None]
    return at_timestep(diffusion.noise, time)


def q_sample(diffusion: Diffusion, x0: Images, time: Times, noise: Images) -> Images:
    """Returns x_t = √ᾱ_t x_0 + √(1 − ᾱ_t) ε, the forward process from x_0 to x_t (DDPM eq. 4)."""
    return signal_at(diffusion, time) * x0 + noise_at(diffusion, time) * noise


def draw_times(diffusion: Diffusion, t: Steps, keys: Key[Array, ' batch']) -> Times:
    """Returns the times of training samples: t itself, or a time drawn within slice t.

    Args:
      keys: one per sample; only continuous objectives draw from them.
    """
    if not diffusion.continuous:
        return t
    within = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1)))(keys)
    return time_of_quantile(diffusion.config, (t.astype(jnp.float32) + within) / diffusion.steps)


def middle_time(diffusion: Diffusion, t: Steps) -> Times:
    """Returns the times of timesteps: t itself, or the middle of slice t."""
    if not diffusion.continuous:
        return t
    return jnp.asarray(middle_times(diffusion.config), jnp.float32)[t]


def network_input(diffusion: Diffusion, xt: Images, time: Times) -> Images:
    """Returns the network's input for x_t; see the module's table."""
    if diffusion.prediction == 'edm':
        return xt / _edm_length(diffusion, time)
    if diffusion.prediction == 'flow':
        return xt / (signal_at(diffusion, time) + noise_at(diffusion, time))
    return xt


def _edm_length(diffusion: Diffusion, time: Times) -> Factor:
    """Returns √(1 − ᾱ + ᾱ σ_d²): the standard deviation of x_t if that of pixels is σ_d."""
    data = diffusion.config.edm_sigma_data
    return jnp.sqrt(noise_at(diffusion, time) ** 2 + (data * signal_at(diffusion, time)) ** 2)


def split_output(
    diffusion: Diffusion, output: Output, channels: int
) -> tuple[Images, Images | None]:
    """Splits the network's output into (prediction, variance values), at least float32.

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
    output = output.astype(np.promote_types(output.dtype, np.float32))
    return output[..., :channels], output[..., channels:] if diffusion.learn_sigma else None


def target_factors(diffusion: Diffusion, time: Times) -> tuple[Factor, Factor]:
    """Returns (a, b) of the prediction a x_0 + b ε of a continuous objective.

    Raises:
      ValueError: another objective.
    """
    if diffusion.prediction == 'edm':
        data, length = diffusion.config.edm_sigma_data, _edm_length(diffusion, time)
        signal, noise = signal_at(diffusion, time), noise_at(diffusion, time)
        return noise / (data * length), -data * signal / length
    if diffusion.prediction == 'flow':
        one = jnp.ones_like(signal_at(diffusion, time))
        return -one, one
    if diffusion.prediction == 'v':
        return -noise_at(diffusion, time), signal_at(diffusion, time)
    raise ValueError(f'{diffusion.prediction} is not an objective with continuous noise levels')


def predict_x0_and_noise(
    diffusion: Diffusion, prediction: Images, xt: Images, time: Times
) -> tuple[Images, Images]:
    """Returns (x_0, ε) for the network's prediction at x_t.

    This is DDPM eq. 15 for a network that predicts ε, and Salimans & Ho appendix D for v. For edm
    and flow it solves x_t = √ᾱ x_0 + √(1 − ᾱ) ε and prediction = a x_0 + b ε for x_0 and ε.
    """
    if diffusion.prediction == 'epsilon':
        scaled = at_timestep(diffusion.inverse_signal, time) * xt
        return scaled - at_timestep(diffusion.noise_to_signal, time) * prediction, prediction
    if diffusion.prediction == 'x0':
        return prediction, noise_from_x0(diffusion, prediction, xt, time)
    signal, noise = signal_at(diffusion, time), noise_at(diffusion, time)
    if diffusion.prediction == 'v':
        return signal * xt - noise * prediction, noise * xt + signal * prediction
    a, b = target_factors(diffusion, time)
    determinant = signal * b - noise * a
    return (
        (b * xt - noise * prediction) / determinant,
        (signal * prediction - a * xt) / determinant,
    )


def noise_from_x0(diffusion: Diffusion, x0: Images, xt: Images, time: Times) -> Images:
    """Returns the ε that leads from x_0 to x_t (DDPM eq. 4, solved for ε)."""
    return (xt - signal_at(diffusion, time) * x0) / noise_at(diffusion, time)


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


def model_log_variance(
    diffusion: Diffusion, values: Images | None, t: Steps, variance: str
) -> Images | Factor:
    """Returns the log variance of p(x_{t−1} | x_t), broadcastable to images.

    Args:
      values: the network's variance channels; only `learned` reads them.
      variance: learned | fixed_small: β̃ | fixed_large: β, but β̃ of t = 1 at t = 0, as in
        guided-diffusion.
    """
    if variance == 'learned':
        assert values is not None
        return learned_log_variance(diffusion, values, t)
    small = diffusion.posterior_log_variance
    large = np.append(small[:1], diffusion.log_betas[1:])
    return at_timestep({'fixed_small': small, 'fixed_large': large}[variance], t)
