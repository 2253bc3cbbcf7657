"""The UNet: one Flax module that covers unet.cu, all of guided-diffusion's ADM options, and DDPM's CIFAR-10 network.

Activations are NHWC `Activation` in the compute dtype; parameters are float32. Every kernel-worthy operation comes from `ops`
(`jaxunet.ops`), so parameter trees are identical across backends.

Sources: Ho et al. 2020, arXiv 2006.11239, appendix B; Dhariwal & Nichol 2021, arXiv 2105.05233 (openai/guided-diffusion);
clu0/unet.cu; tqch/ddpm-torch.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxunet.config import Config, ModelConfig
from jaxunet.ops.activation import Activation, at_least_float32
from jaxunet.ops.backends import Ops
from jaxunet.runtime.errors import UserError

Params = Any  # the nested dict of the UNet's float32 arrays
Initializer = Callable[..., Any]
TIME_EMBEDDING = 'time_embed_'  # layers that compute in float32 whatever the precision
INITIALIZERS: dict[str, Initializer] = {
    # PyTorch's default for convolutions and linear layers: uniform within 1/sqrt(fan_in).
    'torch': nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform'),
    'ddpm': nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform'),
}


def build_unet(config: Config, ops: Ops) -> UNet:
    """The UNet that a config describes, computing in `config.precision` on the given ops."""
    return UNet(
        model=config.model,
        attention_levels=config.attention_levels,
        out_channels=config.model.image_channels * (2 if config.diffusion.learn_sigma else 1),
        ops=ops,
        dtype=jnp.dtype(config.precision),
    )


def init_params(model: UNet, config: Config, key: Array) -> Params:
    """Fresh float32 parameters (jit or eval_shape it)."""
    labels = jnp.zeros((1,), jnp.int32) if config.model.num_classes else None
    return model.init(
        key, jnp.zeros((1, *config.image_shape), jnp.float32), jnp.zeros((1,), jnp.int32), labels
    )['params']


def timestep_embedding(
    t: Float[Array, ' batch'], width: int, *, max_period: int = 10000, order: str = 'adm'
) -> Float[Array, 'batch width']:
    """Sinusoids of t · max_period^(-i/n), i < width // 2; an odd width ends with a zero column.

    Args:
      order: `adm`: cosines then sines, n = width // 2 (guided-diffusion, unet.cu). `ddpm`: sines then cosines,
        n = width // 2 - 1, so that the last frequency is 1 / max_period (Ho et al. 2020).
    """
    half = width // 2
    last = half if order == 'adm' else max(half - 1, 1)
    frequencies = jnp.exp(-math.log(max_period) / last * jnp.arange(half, dtype=jnp.float32))
    angles = t.astype(jnp.float32)[:, None] * frequencies[None, :]
    waves = [jnp.cos(angles), jnp.sin(angles)]
    embedding = jnp.concatenate(waves if order == 'adm' else waves[::-1], axis=-1)
    return jnp.pad(embedding, ((0, 0), (0, width % 2)))


class Affine(nn.Module):
    """Scale and offset of a GroupNorm, float32, each of shape (1, channels)."""

    channels: int

    @nn.compact
    def __call__(self) -> tuple[Float[Array, '1 channels'], Float[Array, '1 channels']]:
        scale = self.param('scale', nn.initializers.ones, (self.channels,))
        bias = self.param('bias', nn.initializers.zeros, (self.channels,))
        return scale[None, :], bias[None, :]


class Kernel(nn.Module):
    """Weights and bias of a convolution or linear layer, whose arithmetic an op does; kernel (*spatial, in, out), bias (1, out)."""

    shape: tuple[int, ...]
    dtype: Any
    kernel_init: Initializer

    @nn.compact
    def __call__(self) -> tuple[Array, Float[Array, '1 features']]:
        kernel = self.param('kernel', self.kernel_init, self.shape)
        bias = self.param('bias', nn.initializers.zeros, (self.shape[-1],))
        return kernel.astype(self.dtype), bias[None, :]


def dropout(
    x: Float[Array, 'batch *rest'], keys: Key[Array, ' batch'], rate: float, path: tuple[str, ...]
) -> Float[Array, 'batch *rest']:
    """Zeroes a share `rate` of x and scales the rest; each sample draws from its own key, so the batch may be split anyhow."""
    keys = jax.vmap(lambda key: jax.random.fold_in(key, zlib.crc32('/'.join(path).encode())))(keys)
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(keep, x * jnp.asarray(1 / (1 - rate), x.dtype), jnp.zeros((), x.dtype))


def average_pool(
    x: Float[Array, 'batch height width channels'],
) -> Float[Array, 'batch height/2 width/2 channels']:
    """Mean of 2×2 pixels, in float32."""
    batch, height, width, channels = x.shape
    wide = at_least_float32(x.dtype)
    blocks = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return jnp.mean(blocks, axis=(2, 4), dtype=wide).astype(x.dtype)


def nearest(
    x: Float[Array, 'batch height width channels'],
) -> Float[Array, 'batch 2*height 2*width channels']:
    """Every pixel twice in both directions."""
    batch, height, width, channels = x.shape
    doubled = jnp.broadcast_to(x[:, :, None, :, None, :], (batch, height, 2, width, 2, channels))
    return doubled.reshape(batch, 2 * height, 2 * width, channels)


class Block(nn.Module):
    """What every block of the UNet knows."""

    model: ModelConfig
    ops: Ops
    dtype: Any

    def kernel(
        self, name: str, *shape: int, zero: bool = False
    ) -> tuple[Array, Float[Array, '1 features']]:
        init = (
            nn.initializers.zeros
            if zero and self.model.zero_init
            else INITIALIZERS[self.model.init]
        )
        return Kernel(shape, self.dtype, init, name=name)()

    def dense(self, name: str, features: int, *, dtype: Any = None) -> nn.Dense:
        return nn.Dense(
            features,
            dtype=dtype or self.dtype,
            kernel_init=INITIALIZERS[self.model.init],
            name=name,
        )

    @property
    def norm(self) -> dict[str, Any]:
        return {'groups': self.model.norm_groups, 'eps': self.model.norm_eps}


class ResBlock(Block):
    """GroupNorm → SiLU → conv3×3 → embedding → GroupNorm → SiLU → dropout → conv3×3, plus the input (through a 1×1 if channels change).

    Fields:
      resample: 'down' or 'up' changes the resolution after the first activation, and of the input.
      skip: return (result, x), the latter for a skip connection, whose gradient the first op adds to those of x; not with `resample`.

    `embedded` is this block's projection of the embedding where the network has found those of all blocks at once.
    """

    features: int = 0
    resample: str = ''
    skip: bool = False

    @nn.compact
    def __call__(
        self,
        x: Activation,
        embedding: Float[Array, 'batch width'],
        dropout_keys: Key[Array, ' batch'] | None,
        embedded: Float[Array, 'batch projected'] | None = None,
    ) -> Any:
        channels, features = x.channels, self.features
        scale_1, offset_1 = Affine(channels, name='norm_1')()
        kernel_1, shift_1 = self.kernel('conv_1', 3, 3, channels, features)
        scale_2, offset_2 = Affine(features, name='norm_2')()
        kernel_2, shift_2 = self.kernel('conv_2', 3, 3, features, features, zero=True)
        shift_norm = self.model.scale_shift_norm
        if embedded is None:
            embedded = self.dense('embed', 2 * features if shift_norm else features)(
                jax.nn.silu(embedding)
            )
        embedded = embedded.astype(jnp.float32)
        if shift_norm:
            scale, offset = jnp.split(embedded, 2, axis=-1)
            scale_2, offset_2 = scale_2 * (1 + scale), offset_2 * (1 + scale) + offset
        else:
            shift_1 = shift_1 + embedded

        skip: list[Activation] = []
        if self.resample:
            change = average_pool if self.resample == 'down' else nearest
            active = change(self.ops.group_norm(x, scale_1, offset_1, silu=True, **self.norm))
            h = self.ops.conv3x3(Activation.of(active), kernel_1, shift_1)
            x = Activation.of(change(x.value))
        else:
            passing = 2 if self.skip else 1
            h, x, *skip = self.ops.norm_silu_conv3x3(
                x, scale_1, offset_1, kernel_1, shift_1, passing=passing, **self.norm
            )

        shortcut = None
        if channels != features:
            shortcut, bias = self.kernel('shortcut', channels, features)
            shift_2 = shift_2 + bias
        if dropout_keys is not None and self.model.dropout > 0:
            active = self.ops.group_norm(h, scale_2, offset_2, silu=True, **self.norm)
            active = dropout(active, dropout_keys, self.model.dropout, self.path)
            y = self.ops.conv3x3(
                Activation.of(active), kernel_2, shift_2, residual=x, shortcut=shortcut
            )
        else:
            y = self.ops.norm_silu_conv3x3(
                h, scale_2, offset_2, kernel_2, shift_2, residual=x, shortcut=shortcut, **self.norm
            )
        return (y, *skip) if skip else y


class AttentionBlock(Block):
    """GroupNorm → qkv → attention over all pixels → projection, plus the input."""

    num_heads: int = 0

    @nn.compact
    def __call__(self, x: Activation) -> Activation:
        channels, (batch, height, width) = x.channels, x.parts[0].shape[:3]
        heads = self.num_heads or channels // self.model.num_head_channels
        if (
            heads == 0
            or channels % heads
            or (not self.num_heads and channels % self.model.num_head_channels)
        ):
            field = (
                f'num_heads={heads}'
                if self.num_heads
                else f'num_head_channels={self.model.num_head_channels}'
            )
            raise UserError(
                f'model.{field}: does not divide the {channels} channels of {"/".join(self.path)}'
            )
        scale, offset = Affine(channels, name='norm')()
        normed, x = self.ops.group_norm(x, scale, offset, passing=1, **self.norm)
        qkv = self.ops.linear(normed, *self.kernel('qkv', channels, 3 * channels))
        y = self.ops.attention(qkv.reshape(batch, height * width, 3 * channels), num_heads=heads)
        return Activation.of(
            self.ops.linear(
                y.reshape(normed.shape),
                *self.kernel('proj', channels, channels, zero=True),
                residual=x.value,
            )
        )


class Resample(Block):
    """Halves (`down`) or doubles (`up`) the resolution with a learned convolution."""

    direction: str = 'down'

    @nn.compact
    def __call__(self, x: Activation) -> Activation:
        value = x.value
        channels = value.shape[-1]
        # Parameters sit directly under this module's name: {kernel, bias}.
        kernel = self.param(
            'kernel', INITIALIZERS[self.model.init], (3, 3, channels, channels)
        ).astype(self.dtype)
        bias = self.param('bias', nn.initializers.zeros, (channels,))[None, :]
        if self.direction == 'up':
            return self.ops.conv3x3(Activation.of(nearest(value)), kernel, bias)
        pad = (1, 1) if self.model.downsample_padding == 'symmetric' else (0, 1)
        y = jax.lax.conv_general_dilated(
            value, kernel, (2, 2), (pad, pad), dimension_numbers=('NHWC', 'HWIO', 'NHWC')
        )
        return Activation.of(y + bias[:, None, None, :].astype(y.dtype))


class UNet(Block):
    """Predicts noise, image or velocity (and, with twice the channels, a variance) from a noisy image and its timestep.

    Fields:
      attention_levels: levels (0 = full resolution) whose residual blocks are followed by attention.
      out_channels: channels of the prediction.
    """

    attention_levels: tuple[int, ...] = ()
    out_channels: int = 3

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'batch height width channels'],
        t: Int[Array, ' batch'],
        labels: Int[Array, ' batch'] | None = None,
        dropout_keys: Key[Array, ' batch'] | None = None,
    ) -> Float[Array, 'batch height width out_channels']:
        """Args:
          x: noisy images.
          t: timesteps in [0, T).
          labels: class labels, -1 = dropped (classifier-free guidance, arXiv 2207.12598); None = all dropped.
          dropout_keys: one key a sample; None = no dropout (evaluation).

        Returns: float32 prediction.

        Raises:
          UserError: labels for an unconditional model, or a head width that does not divide the channels.
        """
        m = self.model
        embedding = self._embed(t, labels)
        remat = nn.remat if m.remat else lambda block: block
        fields = {'model': m, 'ops': self.ops, 'dtype': self.dtype}
        res_block, projections = (
            functools.partial(remat(ResBlock), **fields),
            self._project(embedding),
        )
        attention = functools.partial(remat(AttentionBlock), **fields)
        channels = [int(mult * m.base_channels) for mult in m.channel_mult]
        last = len(channels) - 1

        def res(name: str, x: Activation, **options: Any) -> Any:
            return res_block(name=name, **options)(
                x, embedding, dropout_keys, projections.get(name)
            )

        kernel, bias = self.kernel('conv_in', 3, 3, x.shape[-1], channels[0])
        h = self.ops.conv3x3(Activation.of(x.astype(self.dtype)), kernel, bias)
        skips = []  # what every block of the way down starts from, and the last of them ends with
        for level, features in enumerate(channels):
            for i in range(m.num_res_blocks):
                h, skip = res(f'down_{level}_res_{i}', h, features=features, skip=True)
                skips.append(skip)
                if level in self.attention_levels:
                    h = attention(num_heads=m.num_heads, name=f'down_{level}_attention_{i}')(h)
            if level != last:
                skips.append(h)
                h = self._resample(res, h, 'down', level)

        h, skip = res('middle_res_0', h, features=channels[-1], skip=True)
        skips.append(skip)
        h = attention(num_heads=m.num_heads, name='middle_attention')(h)
        h = res('middle_res_1', h, features=channels[-1])

        for level, features in reversed(list(enumerate(channels))):
            for i in range(m.num_res_blocks + 1):
                h = res(f'up_{level}_res_{i}', h.join(skips.pop()), features=features)
                if level in self.attention_levels:
                    h = attention(
                        num_heads=m.num_heads_upsample or m.num_heads,
                        name=f'up_{level}_attention_{i}',
                    )(h)
            if level > 0:
                h = self._resample(res, h, 'up', level)

        scale, offset = Affine(h.channels, name='norm_out')()
        kernel, bias = self.kernel('conv_out', 3, 3, h.channels, self.out_channels, zero=True)
        return self.ops.norm_silu_conv3x3(h, scale, offset, kernel, bias, **self.norm).value.astype(
            jnp.float32
        )

    def predict(
        self,
        params: Any,
        x: Float[Array, 'batch height width channels'],
        t: Int[Array, ' batch'],
        labels: Int[Array, ' batch'] | None = None,
        dropout_keys: Key[Array, ' batch'] | None = None,
    ) -> Float[Array, 'batch height width out_channels']:
        """`__call__` with the parameters as an argument."""
        return cast(Array, self.apply({'params': params}, x, t, labels, dropout_keys))

    def narrowed(self, params: Any, narrow: Callable[[list[Array]], Sequence[Array]]) -> Any:
        """The parameters for `predict`, where `narrow` has brought to `dtype` what layers would bring to it one by one: their kernels."""
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
        self, t: Int[Array, ' batch'], labels: Int[Array, ' batch'] | None
    ) -> Float[Array, 'batch width']:
        """Time (and class) embedding, float32: small, and read by every block."""
        m = self.model
        width = 4 * m.base_channels
        waves = timestep_embedding(
            t, m.base_channels, max_period=m.max_period, order=m.time_embedding
        )
        embedding = self.dense(f'{TIME_EMBEDDING}0', width, dtype=jnp.float32)(waves)
        embedding = self.dense(f'{TIME_EMBEDDING}1', width, dtype=jnp.float32)(
            jax.nn.silu(embedding)
        )
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
        """Each residual block's projection of the embedding, by the block's name, and all as one product: a product of each block, with
        three for its gradients, takes a GPU longer to start than to do. Empty while the blocks make their parameters."""
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
        self, res: Callable[..., Any], h: Activation, direction: str, level: int
    ) -> Activation:
        name = f'{direction}_{level}_resample'
        if self.model.resblock_updown:
            return res(name, h, features=h.channels, resample=direction)
        if self.model.conv_resample:
            return Resample(
                model=self.model, ops=self.ops, dtype=self.dtype, direction=direction, name=name
            )(h)
        return Activation.of(average_pool(h.value) if direction == 'down' else nearest(h.value))
