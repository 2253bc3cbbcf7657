"""Finds the checkpoints of a run, and reads the config in the newest, without starting JAX."""

from __future__ import annotations

import contextlib
import pathlib

from jaxunet.checkpoint.meta import RunFacts, read_meta
from jaxunet.checkpoint.store import FOLDER, find
from jaxunet.config import Config, resolve
from jaxunet.runtime.errors import UserError


def saved_steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in a workdir, readable or not, newest first."""
    names = (entry.name for entry in (workdir / FOLDER).glob('*'))
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def newest_config(workdir: pathlib.Path) -> Config | None:
    """Returns the config in the newest checkpoint; None if there is none, or it cannot be read.

    Reads the file itself: orbax would start JAX, which the processes of a run must not do before
    they have joined.
    """
    for step in saved_steps(workdir):
        if (config := _config_of(workdir, step)) is not None:
            return config
    return None


def newest_classes(workdir: pathlib.Path) -> tuple[str, ...]:
    """Returns the names of the classes in the newest checkpoint that can be read; () if none."""
    for step in saved_steps(workdir):
        with contextlib.suppress(ValueError, TypeError, KeyError, UserError):  # as `_config_of`
            return RunFacts.of(read_meta(workdir / FOLDER / str(step))).class_names
    return ()


def _config_of(workdir: pathlib.Path, step: int) -> Config | None:
    """Returns the config in one checkpoint; None if it cannot be read."""
    try:
        return resolve(read_meta(workdir / FOLDER / str(step))['config'])
    except (ValueError, TypeError, KeyError, UserError):
        return None  # damaged; `Checkpoints.restore` reports it


def config_at(init_from: object) -> Config | None:
    """Returns the config of a workdir's newest checkpoint, or of one checkpoint; None if none.

    It takes the paths that `store.find` takes. Like `newest_config`, it does not start JAX.

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
