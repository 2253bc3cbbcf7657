"""Checks that a resumed run changes only fields of its config that may change."""

from __future__ import annotations

import pathlib
import shlex

from jaxunet.config import Config, diff
from jaxunet.runtime.errors import UserError
from jaxunet.weights.fields import needed_fields

# Prefixes of the fields that give the arrays of a checkpoint or the pixels their shape or meaning,
# or choose the images that a run never trains on. A run that resumes may change any other field,
# and the model fields that matter only in training.
FIXED_FIELDS = (
    'model.',
    'diffusion.',
    'ema.rates',
    'ema.widths',
    'optimizer.name',
    'data.holdout',
    'data.bits',
    'data.range',
)
FREE_MODEL_FIELDS = ('model.dropout', 'model.label_dropout', 'model.remat')


def fixed_changes(saved: Config, now: Config, fixed: tuple[str, ...] = FIXED_FIELDS) -> list[str]:
    """Returns the differences in fields that a resumed run cannot change, one line each.

    Args:
      fixed: prefixes of these fields, which exclude `FREE_MODEL_FIELDS`.
    """
    changes = diff(saved, now)
    return [c for c in changes if c.startswith(fixed) and not c.startswith(FREE_MODEL_FIELDS)]


def other_run(workdir: pathlib.Path, changed: list[str], advice: str = '') -> UserError:
    """Returns the error for a workdir whose run has another config.

    Args:
      changed: the differences, one line each.
      advice: an alternative to choosing another workdir; ends the message.
    """
    return UserError(
        f'{workdir} holds a run with another config:\n  '
        + '\n  '.join(changed)
        + f'\nChoose another --workdir{advice}'
    )


def check_resumable(saved: Config, now: Config, workdir: pathlib.Path) -> list[str]:
    """Returns the differences between the saved config and this command's, one line each.

    Raises:
      UserError: a field differs that a run cannot change.
    """
    changes = diff(saved, now)
    fixed = fixed_changes(saved, now)
    if saved.augmentation_inputs != now.augmentation_inputs:
        fixed += [c for c in changes if c.startswith('data.augment:')]
    elif now.augmentation_inputs:  # the layer's weights have the rule's meaning
        fixed += [c for c in changes if c.startswith('data.augment_rule:')]
    if bool(saved.picture_path) != bool(now.picture_path):
        fixed += [c for c in changes if c.startswith('data.condition:')]
    labels = saved.data.labels, now.data.labels
    # Runs of earlier versions took folders, which a file of labels beside them now replaces.
    if now.model.num_classes and labels != ('', 'folders'):
        fixed += [c for c in changes if c.startswith('data.labels:')]
    if fixed:
        advice = (
            f', or start from its weights with --config.init_from={shlex.quote(str(workdir))}'
            if not needed_fields(saved, now)
            else '; its weights do not fit this model'
        )
        if saved.diffusion.folds_guidance and now.diffusion.objective == 'consistency':
            advice = '; a network with guidance folded in cannot be tuned further'
        raise other_run(workdir, fixed, advice)
    return changes
