"""The UNet: one Flax module for the networks of unet.cu, ADM, DDPM, DDPM++ and NCSN++.

    conv_in → down levels (residual blocks, attention) → middle → up levels, which read the skip
    connections → GroupNorm → SiLU → conv_out

`jaxunet.model.blocks` has the blocks. The UNet receives its ops as a field and never asks which
backend it has.

Sources: Ho et al. 2020, arXiv 2006.11239, appendix B; Dhariwal & Nichol 2021, arXiv 2105.05233
(openai/guided-diffusion); Song et al. 2021, arXiv 2011.13456, and Karras et al. 2022, arXiv
2206.00364 (NVlabs/edm); clu0/unet.cu; tqch/ddpm-torch.
"""

from __future__ import annotations

from typing import TypeAlias, cast

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree, Real

from jaxunet.config import Config
from jaxunet.model.encoder import Encoder, Layers, encode
from jaxunet.model.low_res import enlarged
from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.references import XLA
from jaxunet.ops.vocabulary import Ops

Params: TypeAlias = PyTree  # the nested dict of the UNet's float32 arrays


def build_unet(config: Config, ops: Ops = XLA) -> UNet:
    """Returns the UNet that a config describes, computing in `config.precision` on these ops."""
    return UNet(
        model=config.model,
        attention_levels=config.attention_levels,
        out_channels=config.model.image_channels * (2 if config.diffusion.learn_sigma else 1),
        ops=ops,
        dtype=jnp.dtype(config.precision),
        augmentation_inputs=config.augmentation_inputs,
        time_scale=config.diffusion.time_scale,
    )


def init_params(model: UNet, config: Config, key: Array) -> Params:
    """Returns fresh float32 parameters; call it under `jax.jit`, `jax.eval_shape` or `Traced`."""
    labels = jnp.zeros((1,), jnp.int32) if config.model.num_classes else None
    image, t = jnp.zeros((1, *config.image_shape), jnp.float32), jnp.zeros((1,), jnp.int32)
    return model.init(key, image, t, labels)['params']


class UNet(Encoder):
    """Predicts noise, image or velocity from a noisy image and its timestep.

    Fields:
      out_channels: channels of the prediction; twice the image's if it includes a variance.
    """

    out_channels: int = 3

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'batch height width channels'],
        t: Real[Array, ' batch'],
        labels: Int[Array, ' batch'] | None = None,
        dropout_keys: Key[Array, ' batch'] | None = None,
        augmentation: Float[Array, 'batch inputs'] | None = None,
        low_res: Float[Array, 'batch low_height low_width low_channels'] | None = None,
    ) -> Float[Array, 'batch height width out_channels']:
        """Returns the float32 prediction.

        Args:
          x: noisy images.
          t: timesteps in [0, T), or real times on the same scale.
          labels: class labels, -1 = dropped (classifier-free guidance, arXiv 2207.12598); None =
            all dropped.
          dropout_keys: one key per sample; None = no dropout (evaluation).
          augmentation: the augmentation of each image, `augmentation_inputs` numbers; None = zeros,
            no augmentation (sampling).
          low_res: the pictures beside the noisy images, for a model with `low_res_size`.

        Raises:
          ValueError: `low_res` is given to a model that does not take it, or is missing.
          UserError: labels for an unconditional model, or a head width that does not divide the
            channels.
        """
        if self.model.low_res_size and low_res is None and self.is_initializing():
            channels = self.model.condition_channels
            low_res = jnp.zeros((*x.shape[:3], channels), x.dtype) if channels else x
        if bool(self.model.low_res_size) != (low_res is not None):
            size = self.model.low_res_size
            raise ValueError(
                f'low_res: expected if low_res_size is set, and only then, found {size}'
            )
        if low_res is not None:
            x = jnp.concatenate([x, enlarged(low_res, x.shape)], axis=-1)
        layers = Layers(self, self._embed(t, labels, augmentation), dropout_keys)
        h, skips = encode(self, layers, x)
        h = _up(self, layers, h, skips)
        norm = self.norm('norm_out', h.channels)
        kernel, bias = self.kernel('conv_out', 3, 3, h.channels, self.out_channels, kind='last')
        conv = Convolution(image=h, norm=norm, kernel=kernel, shift=bias)
        return self.ops.norm_silu_conv3x3(conv).value.astype(jnp.float32)

    def predict(
        self,
        params: Params,
        x: Float[Array, 'batch height width channels'],
        t: Real[Array, ' batch'],
        labels: Int[Array, ' batch'] | None = None,
        dropout_keys: Key[Array, ' batch'] | None = None,
        augmentation: Float[Array, 'batch inputs'] | None = None,
        low_res: Float[Array, 'batch low_height low_width low_channels'] | None = None,
    ) -> Float[Array, 'batch height width out_channels']:
        """Calls the network with the parameters as an argument; see `__call__`."""
        arguments = (x, t, labels, dropout_keys, augmentation, low_res)
        return cast(Array, self.apply({'params': params}, *arguments))


# A function, not a method: Flax would add a method's name to the names of the ops in a profile.


def _up(unet: UNet, layers: Layers, h: Activation, skips: list[Activation]) -> Activation:
    """Applies the up levels; each block joins the last unread skip connection."""
    m = unet.model
    for level, features in reversed(list(enumerate(unet.channels))):
        for i in range(m.num_res_blocks + 1):
            h = layers.res(f'up_{level}_res_{i}', h.join(skips.pop()), features=features).result
            attends = m.decoder_attention == 'all' or i == m.num_res_blocks
            if attends and level in unet.attention_levels:
                heads = m.num_heads_upsample or m.num_heads
                h = layers.attend(f'up_{level}_attention_{i}', h, heads)
        if level > 0:
            h = layers.resample('up', h, level)
    return h
