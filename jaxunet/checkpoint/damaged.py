"""`WORKDIR/damaged`: damaged and half-written files of a run, kept for inspection."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil

from absl import logging

from jaxunet.runtime.errors import UserError

FOLDER = 'damaged'
KEPT = 3  # entries of each kind; older ones are deleted


def set_aside(workdir: pathlib.Path, entry: pathlib.Path) -> None:
    """Moves a file or folder of a run to `WORKDIR/damaged`, under a name that is free there.

    The newest `KEPT` checkpoints stay there, and the newest `KEPT` versions of every other file.

    Raises:
      UserError: it cannot be moved.
    """
    folder = workdir / FOLDER
    target, count = folder / entry.name, 1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while target.exists():
            target, count = folder / f'{entry.name}.{count}', count + 1
        shutil.move(entry, target)  # also to another file system, if checkpoints/ is a link
        os.utime(target)  # when it was moved
    except OSError as error:
        raise UserError(
            f'{entry}: is damaged, and cannot be moved to {folder}: {error.strerror or error}; '
            'check the permissions of the folder, or move it away by hand'
        ) from None
    for old in _of_a_kind(folder, entry.name)[:-KEPT]:
        with contextlib.suppress(OSError):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
            logging.info('%s: deleted, as the newest %d are kept there', old, KEPT)


def _of_a_kind(folder: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Returns the entries of the same kind as `name`, oldest first; checkpoints are one kind."""
    kind = re.compile(r'\d' if name[:1].isdigit() else re.escape(name))
    dated = [(p.stat().st_mtime_ns, p) for p in folder.iterdir() if kind.match(p.name)]
    return [path for _, path in sorted(dated)]
