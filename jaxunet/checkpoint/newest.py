"""Finds the checkpoints of a run, and reads the config in the newest, without starting JAX."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import TypeVar

from jaxunet.checkpoint.folders import FOLDER, LISTINGS, find, saved_steps
from jaxunet.checkpoint.meta import RunFacts, read_meta
from jaxunet.config import Config, resolve
from jaxunet.config.schema import Fields
from jaxunet.runtime.errors import UserError
from jaxunet.weights.files import stated_config_of

Content = TypeVar('Content')


def newest_config(workdir: pathlib.Path) -> Config | None:
    """Returns the config in the newest checkpoint; None if there is none, or it cannot be read.

    Reads the file itself: orbax would start JAX, which the processes of a run must not do before
    they have joined.
    """
    return _newest(workdir, _config)


def newest_classes(workdir: pathlib.Path) -> tuple[str, ...]:
    """Returns the names of the classes in the newest checkpoint that can be read; () if none."""
    return _newest(workdir, lambda meta: RunFacts.of(meta).class_names) or ()


def _newest(workdir: pathlib.Path, find: Callable[[Fields], Content]) -> Content | None:
    """Returns what `find` returns for the newest checkpoint that can be read; None if none can."""
    for _ in range(LISTINGS):
        steps = saved_steps(workdir)
        for step in steps:
            if (content := _content(workdir, step, find)) is not None:
                return content
        if saved_steps(workdir) == steps:  # otherwise a run has removed some meanwhile
            break
    return None


def _content(workdir: pathlib.Path, step: int, find: Callable[[Fields], Content]) -> Content | None:
    """Returns what `find` returns for the metadata of a checkpoint; None if it cannot be read."""
    try:
        return find(read_meta(workdir / FOLDER / str(step)))
    except (ValueError, TypeError, KeyError, UserError):
        return None  # damaged; `Checkpoints.restore` reports it


def _config(meta: Fields) -> Config:
    return resolve(meta['config'])


def config_at(init_from: object) -> Config | None:
    """Returns the config of a workdir's newest checkpoint, one checkpoint or a file; None if none.

    It takes the paths that `folders.find` takes, and weights that state their config
    (`stated_config_of`). Like `newest_config`, it does not start JAX.

    Args:
      init_from: the field `init_from` of a config that is not checked yet: a path, '', or anything
        else by mistake.
    """
    if not init_from or not isinstance(init_from, str):
        return None
    place = find(init_from)
    if place is None:
        try:
            return stated_config_of(init_from)
        except UserError:
            return None  # `load_initial` reports it
    workdir, step = place
    return newest_config(workdir) if step is None else _content(workdir, step, _config)
