"""The classifier of noisy images that guides samples to a class.

    the encoder of the UNet → GroupNorm → SiLU → attention pool → logits

Source: Dhariwal & Nichol 2021, arXiv 2105.05233, section 4 (openai/guided-diffusion,
`EncoderUNetModel` with `pool=attention`).
"""

from __future__ import annotations

from typing import ClassVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, Real

from jaxunet.config import Config
from jaxunet.model.blocks import Block, parameter
from jaxunet.model.encoder import Encoder, Layers, encode
from jaxunet.ops.references import XLA
from jaxunet.ops.vocabulary import Ops


def build_classifier(config: Config, classes: int, ops: Ops = XLA) -> NoisyClassifier:
    """Returns the classifier that a config describes, computing in `config.precision`.

    Args:
      config: its model, of square images; its channels, levels and heads.
      classes: number of classes.
    """
    return NoisyClassifier(
        model=config.model,
        attention_levels=config.attention_levels,
        classes=classes,
        side=config.data.image_size[0],
        ops=ops,
        dtype=jnp.dtype(config.precision),
        time_scale=config.diffusion.time_scale,
    )


class NoisyClassifier(Encoder):
    """Predicts the class of a noisy image from the image and its timestep.

    Fields:
      classes: number of classes.
      side: pixels of an image's side; the pool has a position for every pixel of the lowest level.
    """

    FLOAT32: ClassVar[tuple[str, ...]] = (*Encoder.FLOAT32, 'pool')

    classes: int = 0
    side: int = 0

    @nn.compact
    def __call__(
        self, x: Float[Array, 'batch height width channels'], t: Real[Array, ' batch']
    ) -> Float[Array, 'batch classes']:
        """Returns the float32 logits.

        Args:
          x: noisy images, `side` pixels high and wide.
          t: timesteps in [0, T).
        """
        layers = Layers(self, self._embed(t, None, None), None)
        h, _ = encode(self, layers, x)
        active = self.ops.group_norm(h, self.norm('norm_out', h.channels), silu=True)
        lowest = self.side >> (len(self.channels) - 1)
        pool = AttentionPool(
            model=self.model,
            ops=self.ops,
            dtype=jnp.dtype(jnp.float32),
            classes=self.classes,
            pixels=lowest * lowest,
            name='pool',
        )
        return pool(active.astype(jnp.float32))

    def predict(
        self,
        params: PyTree,
        x: Float[Array, 'batch height width channels'],
        t: Real[Array, ' batch'],
    ) -> Float[Array, 'batch classes']:
        """Calls the network with the parameters as an argument; see `__call__`."""
        return cast(Array, self.apply({'params': params}, x, t))


class AttentionPool(Block):
    """Attention of the mean pixel over itself and all pixels, and a projection to the classes.

    In float32. The mean comes before the pixels, and every place adds a learned position. The
    heads have `model.num_head_channels` channels.

    Fields:
      classes: features of the result.
      pixels: number of pixels of x.
    """

    classes: int = 0
    pixels: int = 0

    @nn.compact
    def __call__(
        self, x: Float[Array, 'batch height width channels']
    ) -> Float[Array, 'batch classes']:
        """Returns the logits."""
        batch, channels, width = x.shape[0], x.shape[-1], self.model.num_head_channels
        position = parameter(
            self,
            'position',
            nn.initializers.normal(channels**-0.5),
            (channels, self.pixels + 1),
        )
        x = x.reshape(batch, -1, channels)
        x = jnp.concatenate([x.mean(axis=1, keepdims=True), x], axis=1) + position.T[None]
        kernel, bias = self.kernel('qkv', channels, 3 * channels)
        # Only the first place is read, so only it needs a query.
        first = x[:, 0] @ kernel[:, :channels] + bias[:, :channels]
        rest = x @ kernel[:, channels:] + bias[None, :, channels:]
        query = first.reshape(batch, -1, width)
        keys, values = jnp.split(rest.reshape(batch, x.shape[1], -1, width), 2, axis=2)
        scores = jnp.einsum('bhc,bphc->bhp', query, keys) * width**-0.5
        pooled = jnp.einsum('bhp,bphc->bhc', jax.nn.softmax(scores, axis=-1), values)
        kernel, bias = self.kernel('proj', channels, self.classes)
        return pooled.reshape(batch, channels) @ kernel + bias


def log_probability(
    logits: Float[Array, 'batch classes'], labels: Int[Array, ' batch']
) -> Float[Array, ' batch']:
    """Returns log p(label) of every sample."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
