"""The class names behind a conditional model's labels, in its images and in its checkpoints."""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from absl import logging

from jaxunet.config import Config
from jaxunet.data.rules import whole_names
from jaxunet.data.source import Source
from jaxunet.runtime.errors import UserError, heading, listed, near_misses, plural, printable
from jaxunet.runtime.paths import shown_path

MOST_LABELS = 200  # of the table in a message


def check_classes(config: Config, source: Source) -> None:
    """Checks that a conditional model has a label for every image, within `model.num_classes`.

    Warns about labels and classes that have no images, and logs classes that the model does not
    use.

    Raises:
      UserError: images without labels, or more classes than the model has.
    """
    wanted, names = config.model.num_classes, source.class_names
    path = shown_path(config.data.path)
    if not wanted:
        if len(names) > 1:
            logging.info(
                'the %d classes of %s (%s) are not used; model.num_classes=%d, with '
                'model.label_dropout=0.1 for guidance, trains a class-conditional model',
                *(len(names), path, listed(names), len(names)),
            )
        elif source.unlabelled_by:
            logging.info('%s no class labels, as %s', heading(path), source.unlabelled_by)
        return
    if not names:
        if source.unlabelled_by:
            raise UserError(
                f'model.num_classes: {wanted}, but {path} has no class labels, as '
                f'{source.unlabelled_by}; mend that, or set model.num_classes to 0'
            )
        raise UserError(
            f'model.num_classes: {wanted}, but {path} has no class labels; set it to 0, use class '
            'sub-folders, or give labels in another form (docs/training.md, "Data")'
        )
    found = len(names)
    if source.labelled_by:
        logging.info(
            '%s %s in %d classes, labels from %s',
            *(heading(path), plural(len(source), 'image'), found, source.labelled_by),
        )
    empty = np.setdiff1d(np.arange(found), source.labels)
    if found > wanted:
        advice = 'raise it, or name some in data.classes'
        if 0 in empty and names[0] == '0':
            advice = (
                f'its labels begin at {source.labels.min()}, so that label 0 has no images; '
                f'subtract {source.labels.min()} from them, or raise it'
            )
        raise UserError(f'model.num_classes: {wanted}, but {path} has {found} classes; {advice}')
    if len(empty):
        logging.warning(
            '%s no images of the classes %s: they will not be trained, but are drawn unless '
            '--class_labels leaves them out',
            *(heading(path), listed([f'{names[i]} (label {i})' for i in empty])),
        )
    if found < wanted:
        labels = (
            f'label {found} has' if found + 1 == wanted else f'labels {found} to {wanted - 1} have'
        )
        logging.warning(
            'model.num_classes: %d, but %s has %d classes (%s): %s no images and will not be '
            'trained; for a new run, set it to %d',
            *(wanted, path, found, listed(names), labels, found),
        )


def label_table(names: Sequence[str]) -> str:
    """Returns the table of labels and class names as text."""
    pairs = [f'{i}={printable(name)}' for i, name in enumerate(names[:MOST_LABELS])]
    more = f', ... ({len(names)} in all)' if len(names) > MOST_LABELS else ''
    return f'classes of the labels: {", ".join(pairs) or "not named"}{more}'


def keep_classes(
    saved: tuple[str, ...], now: tuple[str, ...], config: Config, workdir: pathlib.Path
) -> tuple[str, ...]:
    """Returns the class names of a resumed run: its checkpoint's, then new ones.

    Args:
      saved: the checkpoint's names; empty if it stores none.
      now: the images' names.
      config: the run's config.
      workdir: the run's folder, for messages.

    Raises:
      UserError: a label would change its meaning.
    """
    if not config.model.num_classes:
        return ()
    changed = [
        f'{i} would be {printable(b)} instead of {printable(a)}'
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
            f'  labels 0, 1, ... of {shown_path(config.data.path)}: {listed(now)}\n'
            f'Give it the same names in the same order{order}, choose another --workdir, '
            f'or start from its weights with --config.init_from={shlex.quote(str(workdir))}'
        )
    return max(saved, now, key=len)


@dataclass(frozen=True)
class Classes:
    """The classes of a model.

    Attributes:
      count: number of classes; 0 = unconditional.
      names: names of the labels 0, 1, ...; empty if they are not known.
    """

    count: int
    names: Sequence[str] = ()

    def label_of(self, given: str) -> int:
        """Returns the label that a number or a class name stands for.

        Args:
          given: one of `names`, or a number below `count`; a name wins.

        Raises:
          UserError: neither.
        """
        if given in self.names:
            return self.names.index(given)
        if given.isdecimal() and int(given) < self.count:
            return int(given)
        numbered = (
            [f'{i} {name}' for i, name in enumerate(self.names)]
            if any(name != str(i) for i, name in enumerate(self.names))
            else []
        )
        known = f' or names ({listed(numbered)})' if numbered else ''
        raise UserError(
            f'--class_labels: expected whole numbers from 0 to {self.count - 1}{known}, '
            f'found {given!r}{near_misses(given, self.names) if numbered else ""}'
        )

    def labels_of(self, given: Sequence[str]) -> list[int]:
        """Returns the labels that the items of a list stand for; names may contain commas.

        Raises:
          UserError: as `label_of`.
        """
        return [self.label_of(name) for name in whole_names(given, self.names)]
