"""The fields of a config that determine what a set of weights computes.

The other fields (dropout, initialisation, ...) matter only in training.
"""

from __future__ import annotations

import dataclasses

from jaxunet.config import Config
from jaxunet.runtime.errors import UserError, itemized

Fields = dict[str, object]  # field name -> value

TRAINING_ONLY = ('dropout', 'label_dropout', 'init', 'zero_init', 'remat')
# Options that only NVlabs/edm has, with values that stand for the networks of other programs.
NVLABS_ONLY = {
    'skip_scale': 1.0,
    'conv_in_channels': 0,
    'resample_filter': (1, 1),
    'resample_proj': False,
    'encoder_type': 'standard',
    'decoder_attention': 'all',
    'channel_mult_noise': 1,
    'label_position': 'output',
    'norm_group_channels': 1,
}
# Fields of the label table and of the first and last convolution. A run that starts from other
# weights may change them: these layers start fresh, and the rest of the network does not depend on
# them.
REPLACEABLE = ('model.num_classes', 'model.image_channels', 'diffusion.learn_sigma')
LEVELS = 'model.attention_resolutions (as levels, 0 = full resolution)'


def network_fields(config: Config) -> Fields:
    """Returns the fields that the network's function depends on.

    Options without effect, such as the resampling of a single level, are left out.
    """
    model = config.model
    fields: Fields = {
        f'model.{f.name}': getattr(model, f.name)
        for f in dataclasses.fields(model)
        if f.name not in TRAINING_ONLY
    }
    # Weights know levels, not sides in pixels.
    del fields['model.attention_resolutions']
    fields[LEVELS] = config.attention_levels
    fields['model.channel_mult'] = tuple(float(mult) for mult in model.channel_mult)
    if model.resblock_updown or len(model.channel_mult) == 1:
        del fields['model.conv_resample']
    if model.resblock_updown or len(model.channel_mult) == 1 or not model.conv_resample:
        del fields['model.downsample_padding']
    if len(model.channel_mult) == 1:
        for name in ('resblock_updown', 'resample_filter', 'resample_proj', 'encoder_type'):
            del fields[f'model.{name}']
    if not model.num_classes:
        del fields['model.label_position']
    if model.conv_in_channels == int(model.channel_mult[0] * model.base_channels):
        fields['model.conv_in_channels'] = 0
    fields['model.num_heads_upsample'] = model.num_heads_upsample or model.num_heads
    return fields | {'diffusion.learn_sigma': config.diffusion.learn_sigma}


def diffusion_fields(config: Config) -> Fields:
    """Returns the fields that a sampler needs besides the network."""
    diffusion = config.diffusion
    fields: Fields = {'diffusion.objective': diffusion.objective}
    if not diffusion.continuous:
        return fields | {
            'diffusion.steps': diffusion.steps,
            'diffusion.schedule': diffusion.schedule,
            'diffusion.rescale_timesteps': diffusion.time_scale != 1,
        }
    if diffusion.objective == 'consistency':
        fields['diffusion.consistency_of'] = diffusion.consistency_of
    if diffusion.prediction == 'edm':
        fields['diffusion.edm_sigma_data'] = diffusion.edm_sigma_data
        fields['diffusion.edm_time_scale'] = diffusion.edm_time_scale
    return fields


def differences(expected: Fields, found: Fields) -> list[str]:
    """Returns `field: expected a, found b` for every field of both that differs.

    A field that only one of them has is skipped, because it has no effect in the other.
    """
    return [
        f'{name}: expected {a!r}, found {found[name]!r}'
        for name, a in expected.items()
        if name in found and found[name] != a
    ]


def network_differences(expected: Config, found: Config, side: int) -> list[str]:
    """Returns `field: expected a, found b` for every field of the network that differs.

    Args:
      side: shorter side of the images in pixels. Levels with attention are named by the sides of
        their feature maps at this size, as in `model.attention_resolutions`.
    """
    fields = []
    for config in (expected, found):
        named = network_fields(config)
        del named[LEVELS]
        named['model.attention_resolutions'] = _sides(config, side)
        fields.append(named)
    return differences(*fields)


def _sides(config: Config, side: int) -> tuple[int, ...]:
    """Returns the sides in pixels of the levels with attention, for images of `side` pixels."""
    return tuple(side >> level for level in config.attention_levels)


def needed_fields(theirs: Config, ours: Config) -> list[str]:
    """Returns what `ours` must set so that a run of it can start from weights of `theirs`.

    Each line is `field=value (now value)`. The list is empty if the networks differ at most in
    image size and in the `REPLACEABLE` fields.
    """
    expected, found = network_fields(theirs), network_fields(ours)
    lines = []
    for name in expected.keys() & found.keys() - set(REPLACEABLE):
        if expected[name] == found[name]:
            continue
        field = name.split(' ')[0].removeprefix('model.')
        value = getattr(theirs.model, field)
        if name == LEVELS:
            value = _sides(theirs, min(ours.image_shape[:2]))
        if value != (now := getattr(ours.model, field)):  # else it follows from another field
            lines.append(f'model.{field}={value} (now {now})')
    return sorted(lines)


def check_reusable(theirs: Config, ours: Config, source: str) -> None:
    """Checks that a run of `ours` can start from weights of `theirs`.

    Args:
      source: name of the weights; the error message begins with it.

    Raises:
      UserError: the networks differ by more than image size and the `REPLACEABLE` fields. The
        message lists the fields to set.
    """
    if needed := needed_fields(theirs, ours):
        raise UserError(
            f'{source}: cannot start this run: only classes, image size, image channels and the '
            'learned variance may differ from its network. To start from it, set'
            f'{itemized(needed)}'
        )
