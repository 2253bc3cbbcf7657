"""Finds the folders of checkpoints."""

from __future__ import annotations

import os
import pathlib

from jaxunet.runtime.errors import listed
from jaxunet.runtime.remote import on_disk

FOLDER = 'checkpoints'
LISTINGS = 20  # times that checkpoints are listed because a run has removed those of the last list


def saved_steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in a workdir, readable or not, newest first."""
    try:
        names = os.listdir(workdir / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def runs_inside(path: str | pathlib.Path) -> str:
    """Returns `; it holds the workdirs a, b` for a folder of runs, and '' for other paths."""
    inside = sorted(p.parent.name for p in pathlib.Path(on_disk(path)).glob(f'*/{FOLDER}'))
    return f'; it holds the workdirs {listed(inside)}' if inside else ''


def find(path: str | pathlib.Path) -> tuple[pathlib.Path, int | None] | None:
    """Returns (workdir, step) of a path; step is None, the newest, for a workdir itself.

    Returns None if the path is neither a workdir nor one checkpoint in it.
    """
    path = pathlib.Path(on_disk(path))
    if (path / FOLDER).is_dir():
        return path, None
    if path.name == FOLDER and path.is_dir():
        return path.parent, None
    if path.name.isdigit() and path.parent.name == FOLDER and path.is_dir():
        return path.parent.parent, int(path.name)
    return None
