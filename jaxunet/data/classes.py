"""What the labels of a conditional model mean: the names of its classes, as the images give them and its checkpoints keep them."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import logging

from jaxunet.config import Config
from jaxunet.data.source import Source
from jaxunet.runtime.errors import UserError, listed, near_misses


def check_classes(config: Config, source: Source) -> None:
    """A conditional model needs a label for every image, each within its table; labels without images are worth a warning."""
    wanted, names = config.model.num_classes, source.class_names
    if not wanted:
        return
    path = config.data.path
    if not names:
        if source.unlabelled_by:
            raise UserError(
                f'model.num_classes: {wanted}, but {path} has no class labels, as {source.unlabelled_by}; move such images into '
                'a class sub-folder or away, or set model.num_classes to 0'
            )
        raise UserError(
            f'model.num_classes: {wanted}, but {path} has no class labels; set it to 0, or use class sub-folders'
        )
    found = len(names)
    if found > wanted:
        raise UserError(
            f'model.num_classes: {wanted}, but {path} has {found} classes; raise it, or name some in data.classes'
        )
    if found < wanted:
        labels = (
            f'label {found} has' if found + 1 == wanted else f'labels {found} to {wanted - 1} have'
        )
        logging.warning(
            'model.num_classes: %d, but %s has %d classes (%s): %s no images and will not be trained; for a new run, set it to %d',
            *(wanted, path, found, listed(names), labels, found),
        )


def keep_classes(
    saved: tuple[str, ...], now: tuple[str, ...], config: Config, workdir: pathlib.Path
) -> tuple[str, ...]:
    """The class names of a run that goes on: those that its checkpoint has, and new ones after them.

    Args:
      saved: of the checkpoint; empty if it is of an earlier version, which kept none.
      now: of the images.

    Raises:
      UserError: a label of the model would change its meaning.
    """
    if not config.model.num_classes:
        return ()
    changed = [
        f'{i} would be {b} instead of {a}'
        for i, (a, b) in enumerate(zip(saved, now, strict=False))
        if a != b
    ]
    if changed:
        order = (
            f', here with --config.data.classes="{saved}"'
            if set(saved) <= set(now) and len(saved) <= 20
            else ''
        )
        raise UserError(
            f'{workdir} holds a run with other classes; label {changed[0]}:\n'
            f'  labels 0, 1, ... of the run: {listed(saved)}\n'
            f'  labels 0, 1, ... of {config.data.path}: {listed(now)}\n'
            f'Give it the same names in the same order{order}, choose another --workdir, or start from its weights with '
            f'--config.init_from={workdir}'
        )
    return max(saved, now, key=len)


def label_of(given: str, num_classes: int, names: Sequence[str]) -> int:
    """The label that `given`, a number or else a name, stands for.

    Raises:
      UserError: it is neither a label of the model nor the name of one.
    """
    if given.isdecimal() and int(given) < num_classes:
        return int(given)
    if given in names:
        return names.index(given)
    telling = (
        [f'{i} {name}' for i, name in enumerate(names)]
        if any(name != str(i) for i, name in enumerate(names))
        else []
    )
    known = f' or names ({listed(telling)})' if telling else ''
    raise UserError(
        f'--class_labels: expected whole numbers from 0 to {num_classes - 1}{known}, found {given!r}{near_misses(given, names)}'
    )
