"""The encoder of the UNet: its embeddings, down levels and middle.

`jaxunet.model.unet` adds the up levels, `jaxunet.model.noisy_classifier` a pool and classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree, Real

from jaxunet.config import ModelConfig
from jaxunet.model.blocks import (
    AttentionBlock,
    Block,
    Projected,
    Resample,
    ResBlock,
    ResidualEncoding,
    parameter,
)
from jaxunet.model.dropout import dropout_seeds
from jaxunet.model.embeddings import fourier_embedding, label_embedding, timestep_embedding
from jaxunet.model.initializers import initializer
from jaxunet.model.resampling import doubled, halved
from jaxunet.ops.activation import Activation
from jaxunet.ops.adamw.operands import Copies
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.linear.projections import Projection
from jaxunet.ops.vocabulary import WithInput
from jaxunet.runtime.errors import UserError

TIME_EMBEDDING = 'time_embed_'  # layers that always compute in float32
LABEL_EMBEDDING = 'label_embed'
FREQUENCIES = f'{TIME_EMBEDDING}fourier'  # the constants of time_embedding=fourier
FREQUENCY_SCALE = 16.0  # standard deviation of theirs (NCSN++)
AUGMENTATION = f'{TIME_EMBEDDING}augmentation'  # the layer of `augmentation_inputs`


class FourierEmbedding(nn.Module):
    """Sines and cosines of random frequencies, which stay as they are drawn (NCSN++)."""

    width: int

    @nn.compact
    def __call__(self, t: Real[Array, ' batch']) -> Float[Array, 'batch width']:
        """Returns the embedding of times, float32."""
        init = nn.initializers.normal(FREQUENCY_SCALE)
        return fourier_embedding(t, parameter(self, 'frequencies', init, (self.width // 2,)))


class LabelInput(nn.Module):
    """A linear layer on one-hot labels times √classes, float32; zeros for labels below zero.

    Source: NVlabs/edm, `SongUNet.map_label`.
    """

    model: ModelConfig
    width: int

    @nn.compact
    def __call__(self, labels: Int[Array, ' batch']) -> Float[Array, 'batch width']:
        """Returns what is added to the sinusoids of the time."""
        classes = self.model.num_classes
        table = parameter(self, 'embedding', initializer(self.model), (classes, self.width))
        bias = parameter(self, 'bias', nn.initializers.zeros, (self.width,))
        return label_embedding(table, labels) * classes**0.5 + bias[None, :]


class Encoder(Block):
    """The layers that the UNet and noisy classifiers share.

    Fields:
      attention_levels: levels (0 = full resolution) whose residual blocks are followed by
        attention.
      augmentation_inputs: number of inputs that describe the augmentation of an image; 0 = none.
        They are added to the time's sinusoids through a linear layer without bias, so that zeros
        have no effect (EDM, arXiv 2206.00364, appendix F.2).
      time_scale: factor on t before its embedding.
    """

    FLOAT32: ClassVar[tuple[str, ...]] = (TIME_EMBEDDING,)  # prefixes of layers that stay float32

    attention_levels: tuple[int, ...] = ()
    augmentation_inputs: int = 0
    time_scale: float = 1.0

    @property
    def channels(self) -> list[int]:
        """Channels of every level."""
        return [int(mult * self.model.base_channels) for mult in self.model.channel_mult]

    def copies(self, params: PyTree, narrow: Callable[[list[Array]], Sequence[Array]]) -> Copies:
        """Returns copies of all kernels in `dtype`, converted together; () for a float32 network.

        Args:
          narrow: converts a list of float32 arrays to `dtype`.
        """
        if jnp.dtype(self.dtype).itemsize > 2:
            return ()
        paths, _ = jax.tree.flatten_with_path(params)
        chosen = [
            path[-1].key == 'kernel' and not path[0].key.startswith(self.FLOAT32)
            for path, _ in paths
        ]
        kernels = [leaf for (_, leaf), copied in zip(paths, chosen, strict=True) if copied]
        narrowed = iter(narrow(kernels))
        return tuple(next(narrowed) if copied else None for copied in chosen)

    def narrowed(self, params: PyTree, narrow: Callable[[list[Array]], Sequence[Array]]) -> PyTree:
        """Returns the parameters for `predict` with all kernels in `dtype`, converted together.

        Without this, every layer converts its own kernel, in one launch per layer. A float32
        network returns `params`. Arguments as `copies`.
        """
        return with_copies(params, self.copies(params, narrow))

    def _embed(
        self,
        t: Real[Array, ' batch'],
        labels: Int[Array, ' batch'] | None,
        augmentation: Float[Array, 'batch inputs'] | None,
    ) -> Float[Array, 'batch width']:
        """Returns the time (and class) embedding, in float32: small, and read by every block."""
        m = self.model
        width, waves_width = 4 * m.base_channels, m.channel_mult_noise * m.base_channels
        if self.time_scale != 1:
            t = t.astype(jnp.float32) * self.time_scale
        if m.time_embedding == 'fourier':
            waves = FourierEmbedding(waves_width, name=FREQUENCIES)(t)
        else:
            waves = timestep_embedding(
                t, waves_width, max_period=m.max_period, order=m.time_embedding
            )
        float32 = jnp.dtype(jnp.float32)
        if self.augmentation_inputs and self.is_initializing():
            augmentation = jnp.zeros((t.shape[0], self.augmentation_inputs), float32)
        if augmentation is not None:
            augmentation_layer = nn.Dense(
                waves_width,
                use_bias=False,
                dtype=float32,
                kernel_init=nn.initializers.zeros if m.init != 'edm' else initializer(m),
                name=AUGMENTATION,
            )
            waves = waves + augmentation_layer(augmentation)
        if m.num_classes == 0 and labels is not None:
            raise UserError(
                'class labels were given, but the model is unconditional (model.num_classes=0)'
            )
        if m.num_classes and labels is None:
            labels = jnp.full(t.shape, -1, jnp.int32)
        if labels is not None and m.label_position == 'input':
            label = LabelInput(m, waves_width, name=LABEL_EMBEDDING)
            waves = waves + label(labels)
        embedding = self.dense(f'{TIME_EMBEDDING}0', width, dtype=float32)(waves)
        embedding = self.dense(f'{TIME_EMBEDDING}1', width, dtype=float32)(jax.nn.silu(embedding))
        if m.num_classes == 0 or m.label_position == 'input':
            return embedding
        table = nn.Embed(
            m.num_classes, width, embedding_init=nn.initializers.normal(1.0), name=LABEL_EMBEDDING
        )
        return embedding + label_embedding(table.embedding, labels)

    def _project(self, embedding: Float[Array, 'batch width']) -> dict[str, Projected]:
        """Returns the parts of each residual block by the block's name.

        The result is empty during initialization, when the blocks create their parameters.
        """
        if self.is_initializing():
            return {}
        blocks = {n: block for n, block in self.variables['params'].items() if 'embed' in block}
        layers = []
        for block in blocks.values():
            biases = [block['embed']['bias']]
            if not self.model.scale_shift_norm:
                biases.append(block['conv_1']['bias'])
            kernel = block['embed']['kernel'].astype(self.dtype)
            layers.append(Projection(kernel, tuple(biases)))
            if 'shortcut' in block:
                seconds = (block['conv_2']['bias'], block['shortcut']['bias'])
                layers.append(Projection(None, seconds))
        with jax.named_scope('embed'):
            active = jax.nn.silu(embedding).astype(self.dtype)
            results = iter(self.ops.project(active, layers))
        return {
            name: Projected(next(results), next(results) if 'shortcut' in block else None)
            for name, block in blocks.items()
        }


def with_copies(params: PyTree, copies: Copies) -> PyTree:
    """Returns the parameters; those that have a copy are replaced by it."""
    if not copies:
        return params
    leaves, structure = jax.tree.flatten(params)
    chosen = [p if copy is None else copy for p, copy in zip(leaves, copies, strict=True)]
    return jax.tree.unflatten(structure, chosen)


class Layers:
    """Builds and applies the blocks of one call of a network, by their names.

    Not a part of the module: Flax would add a method's name to the names of the ops in a profile.

    Args:
      embedding: embedding of time and class.
      dropout_keys: one key per sample; None = no dropout. Not used if `model.dropout` is 0.
    """

    def __init__(
        self,
        network: Encoder,
        embedding: Float[Array, 'batch width'],
        dropout_keys: Key[Array, ' batch'] | None,
    ) -> None:
        self._model, self._embedding, self._seeds = network.model, embedding, None
        if dropout_keys is not None and network.model.dropout > 0:
            self._seeds = dropout_seeds(dropout_keys)
        self._projected = network._project(embedding)
        # Not at initialization, which computes no gradients.
        remats = network.model.remat and not network.is_initializing()
        remat = nn.remat if remats else lambda block: block
        self._res_block, self._attention_block = remat(ResBlock), remat(AttentionBlock)
        self._fields: dict[str, Any] = {
            'model': network.model,
            'ops': network.ops,
            'dtype': network.dtype,
        }

    def res(self, name: str, x: Activation, **options: Any) -> WithInput[Activation]:
        """Applies a residual block with these fields."""
        block = self._res_block(name=name, **options, **self._fields)
        return block(x, self._embedding, self._seeds, self._projected.get(name))

    def attend(self, name: str, x: Activation, num_heads: int) -> Activation:
        """Applies an attention block."""
        return self._attention_block(name=name, num_heads=num_heads, **self._fields)(x)

    def resample(self, direction: str, x: Activation, level: int) -> Activation:
        """Changes the resolution after a level, 'down' or 'up'."""
        name = f'{direction}_{level}_resample'
        if self._model.resblock_updown:
            return self.res(name, x, features=x.channels, resample=direction).result
        if self._model.conv_resample:
            return Resample(name=name, direction=direction, **self._fields)(x)
        change = halved if direction == 'down' else doubled
        return Activation.of(change(x.value, self._model.resample_filter))

    def add(self, h: Activation, x: Activation, level: int) -> Activation:
        """Adds a convolution of x, of twice the resolution, to the result of the 'down'."""
        return ResidualEncoding(name=f'down_{level}_residual', **self._fields)(h, x)


# A function, not a method, for the reason that `Layers` gives.


def encode(
    network: Encoder, layers: Layers, x: Float[Array, 'batch height width channels']
) -> tuple[Activation, list[Activation]]:
    """Applies the first convolution, the down levels and the middle.

    Returns: the result, and the skip connections: the input of every block, in their order.
    """
    m, channels = network.model, network.channels
    first = m.conv_in_channels or channels[0]
    kernel, bias = network.kernel('conv_in', 3, 3, x.shape[-1], first)
    encoded = Activation.of(x.astype(network.dtype))
    h = network.ops.conv3x3(Convolution(image=encoded, kernel=kernel, shift=bias))
    skips = []
    for level, features in enumerate(channels):
        for i in range(m.num_res_blocks):
            h, (skip,) = layers.res(f'down_{level}_res_{i}', h, features=features, skip=True)
            skips.append(skip)
            if level in network.attention_levels:
                h = layers.attend(f'down_{level}_attention_{i}', h, m.num_heads)
        if level < len(channels) - 1:
            skips.append(h)
            h = layers.resample('down', h, level)
            if m.encoder_type == 'residual':
                h = encoded = layers.add(h, encoded, level)
    h, (skip,) = layers.res('middle_res_0', h, features=channels[-1], skip=True)
    h = layers.attend('middle_attention', h, m.num_heads)
    h = layers.res('middle_res_1', h, features=channels[-1]).result
    return h, [*skips, skip]
