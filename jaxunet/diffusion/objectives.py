"""Training objectives of a diffusion model: regression targets, the variational bound, losses.

Sources: those of `jaxunet.diffusion.process`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr
from jaxtyping import Array

from jaxunet.diffusion.process import (
    Diffusion,
    Factor,
    Images,
    Output,
    PerSample,
    Steps,
    Times,
    model_log_variance,
    noise_at,
    posterior,
    predict_x0_and_noise,
    signal_at,
    split_output,
    target_factors,
)


def prediction_target(diffusion: Diffusion, x0: Images, time: Times, noise: Images) -> Images:
    """Returns the network's regression target, which depends on `diffusion.prediction`.

    ε (DDPM eq. 14), x_0, v = √ᾱ ε − √(1 − ᾱ) x_0 (Salimans & Ho section 4), or what the table of
    `jaxunet.diffusion.process` gives for edm and flow.
    """
    if diffusion.prediction == 'epsilon':
        return noise
    if diffusion.prediction == 'x0':
        return x0
    if diffusion.prediction == 'v':
        return signal_at(diffusion, time) * noise - noise_at(diffusion, time) * x0
    a, b = target_factors(diffusion, time)
    return a * x0 + b * noise


def gaussian_kl(mean1: Array, log_variance1: Array, mean2: Array, log_variance2: Array) -> Array:
    """Returns KL(N(mean1, variance1) ‖ N(mean2, variance2)), elementwise, in nats."""
    return 0.5 * (
        log_variance2
        - log_variance1
        - 1
        + jnp.exp(log_variance1 - log_variance2)
        + jnp.square(mean1 - mean2) * jnp.exp(-log_variance2)
    )


def discretized_gaussian_nll(
    x0: Images, mean: Images, log_variance: Images | Factor, bits: int = 8
) -> Images:
    """Returns −log p(x_0), elementwise, in nats (DDPM eq. 13).

    p(x_0) is the Gaussian's mass in the bin of the pixel value, one of 2^bits; `x0` lies on the
    grid 2k/(2^bits − 1) − 1, and the outermost bins extend to infinity. The normal distribution
    function is exact, where guided-diffusion approximates it by a tanh. The mass is bounded below
    by 1e-12, as in guided-diffusion.
    """
    top = 2**bits - 1
    inside = 1 - 0.255 / top  # as guided-diffusion's 0.999 for 8 bits
    inverse_std = jnp.exp(-0.5 * log_variance)
    lower = jnp.where(x0 < -inside, -jnp.inf, (x0 - mean - 1 / top) * inverse_std)
    upper = jnp.where(x0 > inside, jnp.inf, (x0 - mean + 1 / top) * inverse_std)
    # [a, b] and [−b, −a] have the same mass, and the distribution function is more accurate where
    # its values are small.
    mirror = lower + upper > 0
    lower, upper = jnp.where(mirror, -upper, lower), jnp.where(mirror, -lower, upper)
    return -jnp.log(jnp.maximum(ndtr(upper) - ndtr(lower), 1e-12))


def variational_bound(
    diffusion: Diffusion,
    output: Output,
    x0: Images,
    xt: Images,
    t: Steps,
    *,
    variance: str = 'learned',
    clip: bool = False,
    bits: int = 8,
) -> PerSample:
    """Returns the variational bound's term of step t, in bits per dimension.

    L_{t−1} = KL(q(x_{t−1} | x_t, x_0) ‖ p(x_{t−1} | x_t)) (DDPM eq. 5), and at t = 0 the decoder's
    −log p(x_0 | x_1) (eq. 13), both averaged over height, width and channels.

    Args:
      variance: the variance of p: learned, fixed_small or fixed_large (`model_log_variance`).
      clip: the predicted x_0 is clipped to [−1, 1].
      bits: of each channel of a pixel, as `data.bits`.

    Raises:
      ValueError: the network has no learned variance to use.
    """
    prediction, values = split_output(diffusion, output, x0.shape[-1])
    if variance == 'learned' and values is None:
        raise ValueError(
            'variational_bound needs a network with a learned variance (diffusion.learn_sigma=True)'
        )
    true_mean, true_log_variance = posterior(diffusion, x0, xt, t)
    predicted = predict_x0_and_noise(diffusion, prediction, xt, t)[0]
    mean, _ = posterior(diffusion, jnp.clip(predicted, -1, 1) if clip else predicted, xt, t)
    log_variance = model_log_variance(diffusion, values, t, variance)
    nats = jnp.where(
        (t == 0)[:, None, None, None],
        discretized_gaussian_nll(x0, mean, log_variance, bits),
        gaussian_kl(true_mean, true_log_variance, mean, log_variance),
    )
    return jnp.mean(nats, axis=(1, 2, 3)) / math.log(2)


def prior_bound(diffusion: Diffusion, x0: Images) -> PerSample:
    """Returns the variational bound's term L_T, in bits per dimension.

    KL(q(x_T | x_0) ‖ N(0, 1)) (DDPM eq. 5), averaged over height, width and channels. It does not
    depend on the network.
    """
    mean = diffusion.signal[-1] * x0
    log_variance = jnp.asarray(np.log1p(-diffusion.alphas_cumprod[-1]), x0.dtype)
    zero = jnp.zeros_like(mean)
    return jnp.mean(gaussian_kl(mean, log_variance, zero, zero), axis=(1, 2, 3)) / math.log(2)


def per_sample_loss(
    diffusion: Diffusion,
    output: Output,
    x0: Images,
    xt: Images,
    time: Times,
    noise: Images,
    *,
    bits: int = 8,
) -> PerSample:
    """Returns the loss of each sample, float32 of shape (batch,).

    It is the mean squared error of the prediction: DDPM eq. 14 for ε; EDM eq. 8 with its weighting
    λ = 1/c_out², which leaves the plain error of F; flow matching's regression of ε − x_0.

    With a learned variance, IDDPM's hybrid loss (eq. 16) adds vlb_weight · T · L_vlb(t). L_vlb is
    in bits per dimension and has no gradient to the prediction. vlb_weight = 1e-3 equals
    guided-diffusion's RESCALED_MSE loss, and 1/T its MSE loss.

    With `kl_loss` it is T · L_vlb(t) alone, guided-diffusion's RESCALED_KL loss. If no variance is
    learned, the bound has the large fixed one, as in guided-diffusion's scripts.

    Args:
      bits: of each channel of a pixel, as `data.bits`; only the bound depends on them.
    """
    if diffusion.config.kl_loss:
        variance = 'learned' if diffusion.learn_sigma else 'fixed_large'
        bound = variational_bound(diffusion, output, x0, xt, time, variance=variance, bits=bits)
        return diffusion.steps * bound
    prediction, values = split_output(diffusion, output, x0.shape[-1])
    error = jnp.square(prediction - prediction_target(diffusion, x0, time, noise))
    loss = jnp.mean(error, axis=(1, 2, 3))
    if values is None:
        return loss
    frozen = jnp.concatenate([jax.lax.stop_gradient(prediction), values], axis=-1)
    return loss + diffusion.vlb_weight * diffusion.steps * variational_bound(
        diffusion, frozen, x0, xt, time, bits=bits
    )
