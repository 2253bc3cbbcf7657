"""Consistency tuning: a trained network learns to jump from any noise level to the image.

The network's prediction of x_0 at noise level t, D(x_t, t), comes to agree with that at a level
r < t on the same path, x = y + σ e with the same image y and noise e, and so at last with y:

    loss = (√(‖D(x_t, t) − target‖² + c²) − c) / (t − r),
    target = D(x_r, r) without gradient, with the same weights and dropout; y where r = 0,
    r = max(t (1 − n(t)/q^(k+1)), 0),   n(t) = 1 + 8/(1 + e^t),

in stage k = 0, 1, ... of the run. Levels are noise-to-signal ratios σ = √((1 − ᾱ)/ᾱ), for flow
σ = t/(1 − t), and D is EDM's denoiser of the network, or x_0 = x − t v of flow. ln σ is normal in
training for both (`jaxunet.diffusion.levels`).

Source: easy consistency tuning (ECT), Geng et al. 2024, arXiv 2406.14548.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxunet.checkpoint.state import TrainState
from jaxunet.config import Config
from jaxunet.config.consistency import q_of
from jaxunet.diffusion.levels import signal_and_noise, time_of_sigma
from jaxunet.diffusion.process import (
    Diffusion,
    Images,
    Output,
    Times,
    network_input,
    predict_x0_and_noise,
    q_sample,
    split_output,
)
from jaxunet.model.unet import Params
from jaxunet.training.batch import Batch, Keys, noise_batch
from jaxunet.training.gradients import Scalar, StepParts

K = 8  # of n(t) = 1 + K/(1 + e^t)

PerSample = Float[Array, ' batch']
Network = Callable[[Images, Times], Output]  # (network's input, time) -> the network's output


def loss_fn(
    parts: StepParts, params: Params, state: TrainState, keys: Keys, batch: Batch, scale: Scalar
) -> tuple[Scalar, tuple[Scalar, None]]:
    """Returns (loss · scale, (loss, None)); takes the place of `gradients.loss_fn`."""
    config = parts.config
    with jax.named_scope('data'):
        noisy = noise_batch(config, parts.diffusion, parts.sampler, state.timesteps, keys, batch)

    def network(weights: Params) -> Network:
        inputs = noisy.labels, noisy.dropout_keys, noisy.augmentation, noisy.low_res
        return lambda seen, time: parts.model.predict(weights, seen, time, *inputs)

    with jax.named_scope('forward'):
        losses = consistency_losses(
            parts.diffusion,
            network(params),
            network(jax.lax.stop_gradient(params)),
            noisy.x0,
            noisy.noise,
            noisy.time,
            decay=decay_at(config, state.step),
        )
        loss = jnp.mean(losses)
        return loss * scale, (loss, None)


def decays(config: Config) -> Float[np.ndarray, ' stages']:
    """Returns 1/q^(k+1) of each stage."""
    return 1 / float(q_of(config)) ** np.arange(1, config.diffusion.consistency_stages + 1)


def decay_at(config: Config, step: Int[Array, '']) -> Scalar:
    """Returns 1/q^(k+1) of the stage in which a step lies."""
    table = decays(config)
    ends = [config.train.steps * k // len(table) for k in range(1, len(table))]
    stage = jnp.sum(step >= jnp.asarray(ends, jnp.int32)) if ends else 0
    return jnp.asarray(table, jnp.float32)[stage]


def earlier_level(sigma: PerSample, decay: float | Scalar) -> tuple[PerSample, PerSample]:
    """Returns r of each level t, and t − r."""
    gap = jnp.minimum(sigma * (1 + K * jax.nn.sigmoid(-sigma)) * decay, sigma)
    return sigma - gap, gap


def consistency_losses(
    diffusion: Diffusion,
    network: Network,
    frozen: Network,
    x0: Images,
    noise: Images,
    time: Times,
    *,
    decay: float | Scalar,
) -> PerSample:
    """Returns the loss of each sample, of shape (batch,); the equations are the module's.

    Args:
      diffusion: of a consistency model.
      network: the network that gets gradients.
      frozen: the same network with the same dropout, for the target.
      time: of the levels t, as the network reads them.
      decay: 1/q^(k+1).
    """
    signal, noise_level = signal_and_noise(diffusion.config, time)
    lower, gap = earlier_level(noise_level / signal, decay)
    reaches = lower > 0
    # The network is never called at level 0, of which edm has no finite time.
    lower_time = time_of_sigma(diffusion.config, jnp.where(reaches, lower, 1))
    target = denoised(diffusion, frozen, x0, noise, lower_time)
    target = jax.lax.stop_gradient(jnp.where(reaches[:, None, None, None], target, x0))
    difference = denoised(diffusion, network, x0, noise, time) - target
    c = diffusion.config.consistency_c
    square = jnp.sum(jnp.square(difference), axis=(1, 2, 3)) + c**2
    # The square root has no derivative at 0.
    norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
    return (norm - c) / gap


def denoised(
    diffusion: Diffusion, network: Network, x0: Images, noise: Images, time: Times
) -> Images:
    """Returns D: the network's prediction of x_0 from x_0 with noise."""
    xt = q_sample(diffusion, x0, time, noise)
    output = network(network_input(diffusion, xt, time), time)
    prediction, _ = split_output(diffusion, output, x0.shape[-1])
    return predict_x0_and_noise(diffusion, prediction, xt, time)[0]
