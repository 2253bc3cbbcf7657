"""Consistency tuning: a trained network learns to jump from any noise level to the image.

The network's prediction of x_0 at noise level t, D(x_t, t), comes to agree with that at a level
r < t on the same path, x = y + σ e with the same image y and noise e, and so at last with y:

    loss = (√(‖D(x_t, t) − target‖² + c²) − c) / (t − r),
    target = D(x_r, r) without gradient, with the same weights and dropout; y where r = 0,
    r = max(t (1 − n(t)/q^(k+1)), 0),   n(t) = 1 + 8/(1 + e^t),

in stage k = 0, 1, ... of the run. Levels are noise-to-signal ratios σ = √((1 − ᾱ)/ᾱ), for flow
σ = t/(1 − t), and D is EDM's denoiser of the network, or x_0 = x − t v of flow. ln σ is normal in
training for both (`jaxunet.diffusion.levels`).

With guidance w (`diffusion.consistency_guidance`), the path goes on from x_t to another image:

    y_w = w y + (1 − w) D_teacher(x_t, t | no class),   x_r = x_t + (r − t) (x_t − y_w)/t,

and the target is y_w where r = 0. The mean of y over the images that may be under x_t is the
prediction with a class, so that of x_r is Euler's step from t to r of guided sampling. The teacher
is the network before tuning. Samples whose class is dropped have w = 1.

Sources: easy consistency tuning (ECT), Geng et al. 2024, arXiv 2406.14548; a guided velocity from
one sample of the data, Geng et al. 2025 (MeanFlow), arXiv 2505.13447, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
    PerSample,
    Times,
    network_input,
    predict_x0_and_noise,
    q_sample,
    split_output,
)
from jaxunet.model.unet import Params
from jaxunet.training.batch import Batch, Keys, noise_batch
from jaxunet.training.gradients import StepParts
from jaxunet.training.update import Scalar

K = 8  # of n(t) = 1 + K/(1 + e^t)

Network = Callable[[Images, Times], Output]  # (network's input, time) -> the network's output


class Guidance(NamedTuple):
    """The prediction and the scale that guide the targets.

    Fields:
      teacher: the network before tuning, without class and dropout.
      scale: w of each sample.
    """

    teacher: Network
    scale: PerSample


def loss_fn(
    parts: StepParts, params: Params, state: TrainState, keys: Keys, batch: Batch, scale: Scalar
) -> tuple[Scalar, tuple[Scalar, None]]:
    """Returns (loss · scale, (loss, None)); takes the place of `gradients.loss_fn`."""
    config = parts.config
    with jax.named_scope('data'):
        noisy = noise_batch(config, parts.diffusion, parts.sampler, state.timesteps, keys, batch)

    def network(weights: Params) -> Network:
        return lambda seen, time: parts.model.predict(weights, seen, time, *noisy.conditions)

    def teacher(seen: Images, time: Times) -> Output:
        free = noisy._replace(labels=None, dropout_keys=None)
        return parts.model.predict(state.teacher, seen, time, *free.conditions)

    with jax.named_scope('forward'):
        losses = consistency_losses(
            parts.diffusion,
            network(params),
            network(jax.lax.stop_gradient(params)),
            noisy.x0,
            noisy.noise,
            noisy.time,
            decay=decay_at(config, state.step),
            guidance=guidance_of(config, teacher, noisy.labels),
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
    guidance: Guidance | None = None,
) -> PerSample:
    """Returns the loss of each sample, of shape (batch,); the equations are the module's.

    Args:
      diffusion: of a consistency model.
      network: the network that gets gradients.
      frozen: the same network with the same dropout, for the target.
      time: of the levels t, as the network reads them.
      decay: 1/q^(k+1).
      guidance: None = none.
    """
    signal, noise_level = signal_and_noise(diffusion.config, time)
    sigma = noise_level / signal
    lower, gap = earlier_level(sigma, decay)
    reaches = lower > 0
    # The network is never called at level 0, of which edm has no finite time.
    lower_time = time_of_sigma(diffusion.config, jnp.where(reaches, lower, 1))
    image, direction = x0, noise  # the path to r: image + σ direction
    if guidance is not None:
        image = guided_image(diffusion, guidance, x0, noise, time)
        direction = noise + (x0 - image) / sigma[:, None, None, None]
    target = denoised(diffusion, frozen, image, direction, lower_time)
    target = jax.lax.stop_gradient(jnp.where(reaches[:, None, None, None], target, image))
    difference = denoised(diffusion, network, x0, noise, time) - target
    c = diffusion.config.consistency_c
    square = jnp.sum(jnp.square(difference), axis=(1, 2, 3)) + c**2
    # The square root has no derivative at 0.
    norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
    return (norm - c) / gap


def guidance_of(
    config: Config, teacher: Network, labels: Int[Array, ' batch'] | None
) -> Guidance | None:
    """Returns the guidance of samples with these labels, negative where dropped; None without."""
    if labels is None or not config.diffusion.folds_guidance:
        return None
    return Guidance(teacher, jnp.where(labels < 0, 1, config.diffusion.consistency_guidance))


def guided_image(
    diffusion: Diffusion, guidance: Guidance, x0: Images, noise: Images, time: Times
) -> Images:
    """Returns y_w of the images x_0 = y."""
    scale = guidance.scale[:, None, None, None]
    free = denoised(diffusion, guidance.teacher, x0, noise, time)
    return scale * x0 + (1 - scale) * free


def denoised(
    diffusion: Diffusion, network: Network, x0: Images, noise: Images, time: Times
) -> Images:
    """Returns D: the network's prediction of x_0 from x_0 with noise."""
    xt = q_sample(diffusion, x0, time, noise)
    output = network(network_input(diffusion, xt, time), time)
    prediction, _ = split_output(diffusion, output, x0.shape[-1])
    return predict_x0_and_noise(diffusion, prediction, xt, time)[0]
