"""Guidance by another prediction: of the same network without its label, or of a weaker model.

Sources: classifier-free guidance, Ho & Salimans 2022, arXiv 2207.12598; autoguidance, Karras et al.
2024, arXiv 2406.02507; guidance in an interval of noise levels, Kynkäänniemi et al. 2024, arXiv
2404.07724.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float64, Int

from jaxunet.config import Config, to_dict
from jaxunet.diffusion.process import Images, Output, Times
from jaxunet.model.unet import Params
from jaxunet.ops.activation import at_least_float32
from jaxunet.runtime.errors import UserError
from jaxunet.sampling.evaluation import Denoiser, LabelledDenoiser

# Fields of the diffusion process that decide what a prediction means.
LEVELS = ('objective', 'edm_sigma_data')
TIMESTEPS = ('objective', 'steps', 'schedule', 'rescale_timesteps')


class Weaker(NamedTuple):
    """A weaker model of the same images: smaller, or an earlier checkpoint, or both.

    Fields:
      config: of the model; its backend and precision are not used.
      params: its weights, numpy arrays.
      note: says which weights these are.
    """

    config: Config
    params: Params
    note: str

    def fields(self) -> dict[str, object]:
        """Returns everything that a program with this model depends on, except the weights."""
        return {'weaker': to_dict(self.config)}

    def config_beside(self, config: Config) -> Config:
        """Returns its config with the backend and the precision of the model that it guides."""
        return self.config.replace(backend=config.backend, precision=config.precision)


def check_weaker(weaker: Weaker, config: Config, scale: float) -> None:
    """Checks that a model can guide another one.

    Args:
      config: of the model to guide.
      scale: the guidance scale.

    Raises:
      UserError: another image size, other classes or another objective, or no scale.
    """
    if scale == 1:
        raise UserError(
            'guide: has no effect with guidance_scale=1; set guidance_scale, such as 2, or leave '
            'guide out'
        )
    theirs, ours = weaker.config, config
    classes = theirs.model.num_classes
    facts: list[tuple[str, object, object]] = [
        ('images of', theirs.image_shape, ours.image_shape),
        ('pictures of', theirs.low_res_shape, ours.low_res_shape),
    ]
    if classes:  # an unconditional model can guide any
        facts.append(('model.num_classes', classes, ours.model.num_classes))
    facts += [
        (f'diffusion.{name}', getattr(theirs.diffusion, name), getattr(ours.diffusion, name))
        for name in (LEVELS if ours.diffusion.continuous else TIMESTEPS)
    ]
    for name, their, our in facts:
        if their != our:
            raise UserError(
                f'guide: expected a model with {name} {_shown(our)}, as the model that it guides, '
                f'found {_shown(their)}'
            )


def _shown(value: object) -> str:
    return 'x'.join(map(str, value)) if isinstance(value, tuple) else f'{value}'


def guided(
    denoise: LabelledDenoiser,
    labels: Int[Array, ' batch'],
    scale: float,
    weaker: LabelledDenoiser | None = None,
) -> Denoiser:
    """Returns a guided denoiser: reference + scale · (prediction − reference).

    The reference is the unconditional prediction (classifier-free guidance, Ho & Salimans eq. 6,
    with scale = w + 1) or that of a weaker model (autoguidance, Karras et al. 2024 eq. 3). Without
    a weaker model both halves go through the network as one doubled batch; scales 1 and 0 need only
    one. x_0 and v are affine in ε at a given x_t, so guiding any of the three predictions guides ε.
    The learned variance is that of the prediction.

    Args:
      denoise: the network.
      labels: int32 of shape (batch,); −1 = unconditional.
      scale: guidance scale, 0 or more.
      weaker: the network of a weaker model with the same objective.
    """
    if scale == 1:
        return lambda x, t: denoise(x, t, labels)
    if weaker is not None:
        return lambda x, t: _mixed(denoise(x, t, labels), weaker(x, t, labels), scale, x.shape[-1])
    dropped = jnp.full_like(labels, -1)
    if scale == 0:
        return lambda x, t: denoise(x, t, dropped)

    def denoise_both(x: Images, t: Times) -> Output:
        # The two halves of a sample are adjacent, so that a batch split over devices stays in
        # place.
        output = denoise(
            jnp.repeat(x, 2, axis=0),
            jnp.repeat(t, 2),
            jnp.stack([labels, dropped], axis=1).reshape(-1),
        )
        output = output.reshape(len(x), 2, *output.shape[1:])
        return _mixed(output[:, 0], output[:, 1], scale, x.shape[-1])

    return denoise_both


def _mixed(prediction: Output, reference: Output, scale: float, channels: int) -> Output:
    """Returns the guided prediction; the channels of the learned variance stay as they are."""
    kind = at_least_float32(prediction.dtype)
    prediction, reference = prediction.astype(kind), reference.astype(kind)
    base = reference[..., :channels]
    mixed = base + scale * (prediction[..., :channels] - base)
    return jnp.concatenate([mixed, prediction[..., channels:]], axis=-1)


def guided_range(
    limits: tuple[float, float], sigmas: Float64[np.ndarray, ' evaluations']
) -> Bool[np.ndarray, ' evaluations']:
    """Returns the evaluations at noise-to-signal ratios σ of limits[0] < σ ≤ limits[1]."""
    low, high = limits
    within = (sigmas > low) & (sigmas <= high)
    if not within.any():
        raise UserError(
            f'guidance_range: no evaluation lies above {low:g} and up to {high:g}; the noise '
            f'levels of this sampler are {sigmas.min():.4g} to {sigmas.max():.4g}'
        )
    return within
