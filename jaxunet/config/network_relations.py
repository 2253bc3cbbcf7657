"""Checks of the network that involve several fields of a config."""

from __future__ import annotations

from collections.abc import Iterator

from jaxunet.config.schema import Config

# Filters of model.resample_filter: box, and NCSN++'s.
FILTERS = ((1, 1), (1, 3, 3, 1))


def check_network_options(config: Config) -> Iterator[str]:
    """Checks the options of DDPM++ and NCSN++ that need others."""
    m = config.model
    if m.resample_filter not in FILTERS:
        yield (f'model.resample_filter: expected (1, 1) or (1, 3, 3, 1), found {m.resample_filter}')
    elif m.resample_filter != (1, 1) and m.conv_resample and not m.resblock_updown:
        yield (
            f'model.resample_filter: {m.resample_filter} has no effect on the convolutions of '
            'model.conv_resample; leave one of them out'
        )
    if m.resample_proj and not m.resblock_updown:
        yield 'model.resample_proj: True needs model.resblock_updown=True'
    if m.time_embedding == 'fourier' and config.diffusion.prediction != 'edm':
        yield (
            'model.time_embedding: fourier embeds ln σ, so it needs diffusion.objective=edm, '
            f'found {config.diffusion.objective}'
        )
    if m.time_embedding == 'fourier' and config.optimizer.weight_decay:
        yield (
            f'optimizer.weight_decay: {config.optimizer.weight_decay} would shrink the fixed '
            'frequencies of model.time_embedding=fourier; set it to 0'
        )


def check_network_shape(config: Config) -> Iterator[str]:
    """Checks that the image divides by the levels, and the channels by heads and norm groups."""
    m = config.model
    height, width, _ = config.image_shape
    levels = len(m.channel_mult)
    factor = 2 ** (levels - 1)
    low_res = config.low_res_shape
    low_height, low_width = (0, 0) if low_res is None else low_res[:2]
    if low_height > height or low_width > width:
        yield (
            f'model.low_res_size: expected at most data.image_size ({height}x{width}), as a larger '
            f'picture shows no more, found {low_height}x{low_width}'
        )
    if height % factor or width % factor:
        yield (
            f'data.image_size: {height}x{width} must be divisible by {factor}, '
            f'as model.channel_mult has {levels} levels'
        )
    sides = [min(height, width) >> level for level in range(levels)]
    for resolution in m.attention_resolutions:
        if resolution not in sides:
            yield (
                f'model.attention_resolutions: expected some of {sides}, the shorter sides of the '
                f'levels, found {resolution}'
            )
    head_field = 'num_heads' if m.num_heads else 'num_head_channels'
    head_value = m.num_heads or m.num_head_channels
    for level, mult in enumerate(m.channel_mult):
        channels = int(mult * m.base_channels)
        # The middle block attends at the lowest level in any case.
        attends = level in config.attention_levels or level == levels - 1
        if attends and channels % head_value:
            yield (
                f'model.{head_field}: {head_value} does not divide the {channels} channels '
                f'of level {level}'
            )
        if channels <= 0 or (m.norm_group_channels == 1 and channels % m.norm_groups):
            yield (
                f'model.channel_mult: {mult} x base_channels {m.base_channels} = {channels} '
                f'channels, not a multiple of model.norm_groups ({m.norm_groups})'
            )
    if m.norm_group_channels == 1:
        if m.conv_in_channels % m.norm_groups:
            yield (
                f'model.conv_in_channels: {m.conv_in_channels} is not a multiple of '
                f'model.norm_groups ({m.norm_groups})'
            )
        return
    widths = {int(mult * m.base_channels) for mult in m.channel_mult} | {m.conv_in_channels}
    joined = sorted({a + b for a in widths for b in widths | {0}} - {0})  # with skip connections
    if wrong := [channels for channels in joined if channels % m.groups(channels)]:
        yield (
            f'model.norm_group_channels: a GroupNorm of {wrong[0]} channels would have '
            f'{m.groups(wrong[0])} groups, which do not divide them'
        )
