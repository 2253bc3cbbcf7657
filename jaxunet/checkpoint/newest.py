"""Reads the config of a run from its newest checkpoint, without its arrays."""

from __future__ import annotations

import pathlib

from jaxunet.checkpoint.meta import read_meta
from jaxunet.checkpoint.store import FOLDER
from jaxunet.config import Config, resolve
from jaxunet.runtime.errors import UserError


def newest_config(workdir: pathlib.Path) -> Config | None:
    """Returns the config in the newest checkpoint; None if there is none, or it cannot be read.

    Reads the file itself: orbax would start JAX, which the processes of a run must not do before
    they have joined.
    """
    steps = [entry for entry in (workdir / FOLDER).glob('*') if entry.name.isdigit()]
    for folder in sorted(steps, key=lambda entry: -int(entry.name)):
        try:
            return resolve(read_meta(folder)['config'])
        except (ValueError, TypeError, KeyError, UserError):
            continue  # damaged; `Checkpoints.restore` reports it
    return None
