"""Finds the checkpoints of a run, and reads the config in the newest, without starting JAX."""

from __future__ import annotations

import pathlib

from jaxunet.checkpoint.meta import read_meta
from jaxunet.checkpoint.store import FOLDER
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
        try:
            return resolve(read_meta(workdir / FOLDER / str(step))['config'])
        except (ValueError, TypeError, KeyError, UserError):
            continue  # damaged; `Checkpoints.restore` reports it
    return None
