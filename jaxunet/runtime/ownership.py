"""Checks that no other user could have written a file or folder whose content runs as code."""

from __future__ import annotations

import os
import stat

from absl import logging


def why_unsafe(info: os.stat_result) -> str:
    """Returns the reason why other users could have changed a file or folder; '' if none could."""
    if info.st_uid != os.geteuid():
        return f'it belongs to user {info.st_uid}, not to {os.geteuid()}'
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f'others can write to it (mode {stat.S_IMODE(info.st_mode):04o})'
    return ''


def usable(folder: str | os.PathLike[str]) -> bool:
    """Returns True if a folder of compiled programs may be used, and warns otherwise.

    It may be used if only this user can write to it, or if it does not exist.
    """
    try:
        reason = why_unsafe(os.stat(folder))
    except OSError:  # it does not exist, or is not a local folder
        return True
    if reason:
        logging.warning(
            '%s: compiled programs are neither read nor kept there, as %s, so others could run '
            'code here; make it yours alone (chown, chmod 700), or set JAX_COMPILATION_CACHE_DIR '
            'to another folder',
            folder,
            reason,
        )
    return not reason
