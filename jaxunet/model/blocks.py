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
from jaxunet.model.initializers import INITIALIZERS
from jaxunet.ops.activation import Activation, at_least_float32
from jaxunet.ops.conv3x3.operands import Convolution
from jaxunet.ops.conv3x3.upsampling import nearest
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

    @nn.compact
    def __call__(self) -> tuple[Array, Float[Array, '1 features']]:
        """Returns the kernel (*spatial, in, out) in `dtype`, and the bias (1, out) in float32."""
        kernel = parameter(self, 'kernel', self.kernel_init, self.shape)
        bias = parameter(self, 'bias', nn.initializers.zeros, (self.shape[-1],))
        return kernel.astype(self.dtype), bias[None, :]


def average_pool(
    x: Float[Array, 'batch height width channels'],
) -> Float[Array, 'batch height/2 width/2 channels']:
    """Averages blocks of 2×2 pixels, in float32."""
    batch, height, width, channels = x.shape
    wide = at_least_float32(x.dtype)
    blocks = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return jnp.mean(blocks, axis=(2, 4), dtype=wide).astype(x.dtype)


class Block(nn.Module):
    """The fields and helpers that every block of the UNet shares.

    Fields:
      dtype: the compute type.
    """

    model: ModelConfig
    ops: Ops
    dtype: jnp.dtype

    def kernel(
        self, name: str, *shape: int, zero: bool = False
    ) -> tuple[Array, Float[Array, '1 features']]:
        """Returns kernel and bias of a layer; `zero` starts at zero if the config says so."""
        init = (
            nn.initializers.zeros
            if zero and self.model.zero_init
            else INITIALIZERS[self.model.init]
        )
        return Kernel(shape, self.dtype, init, name=name)()

    def dense(self, name: str, features: int, *, dtype: jnp.dtype | None = None) -> nn.Dense:
        """Returns a linear layer on vectors, such as the embeddings."""
        return nn.Dense(
            features,
            dtype=dtype or self.dtype,
            kernel_init=INITIALIZERS[self.model.init],
            name=name,
        )

    def norm(self, name: str, channels: int) -> Norm:
        """Returns the parameters of a norm."""
        scale, offset = Affine(channels, name=name)()
        return Norm(scale, offset, self.model.norm_groups, self.model.norm_eps)


class Shifts(NamedTuple):
    """The parts of a residual block that a network computes for all of its blocks at once.

    Fields:
      embedded: the projection of the embedding; without `scale_shift_norm`, it includes the bias of
        the first convolution.
      second: the sum of the biases of the second convolution and of the shortcut; None = no
        shortcut.
    """

    embedded: Float[Array, 'batch projected']
    second: Float[Array, '1 features'] | None


class ResBlock(Block):
    """Residual block with an embedding.

    GroupNorm → SiLU → conv3×3 → embedding → GroupNorm → SiLU → dropout → conv3×3, plus the input
    (through a 1×1 convolution if the channels change).

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
        shifts: Shifts | None = None,
    ) -> WithInput[Activation]:
        """Returns the block's result, and with `skip` one copy of x.

        Args:
          embedding: the embedding of time and class.
          dropout_seeds: from `jaxunet.model.dropout.dropout_seeds`; None = no dropout.
          shifts: this block's; None during initialization, when the block creates their parameters.
        """
        channels, features = x.channels, self.features
        norm_1 = self.norm('norm_1', channels)
        kernel_1, shift_1 = self.kernel('conv_1', 3, 3, channels, features)
        norm_2 = self.norm('norm_2', features)
        kernel_2, shift_2 = self.kernel('conv_2', 3, 3, features, features, zero=True)
        shortcut, bias = None, None
        if channels != features:
            shortcut, bias = self.kernel('shortcut', channels, features)
        if shifts is None:
            width = 2 * features if self.model.scale_shift_norm else features
            embedded = self.dense('embed', width)(jax.nn.silu(embedding)).astype(jnp.float32)
            if not self.model.scale_shift_norm:
                embedded = embedded + shift_1
            shifts = Shifts(embedded, None if bias is None else shift_2 + bias)
        if self.model.scale_shift_norm:
            scale, offset = jnp.split(shifts.embedded, 2, axis=-1)
            norm_2 = dataclasses.replace(
                norm_2,
                scale=norm_2.scale * (1 + scale),
                offset=norm_2.offset * (1 + scale) + offset,
            )
        else:
            shift_1 = shifts.embedded
        if shifts.second is not None:
            shift_2 = shifts.second
        first = Convolution(image=x, norm=norm_1, kernel=kernel_1, shift=shift_1)
        h, x, skip = _first_half(self, first)
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
    if not block.resample:
        h, (x, *copies) = block.ops.norm_silu_conv3x3_and_input(conv, copies=1 + block.skip)
        return h, x, tuple(copies)
    active = block.ops.group_norm(conv.image, conv.required_norm, silu=True)
    if block.resample == 'down':
        h = block.ops.conv3x3(conv.of(average_pool(active)))
        return h, Activation.of(average_pool(conv.image.value)), ()
    h = block.ops.upsample_conv3x3(conv.of(active))
    return h, Activation.of(nearest(conv.image.value)), ()


class AttentionBlock(Block):
    """GroupNorm → qkv → attention over all pixels → projection, plus the input.

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
        heads = self._heads(channels)
        normed, (x,) = self.ops.group_norm_and_input(x, self.norm('norm', channels))
        qkv = self.ops.linear(normed, *self.kernel('qkv', channels, 3 * channels))
        y = self.ops.attention(qkv.reshape(batch, height * width, 3 * channels), num_heads=heads)
        return Activation.of(
            self.ops.linear(
                y.reshape(normed.shape),
                *self.kernel('proj', channels, channels, zero=True),
                residual=x.value,
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
            self, 'kernel', INITIALIZERS[self.model.init], (3, 3, channels, channels)
        ).astype(self.dtype)
        bias = parameter(self, 'bias', nn.initializers.zeros, (channels,))[None, :]
        if self.direction == 'up':
            return self.ops.upsample_conv3x3(Convolution(image=x, kernel=kernel, shift=bias))
        pad = (1, 1) if self.model.downsample_padding == 'symmetric' else (0, 1)
        y = jax.lax.conv_general_dilated(
            value, kernel, (2, 2), (pad, pad), dimension_numbers=('NHWC', 'HWIO', 'NHWC')
        )
        return Activation.of(y + bias[:, None, None, :].astype(y.dtype))
