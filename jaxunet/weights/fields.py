"""Which fields of a config decide what a set of weights computes; the others (dropout, initialisation, ...) only matter in training."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxunet.config import Config
from jaxunet.weights.names import attention_levels

TRAINING_ONLY = ('dropout', 'label_dropout', 'init', 'zero_init', 'remat')


def network_fields(config: Config) -> dict[str, Any]:
    """Field name -> value of all that the network's function depends on, without options that have no effect beside others."""
    m = config.model
    fields = {
        f'model.{f.name}': getattr(m, f.name)
        for f in dataclasses.fields(m)
        if f.name not in TRAINING_ONLY
    }
    del fields['model.attention_resolutions']  # sides in pixels: levels are what the weights know
    fields['model.attention_resolutions (as levels, 0 = full resolution)'] = attention_levels(
        config
    )
    fields['model.channel_mult'] = tuple(float(mult) for mult in m.channel_mult)
    if m.resblock_updown or len(m.channel_mult) == 1:
        del fields['model.conv_resample']
    if m.resblock_updown or len(m.channel_mult) == 1 or not m.conv_resample:
        del fields['model.downsample_padding']
    if len(m.channel_mult) == 1:
        del fields['model.resblock_updown']
    fields['model.num_heads_upsample'] = m.num_heads_upsample or m.num_heads
    return fields | {'diffusion.learn_sigma': config.diffusion.learn_sigma}


def diffusion_fields(config: Config) -> dict[str, Any]:
    """Field name -> value of what a sampler must know besides the network."""
    d = config.diffusion
    return {
        'diffusion.steps': d.steps,
        'diffusion.schedule': d.schedule,
        'diffusion.prediction': d.prediction,
    }


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """`field: expected a, found b` for every field that differs; one that is in one of them only has no effect in the other."""
    return [
        f'{name}: expected {a!r}, found {found[name]!r}'
        for name, a in expected.items()
        if name in found and found[name] != a
    ]
