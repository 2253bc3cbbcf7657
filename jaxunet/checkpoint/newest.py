"""Finds the checkpoints of a run, and reads the config in the newest, without starting JAX."""

from __future__ import annotations

import pathlib

from jaxunet.checkpoint.folders import FOLDER, LISTINGS, find, saved_steps
from jaxunet.checkpoint.meta import read_meta
from jaxunet.config import Config, resolve
from jaxunet.runtime.errors import UserError


def newest_config(workdir: pathlib.Path) -> Config | None:
    """Returns the config in the newest checkpoint; None if there is none, or it cannot be read.

    Reads the file itself: orbax would start JAX, which the processes of a run must not do before
    they have joined.
    """
    for _ in range(LISTINGS):
        steps = saved_steps(workdir)
        for step in steps:
            if (config := _config_of(workdir, step)) is not None:
                return config
        if saved_steps(workdir) == steps:  # otherwise a run has removed some meanwhile
            break
    return None


def _config_of(workdir: pathlib.Path, step: int) -> Config | None:
    """Returns the config in one checkpoint; None if it cannot be read."""
    try:
        return resolve(read_meta(workdir / FOLDER / str(step))['config'])
    except (ValueError, TypeError, KeyError, UserError):
        return None  # damaged; `Checkpoints.restore` reports it


def config_at(init_from: object) -> Config | None:
    """Returns the config of a workdir's newest checkpoint, or of one checkpoint; None if none.

    It takes the paths that `folders.find` takes. Like `newest_config`, it does not start JAX.

    Args:
      init_from: the field `init_from` of a config that is not checked yet: a path, '', or anything
        else by mistake.
    """
    if not init_from or not isinstance(init_from, str):
        return None
    found = find(init_from)
    if found is None:
        return None  # a weight file, or a mistake, which `load_initial` reports
    workdir, step = found
    return newest_config(workdir) if step is None else _config_of(workdir, step)
