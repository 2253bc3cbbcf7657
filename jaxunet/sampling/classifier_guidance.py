"""Classifier guidance: the gradient of a classifier's log p(y | x_t) moves every step to a class.

Source: Dhariwal & Nichol 2021, arXiv 2105.05233, algorithms 1 and 2 (openai/guided-diffusion,
`condition_mean` and `condition_score`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float64, Int

from jaxunet.config import to_dict
from jaxunet.diffusion.process import Diffusion, Images, Steps, at_timestep, noise_at, respace
from jaxunet.model.noisy_classifier import NoisyClassifier, log_probability
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.solvers import Coefficients
from jaxunet.weights.noisy_classifier import Classifier

SCALE = 1.0  # default factor on the gradient
Gradient = Callable[[Images, Steps], Images]  # (x_t, t) -> s ∇ log p(y | x_t)


class Guide(NamedTuple):
    """A classifier and how strongly it guides.

    Fields:
      scale: s, the factor on its gradient; 0 or more.
    """

    classifier: Classifier
    scale: float

    def fields(self) -> dict[str, object]:
        """Returns everything that a program with this guide depends on, except the weights."""
        config = to_dict(self.classifier.config)
        return {'classifier': config, 'classes': self.classifier.classes, 'scale': self.scale}


def class_gradient(
    network: NoisyClassifier, params: object, labels: Int[Array, ' batch'], scale: float
) -> Gradient:
    """Returns the function that computes s ∇ log p(y | x_t).

    Args:
      network: the classifier, with these parameters.
      labels: y of every sample.
      scale: s.
    """

    def total(x: Images, t: Steps) -> Array:
        return log_probability(network.predict(params, x, t), labels).sum()

    gradient = jax.grad(total)
    return lambda x, t: scale * gradient(x, t)


def conditioned(
    diffusion: Diffusion, x0: Images, noise: Images, gradient: Images, t: Steps
) -> tuple[Images, Images]:
    """Returns (x_0, ε) with the classifier's gradient in the score (algorithm 2).

    ε' = ε − √(1 − ᾱ) s ∇ log p(y | x_t), and x_0' follows from it. This suits samplers that are
    functions of the score: all but `ddpm`, whose mean gets variance · s ∇ log p(y | x_t) instead
    (algorithm 1).
    """
    shift = noise_at(diffusion, t) * gradient
    return x0 + at_timestep(diffusion.noise_to_signal, t) * shift, noise - shift


def fixed_variances(
    diffusion: Diffusion, coefficients: Coefficients, variance: str
) -> Float64[np.ndarray, ' evaluations']:
    """Returns the variance of each step of `ddpm`, which multiplies the gradient.

    This is the variance of the noise that the step adds: 0 for the last step, which leads to the
    image. With `fixed_large`, the last step takes the posterior's variance of the step before, as
    in guided-diffusion.
    """
    variances = coefficients.draw**2
    if variance == 'fixed_large':
        timesteps = coefficients.timesteps
        spaced = respace(diffusion, np.unique(timesteps))
        variances[timesteps == timesteps.min()] = np.exp(spaced.posterior_log_variance[0])
    return variances


def check_guide(guide: Guide, diffusion: Diffusion, num_classes: int) -> None:
    """Checks that a classifier can guide a model.

    Args:
      num_classes: number of classes of the model; 0 = unconditional.

    Raises:
      UserError: the scale is out of range, or the model has other classes or no timesteps.
    """
    if not (np.isfinite(guide.scale) and guide.scale >= 0):
        raise UserError(f'classifier_scale: expected 0 (no guidance) or more, found {guide.scale}')
    if diffusion.continuous:
        raise UserError(
            f'classifier: reads the timesteps of the objectives epsilon, x0 and v, which a model '
            f'with diffusion.objective={diffusion.objective} does not have; leave it out'
        )
    classes = guide.classifier.classes
    if num_classes not in (0, classes):
        raise UserError(
            f'classifier: has {classes} classes, but the model has {num_classes} '
            '(model.num_classes); give one of the same classes'
        )
