"""The blocks of the UNet: residual block, attention block, resampling, and their parameters.

Activations are NHWC `Activation` in the compute dtype; parameters are float32. Every operation that
is worth a kernel comes from `ops`. Parameter trees are identical across backends.

Sources: Ho et al. 2020, arXiv 2006.11239, appendix B; Dhariwal & Nichol 2021, arXiv 2105.05233
(openai/guided-diffusion).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import ScopeParamShapeError
from jaxtyping import Array, Float, UInt32

from jaxunet.config import ModelConfig
from jaxunet.model.dropout import block_dropout
from jaxunet.model.initializers import initializer
from jaxunet.model.resampling import BOX, doubled, halved, halved_inside
from jaxunet.ops.activation import Activation
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.group_norm.operands import Norm
from jaxunet.ops.vocabulary import Ops, WithInput
from jaxunet.runtime.errors import UserError

Initializer = Callable[..., Array]


def parameter(
    module: nn.Module, name: str, init: Initializer, shape: tuple[int, ...]
) -> Float[Array, '...']:
    """Returns a parameter of a module, and creates it if the module is being initialized.

    `nn.Module.param` traces `init` to check the shape, which takes a fifth of the time to trace a
    network. Here the shape is known.

    Raises:
      ScopeParamShapeError: the parameter has another shape.
    """
    if not module.has_variable('params', name):
        return module.param(name, init, shape)
    value: Array = module.get_variable('params', name)
    if value.shape != shape:
        raise ScopeParamShapeError(name, '/'.join(module.path), value.shape, shape)
    return value


class Affine(nn.Module):
    """Scale and offset of a GroupNorm, float32, each of shape (1, channels)."""

    channels: int

    @nn.compact
    def __call__(self) -> tuple[Float[Array, '1 channels'], Float[Array, '1 channels']]:
        """Returns the scale and the offset."""
        scale = parameter(self, 'scale', nn.initializers.ones, (self.channels,))
        bias = parameter(self, 'bias', nn.initializers.zeros, (self.channels,))
        return scale[None, :], bias[None, :]


class Kernel(nn.Module):
    """Weights and bias of a convolution or linear layer whose arithmetic is done by an op."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    kernel_init: Initializer
    scale: float = 1.0

    @nn.compact
    def __call__(self) -> tuple[Array, Float[Array, '1 features']]:
        """Returns the kernel (*spatial, in, out) in `dtype`, and the bias (1, out) in float32."""
        kernel = parameter(self, 'kernel', self.kernel_init, self.shape)
        bias = parameter(self, 'bias', nn.initializers.zeros, (self.shape[-1],))
        return scaled(kernel, self.scale).astype(self.dtype), scaled(bias, self.scale)[None, :]


def scaled(x: Array, scale: float) -> Array:
    """Returns x · scale; x itself for 1."""
    return x if scale == 1 else x * scale


class Block(nn.Module):
    """The fields and helpers that every block of the UNet shares.

    Fields:
      dtype: the compute type.
    """

    model: ModelConfig
    ops: Ops
    dtype: jnp.dtype

    def kernel(
        self, name: str, *shape: int, kind: str = '', scale: float = 1.0
    ) -> tuple[Array, Float[Array, '1 features']]:
        """Returns kernel and bias of a layer, times `scale`.

        Args:
          kind: `last` of a residual branch or of the network, which starts at zero if the config
            says so, `qkv`, or '' for the others.
        """
        return Kernel(shape, self.dtype, initializer(self.model, kind), scale, name=name)()

    def dense(self, name: str, features: int, *, dtype: jnp.dtype | None = None) -> nn.Dense:
        """Returns a linear layer on vectors, such as the embeddings."""
        return nn.Dense(
            features,
            dtype=dtype or self.dtype,
            kernel_init=initializer(self.model),
            name=name,
        )

    def norm(self, name: str, channels: int) -> Norm:
        """Returns the parameters of a norm."""
        scale, offset = Affine(channels, name=name)()
        return Norm(scale, offset, self.model.groups(channels), self.model.norm_eps)


class Projected(NamedTuple):
    """The parts of a residual block that a network computes for all of its blocks at once.

    Fields:
      embedding: of time and class, projected for this block; without `scale_shift_norm`, it
        includes the bias of the first convolution.
      bias_2: the sum of the biases of the second convolution and of the shortcut; None = no
        shortcut.
    """

    embedding: Float[Array, 'batch projected']
    bias_2: Float[Array, '1 features'] | None


class ResBlock(Block):
    """Residual block with an embedding.

    GroupNorm → SiLU → conv3×3 → embedding → GroupNorm → SiLU → dropout → conv3×3, plus the input
    (through a 1×1 convolution if the channels change, or the resolution with
    `model.resample_proj`), and the sum times `model.skip_scale`. The last convolution and the
    1×1 convolution have this factor in their weights; an input without one is multiplied.

    Fields:
      features: channels of the result.
      resample: 'down' or 'up' changes the resolution, of the input and after the first activation;
        '' keeps it.
      skip: also return a copy of x for a skip connection; not with `resample`. The first op adds
        its gradient to those of x.
    """

    features: int = 0
    resample: str = ''
    skip: bool = False

    @nn.compact
    def __call__(
        self,
        x: Activation,
        embedding: Float[Array, 'batch width'],
        dropout_seeds: UInt32[Array, 'batch 2'] | None,
        projected: Projected | None = None,
    ) -> WithInput[Activation]:
        """Returns the block's result, and with `skip` one copy of x.

        Args:
          embedding: the embedding of time and class.
          dropout_seeds: from `jaxunet.model.dropout.dropout_seeds`; None = no dropout.
          projected: this block's; None during initialization, when the block makes the parameters.
        """
        channels, features = x.channels, self.features
        norm_1 = self.norm('norm_1', channels)
        kernel_1, shift_1 = self.kernel('conv_1', 3, 3, channels, features)
        norm_2 = self.norm('norm_2', features)
        factor = self.model.skip_scale
        kernel_2, shift_2 = self.kernel(
            'conv_2', 3, 3, features, features, kind='last', scale=factor
        )
        shortcut, bias = None, None
        if channels != features or (self.resample and self.model.resample_proj):
            shortcut, bias = self.kernel('shortcut', channels, features, scale=factor)
        if projected is None:
            width = 2 * features if self.model.scale_shift_norm else features
            embedded = self.dense('embed', width)(jax.nn.silu(embedding)).astype(jnp.float32)
            if not self.model.scale_shift_norm:
                embedded = embedded + shift_1
            biases = None if bias is None else scaled(shift_2 + bias, 1 / factor)
            projected = Projected(embedded, biases)
        if self.model.scale_shift_norm:
            scale, offset = jnp.split(projected.embedding, 2, axis=-1)
            norm_2 = dataclasses.replace(
                norm_2,
                scale=norm_2.scale * (1 + scale),
                offset=norm_2.offset * (1 + scale) + offset,
            )
        else:
            shift_1 = projected.embedding
        if projected.bias_2 is not None:
            shift_2 = scaled(projected.bias_2, factor)
        first = Convolution(image=x, norm=norm_1, kernel=kernel_1, shift=shift_1)
        h, x, skip = _first_half(self, first)
        if shortcut is None:
            x = Activation(tuple(scaled(part, factor) for part in x.parts))
        second = Convolution(
            image=h, norm=norm_2, kernel=kernel_2, shift=shift_2, residual=x, shortcut=shortcut
        )
        if dropout_seeds is None:
            return WithInput(self.ops.norm_silu_conv3x3(second), skip)
        dropout = block_dropout(dropout_seeds, self.model.dropout, self.path)
        active = self.ops.group_norm(h, norm_2, silu=True, dropout=dropout)
        return WithInput(self.ops.conv3x3(second.of(active)), skip)


def _first_half(
    block: ResBlock, conv: Convolution
) -> tuple[Activation, Activation, tuple[Activation, ...]]:
    """Returns the result of a block's first convolution, x at its resolution, and copies of x.

    A function, because Flax would give a method a scope of its own, and profiles would count it as
    another module.
    """
    weights = block.model.resample_filter
    if not block.resample:
        h, (x, *copies) = block.ops.norm_silu_conv3x3_and_input(conv, copies=1 + block.skip)
        return h, x, tuple(copies)
    active = block.ops.group_norm(conv.image, conv.required_norm, silu=True)
    if block.resample == 'down':
        h = block.ops.conv3x3(conv.of(halved(active, weights)))
        return h, Activation.of(halved(conv.image.value, weights)), ()
    if weights == BOX:
        h = block.ops.upsample_conv3x3(conv.of(active))
    else:
        h = block.ops.conv3x3(conv.of(doubled(active, weights)))
    return h, Activation.of(doubled(conv.image.value, weights)), ()


class AttentionBlock(Block):
    """GroupNorm → qkv → attention over all pixels → projection, plus the input.

    The sum is multiplied by `model.skip_scale`.

    Fields:
      num_heads: 0 = as many as `model.num_head_channels` gives.
    """

    num_heads: int = 0

    @nn.compact
    def __call__(self, x: Activation) -> Activation:
        """Returns an activation of x's shape.

        Raises:
          UserError: the heads do not divide the channels.
        """
        channels, (batch, height, width) = x.channels, x.parts[0].shape[:3]
        factor = self.model.skip_scale
        heads = self._heads(channels)
        normed, (x,) = self.ops.group_norm_and_input(x, self.norm('norm', channels))
        qkv = self.ops.linear(normed, *self.kernel('qkv', channels, 3 * channels, kind='qkv'))
        y = self.ops.attention(qkv.reshape(batch, height * width, 3 * channels), num_heads=heads)
        return Activation.of(
            self.ops.linear(
                y.reshape(normed.shape),
                *self.kernel('proj', channels, channels, kind='last', scale=factor),
                residual=scaled(x.value, factor),
            )
        )

    def _heads(self, channels: int) -> int:
        per_head = self.model.num_head_channels
        heads = self.num_heads or channels // per_head
        if heads == 0 or channels % heads or (not self.num_heads and channels % per_head):
            field = f'num_heads={heads}' if self.num_heads else f'num_head_channels={per_head}'
            raise UserError(
                f'model.{field}: does not divide the {channels} channels of {"/".join(self.path)}'
            )
        return heads


class ResidualEncoding(Block):
    """NCSN++'s residual encoder: adds a convolution of an image of twice the resolution.

        (h + filter(conv3×3(x))) · √½, with every second pixel of `model.resample_filter`

    Source: Song et al. 2021, arXiv 2011.13456, appendix H; NVlabs/edm, `encoder_type=residual`.
    """

    @nn.compact
    def __call__(self, h: Activation, x: Activation) -> Activation:
        """Returns an activation of h's shape."""
        weights, half = self.model.resample_filter, 0.5**0.5
        init = initializer(self.model)
        kernel = parameter(self, 'kernel', init, (3, 3, x.channels, h.channels))
        bias = parameter(self, 'bias', nn.initializers.zeros, (h.channels,))[None, :]
        # The filter reads the convolution's results beyond the edges, too.
        border = len(weights) // 2 - 1
        image = jnp.pad(x.value, [(0, 0), (border, border), (border, border), (0, 0)])
        # Filters keep a constant, so the bias may be added before.
        conv = Convolution(
            image=Activation.of(image),
            kernel=(kernel * half).astype(self.dtype),
            shift=bias * half,
        )
        y = self.ops.conv3x3(conv)
        return Activation.of(h.value * half + halved_inside(y.value, weights))


class Resample(Block):
    """A learned convolution that halves (`down`) or doubles (`up`) the resolution.

    `up` repeats the pixels first; `down` has stride 2.
    """

    direction: str = 'down'

    @nn.compact
    def __call__(self, x: Activation) -> Activation:
        """Returns an activation of x's channels."""
        value = x.value
        channels = value.shape[-1]
        # Parameters sit directly under this module's name: {kernel, bias}.
        kernel = parameter(
            self, 'kernel', initializer(self.model), (3, 3, channels, channels)
        ).astype(self.dtype)
        bias = parameter(self, 'bias', nn.initializers.zeros, (channels,))[None, :]
        if self.direction == 'up':
            return self.ops.upsample_conv3x3(Convolution(image=x, kernel=kernel, shift=bias))
        pad = (1, 1) if self.model.downsample_padding == 'symmetric' else (0, 1)
        y = jax.lax.conv_general_dilated(
            value, kernel, (2, 2), (pad, pad), dimension_numbers=('NHWC', 'HWIO', 'NHWC')
        )
        return Activation.of(y + bias[:, None, None, :].astype(y.dtype))
