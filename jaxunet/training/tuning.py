"""Chooses the fields of a run that tunes a trained network (`diffusion.objective=consistency`).

A recipe says how to train such a network from scratch. To tune it takes other values, so any recipe
serves: network, noise levels and images are those of the run of `init_from`, and the rest is
`CHOSEN`. Fields that the command line or the caller names keep their values.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from absl import logging
from ml_collections import ConfigDict

from jaxunet.checkpoint.folders import runs_inside
from jaxunet.checkpoint.load import check_exists
from jaxunet.checkpoint.newest import config_at
from jaxunet.config import Config, to_dict
from jaxunet.config.consistency import FINEST, NEEDS_WEIGHTS, check_teacher, chosen_q, chosen_stages
from jaxunet.config.schema import FACTS, Fields
from jaxunet.data.arrays import NAME
from jaxunet.data.automatic import OPEN, as_text, value_at, with_values
from jaxunet.runtime.errors import UserError
from jaxunet.weights.hub import on_this_machine

DEFAULTS = to_dict(Config())
OBJECTIVE, OF, Q, STAGES = (
    f'diffusion.{name}'
    for name in ('objective', 'consistency_of', 'consistency_q', 'consistency_stages')
)
LEVELS = {'mean': -1.1, 'std': 2.0}  # of ln σ
# What was best in minutes on an H200 (docs/few_steps.md, "What was measured").
CHOSEN: Fields = {
    'model.dropout': OPEN['model.dropout'],  # by the number of images
    'optimizer.name': 'muon',
    'optimizer.learning_rate': OPEN['optimizer.learning_rate'],
    'optimizer.betas': (0.9, 0.999),
    'optimizer.weight_decay': 0.0,
    'optimizer.warmup_steps': 0,
    'optimizer.schedule': 'linear',
    'optimizer.clip_norm': 0.0,
    'ema.rates': OPEN['ema.rates'],
    'train.steps': OPEN['train.steps'],
}
IN_PLACE = ('train.epochs', 'train.minutes')  # lengths of a run in place of train.steps
LENGTHS = frozenset({'train.steps', *IN_PLACE})
# Fields that go back to their defaults; a name that ends in a dot stands for a section.
CLEARED = (
    'loss.',
    'timesteps.',
    *IN_PLACE,
    'train.sample_steps',
    *(f'evaluation.{name}' for name in ('sampler', 'steps', 'variance', 'eta', 'skip_schedule')),
    'evaluation.guidance_scale',
)
TAKEN = ('model.', 'diffusion.', 'data.')  # those of the run of init_from, but for these fields
HELD_OUT = 'train.holdout_every'  # needs data.holdout
NOT_TAKEN = (
    OBJECTIVE,
    'diffusion.consistency_',
    'diffusion.kl_loss',
    'diffusion.vlb_weight',
    'data.num_workers',
    'data.cache',
)


def init_from_config(values: ConfigDict | Fields, known: Config | None) -> Config | None:
    """Returns the config of the model of `init_from`; None if it is not known, or not needed.

    A run that resumes needs neither the file nor the network any more, but for the message that it
    cannot become a run that tunes.

    Args:
      values, known: as for `for_tuning`.
    """
    raw = values.to_dict() if isinstance(values, ConfigDict) else values
    if not isinstance(raw, dict):
        return None
    begins_to_tune = value_at(raw, OBJECTIVE) == 'consistency' and not (
        known and known.diffusion.objective == 'consistency'
    )
    return config_at(raw.get('init_from')) if known is None or begins_to_tune else None


def for_tuning(
    values: ConfigDict | Fields,
    known: Config | None,
    start: Config | None,
    named: Collection[str],
) -> ConfigDict | Fields:
    """Returns the values of a config; if it tunes a network, with the choices, which it logs.

    Args:
      values: as for `jaxunet.config.resolve`.
      known: config of the run to resume, which chose already; None for a new one.
      start: config of the model whose weights the run starts from; None if it is not known.
      named: paths of the fields that the command line or the caller set. If the objective is not
        among them, it is the config file's, and so are all fields that differ from their defaults.

    Raises:
      UserError: there is nothing to tune, or a model that predicts neither v, edm nor flow.
    """
    raw = values.to_dict() if isinstance(values, ConfigDict) else values
    if not isinstance(raw, dict):
        return values
    run = known or start
    if run and run.diffusion.objective == 'consistency' and value_at(raw, OBJECTIVE) == '':
        raw, named = with_values(raw, {OBJECTIVE: 'consistency'}), [*named, OBJECTIVE]
    if value_at(raw, OBJECTIVE) != 'consistency':
        return values
    free = _free(raw, named)
    if known is not None and known.diffusion.objective == 'consistency':
        saved = to_dict(known)
        if not LENGTHS.isdisjoint(named):  # it replaces the length with which the run began
            saved = with_values(saved, {path: value_at(DEFAULTS, path) for path in IN_PLACE})
        return with_values(raw, {path: value_at(saved, path) for path in free})
    of = value_at(raw, OF) or _prediction(start, raw.get('init_from'))
    chosen = CHOSEN | {f'diffusion.{of}_{name}': value for name, value in LEVELS.items()} | {OF: of}
    q, reason = value_at(raw, Q), ''
    if STAGES in free:
        chosen[STAGES] = 4 if Q in free or not isinstance(q, int) else chosen_stages(q)
    stages = chosen.get(STAGES, value_at(raw, STAGES))
    if Q in free and isinstance(stages, int) and stages > 0:
        chosen[Q] = chosen_q(stages)
        reason = f'; q^stages is about {FINEST} (docs/few_steps.md)'
    cleared = {path: value_at(DEFAULTS, path) for path in free if path.startswith(CLEARED)}
    taken = _taken(start)
    changes = {path: value for path, value in (cleared | taken | chosen).items() if path in free}
    changed = with_values(raw, changes)
    differ = {path for path, value in changes.items() if value_at(raw, path) != value}
    ours = changes.keys() & chosen.keys()
    left_open = {path for path, value in changes.items() if value == OPEN.get(path)}
    _log('as in the run of init_from', changed, differ & (taken.keys() - ours))
    chosen_here = (ours | (differ - taken.keys())) - left_open
    _log('chosen to tune the network', changed, chosen_here, reason)
    return changed


def _log(words: str, values: Fields, paths: Set[str], end: str = '') -> None:
    """Logs the values of these fields, in the order of the schema."""
    if paths:
        fields = (f'{path}={as_text(value_at(values, path))}' for path in FACTS if path in paths)
        logging.info('%s: %s%s', words, ', '.join(fields), end)


def _free(raw: Fields, named: Collection[str]) -> set[str]:
    """Returns the paths of the fields that may be chosen, as they are not set, or left open."""

    def is_set(path: str) -> bool:
        value = value_at(raw, path)
        if value == (OPEN | {OF: '', Q: 0}).get(path):
            return False
        if OBJECTIVE in named:
            return path in named
        default = value_at(DEFAULTS, path)
        return value is not None and default != (tuple(value) if isinstance(value, list) else value)

    paths = {path for path in FACTS if path.startswith((*CLEARED, *TAKEN))} | {*CHOSEN, HELD_OUT}
    known = {path for path in paths if isinstance(raw.get(path.partition('.')[0]), dict)}
    return {path for path in known - {OBJECTIVE} if not is_set(path)}


def _taken(start: Config | None) -> Fields:
    """Returns the fields of the model that the run starts from, by their paths."""
    if start is None:
        return {}
    saved = to_dict(start)
    paths = [p for p in FACTS if p.startswith(TAKEN) and not p.startswith(NOT_TAKEN)]
    taken = {path: value_at(saved, path) for path in paths}
    if not taken['data.holdout']:
        taken[HELD_OUT] = 0
    if taken['data.path'] in ('', NAME):  # a file does not name its images, and arrays have no path
        del taken['data.path']
    return taken


def _prediction(start: Config | None, init_from: object) -> str:
    """Returns what the network of `init_from` predicts, v, edm or flow."""
    if not init_from:
        raise UserError(NEEDS_WEIGHTS)
    if start is None:
        check_exists(folder := on_this_machine(str(init_from)))
        raise UserError(
            f'init_from: {init_from}: expected the run, the checkpoint or the weights of a model '
            f'that predicts v, edm or flow, found none there that says so{runs_inside(folder)}'
        )
    check_teacher(start, str(init_from))
    return start.diffusion.prediction
