"""The UNet: one Flax module for the networks of unet.cu, guided-diffusion (ADM) and DDPM.

    conv_in → down levels (residual blocks, attention) → middle → up levels, which read the skip
    connections → GroupNorm → SiLU → conv_out

`jaxunet.model.blocks` has the blocks. The UNet receives its ops as a field and never asks which
backend it has.

Sources: Ho et al. 2020, arXiv 2006.11239, appendix B; Dhariwal & Nichol 2021, arXiv 2105.05233
(openai/guided-diffusion); clu0/unet.cu; tqch/ddpm-torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree, Real

from jaxunet.config import Config
from jaxunet.model.blocks import (
    Affine,
    AttentionBlock,
    Block,
    Resample,
    ResBlock,
    average_pool,
    nearest,
)
from jaxunet.model.embeddings import timestep_embedding
from jaxunet.ops.activation import Activation
from jaxunet.ops.vocabulary import Ops, WithInput
from jaxunet.runtime.errors import UserError

Params: TypeAlias = PyTree  # the nested dict of the UNet's float32 arrays
TIME_EMBEDDING = 'time_embed_'  # layers that always compute in float32
AUGMENTATION = f'{TIME_EMBEDDING}augmentation'  # the layer of `augmentation_inputs`


def build_unet(config: Config, ops: Ops) -> UNet:
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
    """Returns fresh float32 parameters; call it under `jax.jit` or `jax.eval_shape`."""
    labels = jnp.zeros((1,), jnp.int32) if config.model.num_classes else None
    return model.init(
        key, jnp.zeros((1, *config.image_shape), jnp.float32), jnp.zeros((1,), jnp.int32), labels
    )['params']


class _Layers(NamedTuple):
    """Builds and applies the blocks of one call of a UNet, by their names.

    Fields:
      res: a residual block.
      attend: an attention block, given its name, its input and the number of heads.
      resample: the change of resolution after a level, 'down' or 'up'.
    """

    res: Callable[..., WithInput[Activation]]
    attend: Callable[[str, Activation, int], Activation]
    resample: Callable[[str, Activation, int], Activation]


class UNet(Block):
    """Predicts noise, image or velocity from a noisy image and its timestep.

    Fields:
      attention_levels: levels (0 = full resolution) whose residual blocks are followed by
        attention.
      out_channels: channels of the prediction; twice the image's if it includes a variance.
      augmentation_inputs: numbers by which the network is told how an image was augmented; 0 = it
        is not told. They are added to the time's sinusoids through a linear layer without bias, so
        that zeros have no effect (EDM, arXiv 2206.00364, appendix F.2).
      time_scale: factor on t before its embedding.
    """

    attention_levels: tuple[int, ...] = ()
    out_channels: int = 3
    augmentation_inputs: int = 0
    time_scale: float = 1.0

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'batch height width channels'],
        t: Real[Array, ' batch'],
        labels: Int[Array, ' batch'] | None = None,
        dropout_keys: Key[Array, ' batch'] | None = None,
        augmentation: Float[Array, 'batch inputs'] | None = None,
    ) -> Float[Array, 'batch height width out_channels']:
        """Returns the float32 prediction.

        Args:
          x: noisy images.
          t: timesteps in [0, T), or real times on a like scale.
          labels: class labels, -1 = dropped (classifier-free guidance, arXiv 2207.12598); None =
            all dropped.
          dropout_keys: one key a sample; None = no dropout (evaluation).
          augmentation: how the images were augmented, `augmentation_inputs` numbers each; None =
            not at all (sampling), which is the same as zeros.

        Raises:
          UserError: labels for an unconditional model, or a head width that does not divide the
            channels.
        """
        m = self.model
        embedding = self._embed(t, labels, augmentation)
        remat = nn.remat if m.remat else lambda block: block
        fields = {'model': m, 'ops': self.ops, 'dtype': self.dtype}
        res_block, projections = (
            functools.partial(remat(ResBlock), **fields),
            self._project(embedding),
        )
        attention = functools.partial(remat(AttentionBlock), **fields)
        channels = [int(mult * m.base_channels) for mult in m.channel_mult]

        def res(name: str, x: Activation, **options: int | bool | str) -> WithInput[Activation]:
            return res_block(name=name, **options)(
                x, embedding, dropout_keys, projections.get(name)
            )

        def attend(name: str, h: Activation, num_heads: int) -> Activation:
            return attention(num_heads=num_heads, name=name)(h)

        def resample(direction: str, h: Activation, level: int) -> Activation:
            return self._resample(res, h, direction, level)

        layers = _Layers(res, attend, resample)
        kernel, bias = self.kernel('conv_in', 3, 3, x.shape[-1], channels[0])
        h = self.ops.conv3x3(Activation.of(x.astype(self.dtype)), kernel, bias)
        h, skips = _down(self, layers, h, channels)
        h, (skip,) = res('middle_res_0', h, features=channels[-1], skip=True)
        h = attend('middle_attention', h, m.num_heads)
        h = res('middle_res_1', h, features=channels[-1]).result
        h = _up(self, layers, h, channels, [*skips, skip])
        scale, offset = Affine(h.channels, name='norm_out')()
        kernel, bias = self.kernel('conv_out', 3, 3, h.channels, self.out_channels, zero=True)
        return self.ops.norm_silu_conv3x3(h, scale, offset, kernel, bias, **self.norm).value.astype(
            jnp.float32
        )

    def predict(
        self,
        params: Params,
        x: Float[Array, 'batch height width channels'],
        t: Real[Array, ' batch'],
        labels: Int[Array, ' batch'] | None = None,
        dropout_keys: Key[Array, ' batch'] | None = None,
        augmentation: Float[Array, 'batch inputs'] | None = None,
    ) -> Float[Array, 'batch height width out_channels']:
        """Calls the network with the parameters as an argument; see `__call__`."""
        return cast(Array, self.apply({'params': params}, x, t, labels, dropout_keys, augmentation))

    def narrowed(self, params: Params, narrow: Callable[[list[Array]], Sequence[Array]]) -> Params:
        """Returns the parameters for `predict` with all kernels in `dtype`, converted together.

        Without it every layer converts its own kernel, one launch a layer. Float32 networks get
        `params` back.

        Args:
          narrow: converts a list of float32 arrays to `dtype`.
        """
        if jnp.dtype(self.dtype).itemsize > 2:
            return params
        paths, structure = jax.tree.flatten_with_path(params)
        at = [
            i
            for i, (path, _) in enumerate(paths)
            if path[-1].key == 'kernel' and not path[0].key.startswith(TIME_EMBEDDING)
        ]
        leaves = [leaf for _, leaf in paths]
        for i, leaf in zip(at, narrow([leaves[i] for i in at]), strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(structure, leaves)

    def _embed(
        self,
        t: Real[Array, ' batch'],
        labels: Int[Array, ' batch'] | None,
        augmentation: Float[Array, 'batch inputs'] | None,
    ) -> Float[Array, 'batch width']:
        """Returns the time (and class) embedding, in float32: small, and read by every block."""
        m = self.model
        width = 4 * m.base_channels
        if self.time_scale != 1:
            t = t.astype(jnp.float32) * self.time_scale
        waves = timestep_embedding(
            t, m.base_channels, max_period=m.max_period, order=m.time_embedding
        )
        float32 = jnp.dtype(jnp.float32)
        if self.augmentation_inputs and self.is_initializing():
            augmentation = jnp.zeros((t.shape[0], self.augmentation_inputs), float32)
        if augmentation is not None:
            told = nn.Dense(
                m.base_channels,
                use_bias=False,
                dtype=float32,
                kernel_init=nn.initializers.zeros,
                name=AUGMENTATION,
            )
            waves = waves + told(augmentation)
        embedding = self.dense(f'{TIME_EMBEDDING}0', width, dtype=float32)(waves)
        embedding = self.dense(f'{TIME_EMBEDDING}1', width, dtype=float32)(jax.nn.silu(embedding))
        if m.num_classes == 0:
            if labels is not None:
                raise UserError(
                    'class labels were given, but the model is unconditional (model.num_classes=0)'
                )
            return embedding
        labels = jnp.full(t.shape, -1, jnp.int32) if labels is None else labels
        table = nn.Embed(
            m.num_classes, width, embedding_init=nn.initializers.normal(1.0), name='label_embed'
        )
        classes = table(jnp.maximum(labels, 0))
        return embedding + jnp.where(labels[:, None] >= 0, classes, jnp.zeros((), classes.dtype))

    def _project(self, embedding: Float[Array, 'batch width']) -> dict[str, Array]:
        """Returns each residual block's projection of the embedding, by the block's name.

        All are computed as one product. A product for each block, with three more for its
        gradients, takes a GPU longer to launch than to compute. Empty during initialization, when
        the blocks create their parameters themselves.
        """
        if self.is_initializing():
            return {}
        layers = {
            name: block['embed']
            for name, block in self.variables['params'].items()
            if 'embed' in block
        }
        kernels, biases = (
            [layer[part].astype(self.dtype) for layer in layers.values()]
            for part in ('kernel', 'bias')
        )
        widths = [bias.shape[0] for bias in biases]
        with jax.named_scope('embed'):
            projected = (
                jax.nn.silu(embedding).astype(self.dtype) @ jnp.concatenate(kernels, axis=1)
                + jnp.concatenate(biases)[None, :]
            )
        return dict(zip(layers, jax.lax.split(projected, widths, axis=1), strict=True))

    def _resample(
        self,
        res: Callable[..., WithInput[Activation]],
        h: Activation,
        direction: str,
        level: int,
    ) -> Activation:
        name = f'{direction}_{level}_resample'
        if self.model.resblock_updown:
            return res(name, h, features=h.channels, resample=direction).result
        if self.model.conv_resample:
            return Resample(
                model=self.model, ops=self.ops, dtype=self.dtype, direction=direction, name=name
            )(h)
        return Activation.of(average_pool(h.value) if direction == 'down' else nearest(h.value))


# Functions, not methods: Flax would add a method's name to the names of the ops in a profile.


def _down(
    unet: UNet, layers: _Layers, h: Activation, channels: list[int]
) -> tuple[Activation, list[Activation]]:
    """Applies the down levels.

    Returns: the result, and the skip connections: the input of every block, in their order.
    """
    m, skips = unet.model, []
    for level, features in enumerate(channels):
        for i in range(m.num_res_blocks):
            h, (skip,) = layers.res(f'down_{level}_res_{i}', h, features=features, skip=True)
            skips.append(skip)
            if level in unet.attention_levels:
                h = layers.attend(f'down_{level}_attention_{i}', h, m.num_heads)
        if level < len(channels) - 1:
            skips.append(h)
            h = layers.resample('down', h, level)
    return h, skips


def _up(
    unet: UNet, layers: _Layers, h: Activation, channels: list[int], skips: list[Activation]
) -> Activation:
    """Applies the up levels; each block joins the last unread skip connection."""
    m = unet.model
    for level, features in reversed(list(enumerate(channels))):
        for i in range(m.num_res_blocks + 1):
            h = layers.res(f'up_{level}_res_{i}', h.join(skips.pop()), features=features).result
            if level in unet.attention_levels:
                heads = m.num_heads_upsample or m.num_heads
                h = layers.attend(f'up_{level}_attention_{i}', h, heads)
        if level > 0:
            h = layers.resample('up', h, level)
    return h
