"""One batch of the training step: its images, and all random draws for it.

Sample i draws from its own keys, which depend only on the step and on its row in the global batch.
So the draws do not depend on how the batch is split over devices and micro-batches.
`data.noise_assignment` exchanges the keys of the noise between rows
(`jaxunet.training.noise_assignment`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt

from jaxunet.config import Config
from jaxunet.diffusion.process import Diffusion, Images, Times, draw_times, network_input, q_sample
from jaxunet.diffusion.timesteps import Draw, State, TimestepSampler
from jaxunet.model.low_res import images_of, low_res_of
from jaxunet.training.augmentation import augment

# image: uint8 or uint16 (batch, height, width, channels), with data.condition=folder:PATH followed
# by the channels of the pictures (`Config.loaded_shape`); label: int32 (batch,), -1 for none;
# row: int32 (batch,), each sample's row in the global batch.
Batch = dict[str, Array]


class Keys(NamedTuple):
    """Random keys of the samples of a batch, one field for each thing that is drawn."""

    augmentation: Key[Array, ' batch']  # flips, too
    t: Key[Array, ' batch']
    noise: Key[Array, ' batch']
    label: Key[Array, ' batch']
    dropout: Key[Array, ' batch']


class NoisyBatch(NamedTuple):
    """The inputs of the network for one batch, and the targets of its loss.

    Attributes:
      x0: clean images in [-1, 1].
      xt: the images at timestep t of the forward process.
      model_input: `xt` scaled as the objective requires.
      draw: the timesteps and their importance weights.
      time: what the network's time embedding reads: the timesteps, or times drawn within them.
      noise: the Gaussian noise in `xt`.
      labels: class labels, -1 where dropped; None for an unconditional model.
      dropout_keys: one key per sample; None for a model without dropout.
      augmentation: the network's inputs for `data.augment=edm`; None without it.
      low_res: the pictures that the network sees, such as small versions of `x0`; None for others.
    """

    x0: Images
    xt: Images
    model_input: Images
    draw: Draw
    time: Times
    noise: Images
    labels: Int[Array, ' batch'] | None
    dropout_keys: Key[Array, ' batch'] | None
    augmentation: Float[Array, 'batch inputs'] | None
    low_res: Float[Array, 'batch low_height low_width low_channels'] | None

    @property
    def conditions(self) -> tuple[Array | None, ...]:
        """The arguments of `UNet.predict` after the time."""
        return self.labels, self.dropout_keys, self.augmentation, self.low_res


def normalise(
    image: UInt[Array, 'batch height width channels'],
) -> Float[Array, 'batch height width channels']:
    """Maps pixels of 8 or 16 bits to float32 in [-1, 1]."""
    return image.astype(jnp.float32) / (jnp.iinfo(image.dtype).max / 2) - 1


def split_keys(step_key: Key[Array, ''], row: Int[Array, ' batch'], in_pairs: bool) -> Keys:
    """Returns the keys of the samples in these rows of the global batch.

    Args:
      in_pairs: rows 2j and 2j + 1 share the key that draws the timestep.
    """

    def split(row: Array) -> Array:
        keys = jax.vmap(lambda r: jax.random.fold_in(step_key, r))(row)
        return jax.vmap(lambda k: jax.random.split(k, 5), out_axes=1)(keys)

    keys = Keys(*split(row))
    return keys._replace(t=split(row - row % 2)[1]) if in_pairs else keys


def clean_images(config: Config, keys: Keys, batch: Batch) -> Images:
    """Returns the batch's images, normalised and, with `data.augment=flip`, flipped.

    Their own pictures follow them, if there are any (`images_of`).
    """
    x0 = normalise(batch['image'])
    if config.data.augment == 'flip':
        flip = jax.vmap(jax.random.bernoulli)(keys.augmentation)
        x0 = jnp.where(flip[:, None, None, None], x0[:, :, ::-1, :], x0)
    return x0


def augmented_images(
    config: Config, keys: Keys, batch: Batch
) -> tuple[Images, Float[Array, 'batch inputs'] | None]:
    """Returns `clean_images` after all augmentation, and the inputs for `data.augment=edm`."""
    x0 = clean_images(config, keys, batch)
    if config.data.augment == 'edm':
        probability, rule = config.data.augment_probability, config.data.augment_rule
        return augment(x0, keys.augmentation, probability, rule)
    return x0, None


def plain_noise(keys: Key[Array, ' batch'], shape: tuple[int, ...]) -> Images:
    """Returns one sample of standard normal noise, of the shape of an image, for each key."""
    return jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(keys)


def draw_noise(keys: Key[Array, ' batch'], x0: Images, candidates: int) -> Images:
    """Returns standard normal noise for each image, drawn from the image's key.

    With several candidates an image gets the one at the smallest Euclidean distance (immiscible
    diffusion by nearest neighbours: Li et al. 2025, arXiv 2505.18521, section 4). All of them are
    in memory at once: `candidates` times the size of the batch in float32. The nearest one also has
    a slightly smaller norm; the difference falls with the number of pixels.
    """
    shape = x0.shape[1:]
    if candidates == 1:
        return plain_noise(keys, shape)

    def nearest(key: Key[Array, ''], image: Array) -> Array:
        noises = jax.random.normal(key, (candidates, *shape), jnp.float32)
        return noises[jnp.argmin(jnp.sum(jnp.square(noises - image[None]), axis=(1, 2, 3)))]

    return jax.vmap(nearest)(keys, x0)


def noise_batch(
    config: Config,
    diffusion: Diffusion,
    sampler: TimestepSampler,
    sampler_state: State,
    keys: Keys,
    batch: Batch,
) -> NoisyBatch:
    """Draws timesteps, noise and dropped labels, and runs the forward process on the images."""
    loaded, augmentation = augmented_images(config, keys, batch)
    x0 = images_of(config, loaded)
    draw = sampler.draw(sampler_state, keys.t, batch['row'], x0)
    noise = draw_noise(keys.noise, x0, config.data.noise_candidates)
    labels = None
    if config.model.num_classes:
        dropped = jax.vmap(lambda k: jax.random.bernoulli(k, config.model.label_dropout))(
            keys.label
        )
        labels = jnp.where(dropped, -1, batch['label'])
    time = draw_times(diffusion, draw.t, keys.t)
    xt = q_sample(diffusion, x0, time, noise)
    dropout_keys = keys.dropout if config.model.dropout else None
    model_input = network_input(diffusion, xt, time)
    conditions = labels, dropout_keys, augmentation, low_res_of(config, loaded)
    return NoisyBatch(x0, xt, model_input, draw, time, noise, *conditions)
