"""The same UNet in plain PyTorch, with guided-diffusion's parameter names.

It is the peer of `jaxunet.model.unet` in parity tests and benchmarks.
Source of names and architecture: openai/guided-diffusion; Dhariwal & Nichol 2021,
arXiv 2105.05233; Ho et al. 2020, arXiv 2006.11239.
PyTorch is optional (`pip install "jaxunet[peers]"`), so only peer benchmarks and tests import this.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from jaxunet.config import Config, ModelConfig


def build_torch_unet(config: Config, *, new_attention_order: bool = False) -> UNet:
    """Builds the peer of `jaxunet.model.unet.build_unet(config, ...)`, in training mode.

    Its weights are PyTorch's own; `jaxunet.weights.guided_diffusion.from_tree` converts ours to a
    state dict.
    """
    channels = config.model.image_channels
    return UNet(
        config.model,
        in_channels=channels,
        out_channels=channels * (2 if config.diffusion.learn_sigma else 1),
        attention_levels=config.attention_levels,
        new_attention_order=new_attention_order,
        time_scale=config.diffusion.time_scale,
    )


def timestep_embedding(
    t: torch.Tensor, width: int, max_period: int = 10000, order: str = 'adm'
) -> torch.Tensor:
    """Returns sinusoids of t: (batch,) -> (batch, width).

    The cosines come first (`adm`) or the sines (`ddpm`), as in
    `jaxunet.model.embeddings.timestep_embedding`.
    """
    half = width // 2
    last = half if order == 'adm' else max(half - 1, 1)
    frequencies = torch.exp(
        -math.log(max_period) / last * torch.arange(half, dtype=torch.float32, device=t.device)
    )
    angles = t.float()[:, None] * frequencies[None]
    waves = [angles.cos(), angles.sin()]
    return F.pad(torch.cat(waves if order == 'adm' else waves[::-1], dim=-1), (0, width % 2))


class GroupNorm32(nn.GroupNorm):
    """GroupNorm that computes in float32, whatever the compute type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the module to NCHW activations."""
        return super().forward(x.float()).to(x.dtype)


class Downsample(nn.Module):
    """Halves the resolution: average pool, or a stride-2 convolution (`learned`).

    The convolution is padded on all sides, or (`same`) right and bottom only.
    """

    def __init__(self, channels: int, learned: bool, padding: str = 'symmetric') -> None:
        super().__init__()
        self.pad = learned and padding == 'same'
        self.op = (
            nn.Conv2d(channels, channels, 3, stride=2, padding=0 if self.pad else 1)
            if learned
            else nn.AvgPool2d(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the module to NCHW activations."""
        return self.op(F.pad(x, (0, 1, 0, 1)) if self.pad else x)


class Upsample(nn.Module):
    """Doubles the resolution: nearest neighbour, then a convolution (`learned`)."""

    def __init__(self, channels: int, learned: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if learned else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the module to NCHW activations."""
        return self.conv(F.interpolate(x, scale_factor=2, mode='nearest'))


class ResBlock(nn.Module):
    """Two convolutions with the embedding between them; `resample` is '', 'down' or 'up'."""

    def __init__(self, m: ModelConfig, channels: int, features: int, resample: str = '') -> None:
        super().__init__()
        self.scale_shift = m.scale_shift_norm
        conv_1 = nn.Conv2d(channels, features, 3, padding=1)
        conv_2 = nn.Conv2d(features, features, 3, padding=1)
        self.in_layers = nn.Sequential(
            GroupNorm32(m.norm_groups, channels, m.norm_eps), nn.SiLU(), conv_1
        )
        self.emb_layers = nn.Sequential(
            nn.SiLU(), nn.Linear(4 * m.base_channels, (1 + m.scale_shift_norm) * features)
        )
        self.out_layers = nn.Sequential(
            GroupNorm32(m.norm_groups, features, m.norm_eps),
            nn.SiLU(),
            nn.Dropout(m.dropout),
            conv_2,
        )
        self.skip_connection = (
            nn.Identity() if channels == features else nn.Conv2d(channels, features, 1)
        )
        changes = {'': nn.Identity(), 'down': nn.AvgPool2d(2), 'up': nn.Upsample(scale_factor=2)}
        self.change = changes[resample]

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Applies the module to NCHW activations."""
        norm, activation, conv = self.in_layers
        h = conv(self.change(activation(norm(x))))
        shift = self.emb_layers(embedding)[:, :, None, None].to(h.dtype)
        if self.scale_shift:
            scale, shift = shift.chunk(2, dim=1)
            h = self.out_layers[1:](self.out_layers[0](h) * (1 + scale) + shift)
        else:
            h = self.out_layers(h + shift)
        return self.skip_connection(self.change(x)) + h


class AttentionBlock(nn.Module):
    """Self-attention over all pixels.

    `new_order`: qkv's channels are all q, all k, all v; else q, k, v of each head in turn.
    """

    def __init__(self, m: ModelConfig, channels: int, heads: int, new_order: bool) -> None:
        super().__init__()
        self.heads, self.new_order = heads or channels // m.num_head_channels, new_order
        self.norm = GroupNorm32(m.norm_groups, channels, m.norm_eps)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the module to NCHW activations."""
        # Pixels before channels: PyTorch's fused attention takes only heads whose channels are
        # contiguous.
        batch, channels, height, width = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        qkv = F.linear(tokens, self.qkv.weight[:, :, 0], self.qkv.bias)
        split = (3, self.heads, -1) if self.new_order else (self.heads, 3, -1)
        parts = qkv.reshape(batch, height * width, *split).unbind(2 if self.new_order else 3)
        q, k, v = (part.transpose(1, 2) for part in parts)
        y = (
            F.scaled_dot_product_attention(q, k, v)
            .transpose(1, 2)
            .reshape(batch, height * width, channels)
        )
        y = F.linear(y, self.proj_out.weight[:, :, 0], self.proj_out.bias)
        return x + y.transpose(1, 2).reshape(batch, channels, height, width)


class Block(nn.Sequential):
    """Applies modules one after the other; residual blocks also get the embedding."""

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Applies the module to NCHW activations."""
        for module in self:
            x = module(x, embedding) if isinstance(module, ResBlock) else module(x)
        return x


# (level, channels, heads) -> the attention after a residual block, if its level has one
Attention = Callable[[int, int, int], list[nn.Module]]


def _features(m: ModelConfig) -> list[int]:
    """Returns the channels of each level, from full resolution."""
    return [int(mult * m.base_channels) for mult in m.channel_mult]


def _input_blocks(
    m: ModelConfig, in_channels: int, attention: Attention
) -> tuple[nn.ModuleList, list[int]]:
    """Returns the blocks before the middle, and the channels of their outputs."""
    levels = _features(m)
    channels = levels[0]
    blocks, outputs = [Block(nn.Conv2d(in_channels, channels, 3, padding=1))], [channels]
    for level, features in enumerate(levels):
        for _ in range(m.num_res_blocks):
            block = ResBlock(m, channels, features)
            channels = features
            blocks.append(Block(block, *attention(level, channels, m.num_heads)))
            outputs.append(channels)
        if level < len(levels) - 1:
            pool = Downsample(channels, m.conv_resample, m.downsample_padding)
            blocks.append(
                Block(ResBlock(m, channels, channels, 'down') if m.resblock_updown else pool)
            )
            outputs.append(channels)
    return nn.ModuleList(blocks), outputs


def _output_blocks(m: ModelConfig, skips: list[int], attention: Attention) -> nn.ModuleList:
    """Returns the blocks after the middle; `skips` are the channels before it."""
    skips, channels = list(skips), skips[-1]
    blocks = []
    for level, features in reversed(list(enumerate(_features(m)))):
        for i in range(m.num_res_blocks + 1):
            block: list[nn.Module] = [ResBlock(m, channels + skips.pop(), features)]
            channels = features
            block += attention(level, channels, m.num_heads_upsample or m.num_heads)
            if level > 0 and i == m.num_res_blocks:
                block.append(
                    ResBlock(m, channels, channels, 'up')
                    if m.resblock_updown
                    else Upsample(channels, m.conv_resample)
                )
            blocks.append(Block(*block))
    return nn.ModuleList(blocks)


class UNet(nn.Module):
    """The network on NCHW images.

    `attention_levels` are counted from full resolution. A label of -1 is a dropped one.
    """

    def __init__(
        self,
        m: ModelConfig,
        *,
        in_channels: int,
        out_channels: int,
        attention_levels: tuple[int, ...],
        new_attention_order: bool = False,
        time_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.model, self.time_scale = m, time_scale
        width = 4 * m.base_channels
        self.time_embed = nn.Sequential(
            nn.Linear(m.base_channels, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.label_emb = nn.Embedding(m.num_classes, width) if m.num_classes else None

        def attention(level: int, channels: int, heads: int) -> list[nn.Module]:
            if level not in attention_levels:
                return []
            return [AttentionBlock(m, channels, heads, new_attention_order)]

        self.input_blocks, skips = _input_blocks(m, in_channels, attention)
        channels = skips[-1]
        self.middle_block = Block(
            ResBlock(m, channels, channels),
            AttentionBlock(m, channels, m.num_heads, new_attention_order),
            ResBlock(m, channels, channels),
        )
        self.output_blocks = _output_blocks(m, skips, attention)
        channels = _features(m)[0]
        conv_out = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.out = nn.Sequential(
            GroupNorm32(m.norm_groups, channels, m.norm_eps), nn.SiLU(), conv_out
        )

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Applies the module to NCHW activations."""
        m = self.model
        if self.time_scale != 1:
            t = t.float() * self.time_scale
        embedding = self.time_embed(
            timestep_embedding(t, m.base_channels, m.max_period, m.time_embedding).to(x.dtype)
        )
        if self.label_emb is not None and labels is not None:
            embedding = embedding + torch.where(
                labels[:, None] >= 0, self.label_emb(labels.clamp(min=0)), 0.0
            )
        h, skips = x, []
        for block in self.input_blocks:
            h = block(h, embedding)
            skips.append(h)
        h = self.middle_block(h, embedding)
        for block in self.output_blocks:
            h = block(torch.cat([h, skips.pop()], dim=1), embedding)
        return self.out(h)
