"""Chooses the fields that a config leaves open, such as configs/images.py, from its images.

A field is left open by a value that is not valid otherwise, the `left_open` of its facts.
"""

from __future__ import annotations

import contextlib
import copy
import math
from pathlib import Path
from typing import NamedTuple

from absl import logging
from ml_collections import ConfigDict

from jaxunet.config import Config, resolve, to_dict
from jaxunet.config.relations import MAX_STEPS_PER_CALL, step_counts
from jaxunet.config.schema import FACTS, DiffusionConfig, Fields
from jaxunet.data import ladders
from jaxunet.data.fitting import MODES
from jaxunet.data.holdout import held_out_count
from jaxunet.data.image_files import tar_stream_sizes
from jaxunet.data.npz import array_shape
from jaxunet.data.source import ArraySource, Source, spread
from jaxunet.data.sources import compressed_tar, open_data, open_images, open_pictures
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.remote import on_disk

OPEN = {path: facts.left_open for path, facts in FACTS.items() if facts.left_open is not None}
# Chosen with an open field, unless they are set.
ATTENTION, SCHEDULE = 'model.attention_resolutions', 'diffusion.schedule'
TIME_SCALE = 'diffusion.edm_time_scale'
COMPANIONS = {'model.channel_mult': (ATTENTION,), 'diffusion.objective': (SCHEDULE, TIME_SCALE)}
UNSET: dict[str, object] = {
    ATTENTION: (),
    SCHEDULE: DiffusionConfig.schedule,
    TIME_SCALE: DiffusionConfig.edm_time_scale,
}
# Images below which v has better pictures than flow, which overfits sooner, and tunings want
# dropout and a longer average. Measured with 450 to 600 and with 9,000 images (docs/results.md,
# "Recipes"; docs/few_steps.md); between these it is a guess.
FEW = 1000
# Images below which a tuning by Muon takes the higher rate. Measured with 500 and, with a small
# network, 1,797, which want it, and with 9,000 and 50,000 (docs/few_steps.md).
FEW_TO_TUNE = 2000
SIZES = 256  # images whose sizes are looked at
PIXELS = 16  # images whose pixels are looked at; `SIZES` where these have no colours
PROBE = 32  # pixels a side at which the pixels are looked at


class Facts(NamedTuple):
    """Facts about the images, on which the choices depend.

    Fields:
      images: number of images.
      sizes: (height, width) of some of them.
      grey: none of them has colours.
      channels: of an array that is neither grey nor RGB; 0 = they are.
    """

    images: int
    sizes: list[tuple[int, int]]
    grey: bool
    channels: int = 0


ANY = Facts(1000, [(64, 64)], False)  # for checking a config before its images are opened


def complete(
    values: ConfigDict | Fields,
    known: Config | None = None,
    start: Config | None = None,
    given: ArraySource | None = None,
) -> Config:
    """Returns the config with the fields that it leaves open chosen from its images; logs them.

    With `train.epochs`, the steps follow from the number of images. A config without it that leaves
    no field open is resolved without opening its images.

    Args:
      values: as for `resolve`.
      known: config of the run to resume, which chose already; None for a new one.
      start: config of the run from whose weights a new one starts (`init_from`); its objective is
        kept, because the weights predict nothing else.
      given: the images in memory that `data.path` stands for; None = it is a path.

    Raises:
      UserError: the config is invalid, or the images cannot be opened or are too small.
    """
    config = _with_pictures(_complete(values, known, start, given), known)
    return _with_minutes(config, known) if known and config.train.minutes else config


def _complete(
    values: ConfigDict | Fields,
    known: Config | None,
    start: Config | None,
    given: ArraySource | None,
) -> Config:
    """Returns the config without the fields of its pictures; see `complete`."""
    raw = values.to_dict() if isinstance(values, ConfigDict) else values
    if known is not None:
        raw = _with_rule(raw, known)
    left_open = [path for path, empty in OPEN.items() if value_at(raw, path) == empty]
    if not left_open:
        return _with_epochs(resolve(raw), given)
    if known is not None:
        saved = to_dict(known)
        companions = [other for path in left_open for other in COMPANIONS.get(path, ())]
        paths = [*left_open, *(path for path in companions if not _is_set(raw, path))]
        kept = with_values(raw, {path: value_at(saved, path) for path in paths})
        return _with_epochs(resolve(kept), given)
    if start is not None and 'diffusion.objective' in left_open:
        return _complete(_with_objective(raw, start), None, None, given)
    # Finds other mistakes before anything is opened.
    draft = resolve(with_values(raw, choose(raw, ANY)))
    facts = look(draft, given)
    chosen = choose(raw, facts)
    config = _with_epochs(resolve(with_values(raw, chosen)), given)
    if config.train.epochs or config.train.minutes:
        chosen.pop('train.steps', None)
    _log(config, facts, chosen)
    return config


def _with_pictures(config: Config, known: Config | None) -> Config:
    """Returns the config with the size and channels of the pictures of data.condition=folder:PATH.

    They are those of `known`; without it, the image's size, and the channels that a few of the
    pictures have.
    """
    model = config.model
    if not config.picture_path or (model.low_res_size and model.condition_channels):
        return config
    if known is not None and known.picture_path:
        size, channels = known.model.low_res_size, known.model.condition_channels
    else:
        size, channels = config.data.image_size, model.condition_channels
        channels = channels or _channels_of_pictures(config)
    chosen = {
        'low_res_size': model.low_res_size or size,
        'condition_channels': model.condition_channels or channels,
    }
    logging.info(
        'chosen for the pictures of data.condition: %s',
        ', '.join(f'model.{name}={as_text(value)}' for name, value in chosen.items()),
    )
    return resolve(to_dict(config.replace(model=chosen)))


def _channels_of_pictures(config: Config) -> int:
    stored = _stored_shape(config.picture_path)
    if stored is not None and len(stored) == 4 and stored[3] not in MODES:
        return stored[3]
    return 1 if _is_grey(open_pictures(config, (PROBE, PROBE, 3))) else 3


def _with_rule(raw: Fields, known: Config) -> Fields:
    """Returns a config with the readings of the run to resume that are older than their fields."""
    rule, ground = 'data.augment_rule', 'data.background'
    if known.data.background == 'drop' and value_at(raw, ground) == 'white':
        logging.warning(
            '%s=drop, as the run began: the colours of transparent pixels count; a new run draws '
            'transparent images on white',
            ground,
        )
        raw = with_values(raw, {ground: 'drop'})
    both = known.data.augment == value_at(raw, 'data.augment') == 'edm'
    if not both or known.data.augment_rule == value_at(raw, rule) or value_at(raw, rule) != 'edm':
        return raw
    logging.warning(
        '%s=%s, as the run began: its network has learned angles that mean the opposite of those '
        "of EDM's code (docs/training.md); a new run with init_from takes them over",
        rule,
        known.data.augment_rule,
    )
    return with_values(raw, {rule: known.data.augment_rule})


def _with_objective(raw: Fields, start: Config) -> Fields:
    """Returns a config with the objective of a run, and its schedule unless one is set."""
    taken: dict[str, object] = {'diffusion.objective': start.diffusion.objective}
    for path in (SCHEDULE, *[TIME_SCALE] * (start.diffusion.objective == 'edm')):
        if not _is_set(raw, path):
            taken[path] = value_at(to_dict(start), path)
    fields = ', '.join(f'{path}={value}' for path, value in taken.items())
    logging.info('as in the run of init_from: %s', fields)
    return with_values(raw, taken)


def _with_epochs(config: Config, given: ArraySource | None) -> Config:
    """Returns the config with the steps that `train.epochs` takes, if it is set."""
    if not config.train.epochs:
        return config
    images = len(open_images(config, given))
    config = resolve(to_dict(config.replace(train={'steps': epoch_steps(config, images)})))
    logging.info(
        'train.epochs=%g: %s steps of %d from %s images',
        config.train.epochs,
        f'{config.train.steps:,}',
        config.data.batch_size,
        f'{images:,}',
    )
    return config


def epoch_steps(config: Config, images: int) -> int:
    """Returns the least number of steps that show each of `images` images `train.epochs` times.

    It is rounded up to a multiple of `steps_of_calls`.
    """
    steps = math.ceil(config.train.epochs * images / config.data.batch_size)
    calls = steps_of_calls(config)
    return max(-(-steps // calls), 1) * calls


def steps_of_calls(config: Config) -> int:
    """Returns what a number of steps that is chosen must be a multiple of.

    It is `train.steps_per_call`; where that is left to choose, the largest number up to
    `MAX_STEPS_PER_CALL` that divides the other step counts.
    """
    others = math.gcd(*(n for name, n in step_counts(config).items() if name != 'train.steps'))
    return config.train.steps_per_call or max(
        n for n in range(1, MAX_STEPS_PER_CALL + 1) if others % n == 0
    )


def steps_within(config: Config, step_seconds: float) -> int:
    """Returns the number of steps that fit into `train.minutes`; at least one call's."""
    calls = steps_of_calls(config)
    return max(int(60 * config.train.minutes / step_seconds) // calls, 1) * calls


def _with_minutes(config: Config, known: Config) -> Config:
    """Returns the config of a resumed run with a budget, whose step was timed when it began."""
    before, steps = known.train.minutes, known.train.steps
    if not before:
        raise UserError(
            f'train.minutes: the run ends at train.steps={steps} without a budget, so the time of '
            'a step is not known; set train.steps'
        )
    if config.train.minutes != before:
        steps = steps_within(config, 60 * before / steps)
    together = config.train.steps_per_call or 1  # may be another number now
    steps = max(steps // together, 1) * together
    return resolve(to_dict(config.replace(train={'steps': steps})))


def look(config: Config, given: ArraySource | None = None) -> Facts:
    """Returns the facts about the images of a config.

    Args:
      given: as for `complete`.

    Raises:
      UserError: they cannot be opened, or an image is corrupt.
    """
    stored = given.stored_shape if given is not None else _stored_shape(config.data.path)
    found = stored[3] if stored is not None and len(stored) == 4 else 1
    # The fourth channel may be opacity: opening the set says so.
    more = 0 if found in (*MODES, 4) or config.data.background == 'keep' else found
    channels = more or config.model.image_channels
    source = open_data(config, (PROBE, PROBE, channels), given)
    if given is None and (
        tar := compressed_tar(config.data.path)
    ):  # its images now have the shape of the probe
        sizes = tar_stream_sizes(tar, SIZES)
    else:
        sizes = [source.stored_size(int(row)) for row in spread(len(source), SIZES)]
    return Facts(len(source), sizes, _is_grey(source), more)


def _stored_shape(path: str) -> tuple[int, ...] | None:
    """Returns the shape of an array of images; None for a set of another form."""
    if path.partition('?')[0].lower().endswith(('.npz', '.npy')):
        with contextlib.suppress(UserError):  # opening the set reports it
            return array_shape(Path(on_disk(path)))
    return None


def choose(raw: Fields, facts: Facts) -> dict[str, object]:
    """Returns values for the fields that a config leaves open, by their paths.

    Args:
      raw: the config as nested dicts.
      facts: about its images.

    Raises:
      UserError: the images are too small.
    """
    size = value_at(raw, 'data.image_size') or ladders.image_size(facts.sizes)
    batch = value_at(raw, 'data.batch_size')
    found = facts.channels or (1 if facts.grey else 3)
    channels = 4 if value_at(raw, 'data.background') == 'keep' else found
    if not (isinstance(size, tuple | list) and all(type(side) is int for side in size)):
        size = (ladders.USUAL,)  # `resolve` reports the value of the config
    height, width = size[0], size[-1]
    levels = ladders.levels_of(height, width)
    if type(batch) is not int or batch < 1:
        batch = ladders.batch_size(height * width, facts.images)
    tunes = value_at(raw, 'diffusion.objective') == 'consistency'
    count = facts.images
    few = tunes and count < FEW
    drops = few and value_at(raw, 'model.dropout') != 0
    steps = ladders.steps_to_tune(count, batch, drops) if tunes else ladders.steps_to_train(count)
    choices: dict[str, object] = {
        'data.image_size': tuple(size),
        'model.image_channels': channels,
        'model.channel_mult': ladders.LADDERS[levels],
        'model.dropout': 0.2 if few else 0.0,
        'data.batch_size': batch,
        # flow has no schedule, so a schedule that is set rules it out.
        'diffusion.objective': 'v' if count < FEW or _is_set(raw, SCHEDULE) else 'flow',
        'optimizer.learning_rate': _learning_rate(raw, batch, count),
        'ema.rates': (0.9993,) if few else (0.995,),
        'train.steps': steps,
    }
    chosen = {path: v for path, v in choices.items() if value_at(raw, path) == OPEN[path]}
    if 'model.channel_mult' in chosen and not _is_set(raw, ATTENTION):
        chosen[ATTENTION] = ladders.attended(min(height, width), levels)
    if chosen.get('diffusion.objective') == 'v' and not _is_set(raw, SCHEDULE):
        chosen[SCHEDULE] = 'cosine'
    return chosen


def _learning_rate(raw: Fields, batch: int, images: int) -> float:
    """Returns a rate for the objective, the schedule and the start of a run.

    It is 1e-4 √(batch/32), four times as much if it falls and the weights are new
    (docs/results.md, "Recipes"); or the best of the tunings of docs/few_steps.md.
    """
    if value_at(raw, 'diffusion.objective') == 'consistency':
        if value_at(raw, 'optimizer.name') != 'muon':
            return 1e-4
        return 2e-3 if images < FEW_TO_TUNE else 6e-4
    falls = value_at(raw, 'optimizer.schedule') not in ('constant', None)
    rate = 4e-4 if falls and not raw.get('init_from') else 1e-4
    return float(f'{rate * math.sqrt(batch / 32):.1g}')


def _is_grey(source: Source) -> bool:
    for count in (PIXELS, SIZES):
        pixels = source.load(spread(len(source), count))
        if (pixels != pixels[..., :1]).any():
            return False
    return True


def _log(config: Config, facts: Facts, chosen: dict[str, object]) -> None:
    """Logs the choices, and when to stop."""
    by_area = sorted(set(facts.sizes), key=math.prod)
    ends = dict.fromkeys([by_area[0], by_area[-1]])
    logging.info(
        'chosen for %s of %s pixels (height x width): %s',
        '1 image' if facts.images == 1 else f'{facts.images:,} images',
        ' to '.join(f'{height}x{width}' for height, width in ends),
        ', '.join(f'{path}={as_text(value)}' for path, value in chosen.items()),
    )
    if 'train.steps' in chosen:
        steps, batch = config.train.steps, config.data.batch_size
        training = facts.images - held_out_count(config.data.holdout, facts.images)
        warned = ', or when the log says that the held-out loss rises'
        logging.info(
            'the run ends after %s steps, when it has seen each image about %s times%s. Stop it '
            'earlier with Ctrl-C when you like the pictures in samples/%s. For a run of another '
            'length, set train.steps or train.minutes',
            f'{steps:,}',
            f'{round(steps * batch / training):,}',
            '' if config.optimizer.schedule == 'constant' else ' and its learning rate is 0',
            warned if config.train.holdout_every else '',
        )


def as_text(value: object) -> str:
    """Returns the value of a field as a command line gives it."""
    return ','.join(map(str, value)) if isinstance(value, tuple) else str(value)


def value_at(raw: Fields, path: str) -> object:
    """Returns a field by its path; None if the config lacks it, which `resolve` reports."""
    section, name = path.split('.')
    return fields.get(name) if isinstance(fields := raw.get(section), dict) else None


def _is_set(raw: Fields, path: str) -> bool:
    """Returns True if a config sets a field of `UNSET`; a list stands for a tuple."""
    value = value_at(raw, path)
    return value not in (None, [], UNSET[path])


def with_values(raw: Fields, changes: dict[str, object]) -> Fields:
    """Returns a copy of a config with fields changed, by their paths."""
    changed = copy.deepcopy(raw)
    for (section, name), value in ((path.split('.'), value) for path, value in changes.items()):
        changed[section][name] = value
    return changed
