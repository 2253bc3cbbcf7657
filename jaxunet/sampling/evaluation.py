"""One evaluation of the network: its prediction of x_0 and of the noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxunet.diffusion.process import (
    Diffusion,
    Images,
    Output,
    Times,
    network_input,
    noise_from_x0,
    predict_x0_and_noise,
    split_output,
)
from jaxunet.sampling.classifier_guidance import Gradient, conditioned
from jaxunet.sampling.options import SamplerConfig

Denoiser = Callable[[Images, Times], Output]  # (network's input, time) -> the network's output
# (network's input, time, labels) -> the network's output; label −1 = unconditional.
LabelledDenoiser = Callable[[Images, Times, Int[Array, ' batch']], Output]
# The result that an evaluation passes to the next one; '' = none, velocity = ε − x_0.
Memory = Literal['', 'x0', 'noise', 'velocity']


class Evaluation(NamedTuple):
    """The result of one evaluation of the network.

    Fields:
      x0, noise: the predicted x_0 and ε, clipped and moved to the class as the options say.
      variance_values: the network's outputs for the learned variance; None if it has none.
      class_gradient: the classifier's gradient; None without one.
    """

    x0: Images
    noise: Images
    variance_values: Output | None
    class_gradient: Images | None

    def remembered(self, memory: Memory) -> Images | None:
        """Returns the result that the next evaluation receives; None for ''."""
        if memory == 'velocity':
            return self.noise - self.x0
        return {'': None, 'x0': self.x0, 'noise': self.noise}[memory]


def evaluate(
    denoise: Denoiser,
    x: Images,
    t: Times,
    diffusion: Diffusion,
    config: SamplerConfig,
    class_gradient: Gradient | None,
) -> Evaluation:
    """Evaluates the network at (x, t), with `clip` and the classifier's guidance of `config`."""
    output = denoise(network_input(diffusion, x, t), t)
    prediction, variance_values = split_output(diffusion, output, x.shape[-1])
    x0, noise = predict_x0_and_noise(diffusion, prediction, x, t)
    if config.clip:
        x0 = jnp.clip(x0, -1, 1)
        noise = noise_from_x0(diffusion, x0, x, t)
    gradient = None if class_gradient is None else class_gradient(x, t)
    if gradient is not None and config.name != 'ddpm':
        x0, noise = conditioned(diffusion, x0, noise, gradient, t)
    return Evaluation(x0, noise, variance_values, gradient)
