"""A plain PyTorch ADM UNet with guided-diffusion's parameter names: the peer of `jaxunet.unet` in parity tests and benchmarks.

Source of names and architecture: openai/guided-diffusion; Dhariwal & Nichol 2021, arXiv 2105.05233.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


def timestep_embedding(t: torch.Tensor, width: int, max_period: int = 10000) -> torch.Tensor:
    """Cosines, then sines, of t · max_period^(-i / half): (batch,) -> (batch, width)."""
    half = width // 2
    frequencies = torch.exp(-math.log(max_period) / half * torch.arange(half, dtype=torch.float32, device=t.device))
    angles = t.float()[:, None] * frequencies[None]
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=-1), (0, width % 2))


class GroupNorm32(nn.GroupNorm):
    """GroupNorm in float32 whatever the compute type."""

    def __init__(self, channels: int) -> None:
        super().__init__(32, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype)


class Downsample(nn.Module):
    """Half the resolution: stride-2 convolution (`learned`) or average pool."""

    def __init__(self, channels: int, learned: bool) -> None:
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1) if learned else nn.AvgPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x)


class Upsample(nn.Module):
    """Twice the resolution: nearest neighbour, then a convolution (`learned`)."""

    def __init__(self, channels: int, learned: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if learned else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode='nearest'))


class ResBlock(nn.Module):
    """Two convolutions with the embedding between them; `resample` is '', 'down' or 'up'."""

    def __init__(self, channels: int, features: int, width: int, *, scale_shift: bool, dropout: float, resample: str = '') -> None:
        super().__init__()
        self.scale_shift = scale_shift
        self.in_layers = nn.Sequential(GroupNorm32(channels), nn.SiLU(), nn.Conv2d(channels, features, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * features if scale_shift else features))
        self.out_layers = nn.Sequential(GroupNorm32(features), nn.SiLU(), nn.Dropout(dropout), nn.Conv2d(features, features, 3, padding=1))
        self.skip_connection = nn.Identity() if channels == features else nn.Conv2d(channels, features, 1)
        changes = {'': nn.Identity(), 'down': Downsample(channels, False), 'up': Upsample(channels, False)}
        self.change = changes[resample]

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
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
    """Self-attention over all pixels. `new_order`: qkv's channels are all q, all k, all v; else q, k, v of each head in turn."""

    def __init__(self, channels: int, heads: int, new_order: bool) -> None:
        super().__init__()
        self.heads, self.new_order = heads, new_order
        self.norm = GroupNorm32(channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x).flatten(2))
        if self.new_order:
            q, k, v = qkv.reshape(batch, 3, self.heads, channels // self.heads, -1).transpose(-1, -2).unbind(1)
        else:
            q, k, v = qkv.reshape(batch, self.heads, 3, channels // self.heads, -1).transpose(-1, -2).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(batch, channels, -1)
        return x + self.proj_out(y).reshape(batch, channels, height, width)


class Block(nn.Sequential):
    """Modules in turn; residual blocks also get the embedding."""

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x, embedding) if isinstance(module, ResBlock) else module(x)
        return x


class UNet(nn.Module):
    """ADM's UNet on NCHW images; options as in `jaxunet.config.ModelConfig`, `attention_levels` counted from full resolution."""

    def __init__(
        self,
        *,
        in_channels: int,
        out_channels: int,
        base_channels: int,
        channel_mult: tuple[float, ...],
        num_res_blocks: int,
        attention_levels: tuple[int, ...],
        num_heads: int = 0,
        num_heads_upsample: int = 0,
        num_head_channels: int = 0,
        conv_resample: bool = False,
        resblock_updown: bool = False,
        scale_shift_norm: bool = False,
        new_attention_order: bool = False,
        num_classes: int = 0,
        dropout: float = 0.0,
        max_period: int = 10000,
    ) -> None:
        super().__init__()
        self.base_channels, self.max_period = base_channels, max_period
        width = 4 * base_channels
        self.time_embed = nn.Sequential(nn.Linear(base_channels, width), nn.SiLU(), nn.Linear(width, width))
        self.label_emb = nn.Embedding(num_classes, width) if num_classes else None
        levels = [int(mult * base_channels) for mult in channel_mult]
        last = len(levels) - 1

        def res_block(channels: int, features: int, resample: str = '') -> ResBlock:
            return ResBlock(channels, features, width, scale_shift=scale_shift_norm, dropout=dropout, resample=resample)

        def attention(channels: int, heads: int) -> AttentionBlock:
            return AttentionBlock(channels, heads or channels // num_head_channels, new_attention_order)

        channels = levels[0]
        self.input_blocks = nn.ModuleList([Block(nn.Conv2d(in_channels, channels, 3, padding=1))])
        skips = [channels]
        for level, features in enumerate(levels):
            for _ in range(num_res_blocks):
                block = [res_block(channels, features)]
                channels = features
                if level in attention_levels:
                    block.append(attention(channels, num_heads))
                self.input_blocks.append(Block(*block))
                skips.append(channels)
            if level != last:
                down = res_block(channels, channels, 'down') if resblock_updown else Downsample(channels, conv_resample)
                self.input_blocks.append(Block(down))
                skips.append(channels)

        self.middle_block = Block(res_block(channels, channels), attention(channels, num_heads), res_block(channels, channels))

        self.output_blocks = nn.ModuleList()
        for level, features in reversed(list(enumerate(levels))):
            for i in range(num_res_blocks + 1):
                block = [res_block(channels + skips.pop(), features)]
                channels = features
                if level in attention_levels:
                    block.append(attention(channels, num_heads_upsample or num_heads))
                if level > 0 and i == num_res_blocks:
                    block.append(res_block(channels, channels, 'up') if resblock_updown else Upsample(channels, conv_resample))
                self.output_blocks.append(Block(*block))
        self.out = nn.Sequential(GroupNorm32(channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1))

    def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        embedding = self.time_embed(timestep_embedding(t, self.base_channels, self.max_period).to(x.dtype))
        if self.label_emb is not None and labels is not None:
            embedding = embedding + self.label_emb(labels)
        h, skips = x, []
        for block in self.input_blocks:
            h = block(h, embedding)
            skips.append(h)
        h = self.middle_block(h, embedding)
        for block in self.output_blocks:
            h = block(torch.cat([h, skips.pop()], dim=1), embedding)
        return self.out(h)
