"""Writes files either completely or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import re
import shutil
import time
import zlib
from collections.abc import Iterator

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.file_errors import check_regular
from jaxunet.runtime.paths import check_local, file_above, is_remote
from jaxunet.runtime.upload import uploaded

LONGEST = 143  # bytes of a temporary name: eCryptfs takes no more, other file systems 255
FOREIGN_SECONDS = 24 * 3600  # age at which a temporary path of another container is a dead one's


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a temporary path, which is renamed to `path` when the block has ended.

    The block writes a file or a folder there. If it fails, the temporary path is removed, and an
    earlier `path` stays as it was. The parent folder is created if needed; `remove_left` removes
    old temporary paths from it.

    Raises:
      OSError: the folder cannot be created, or the name cannot be taken.
    """
    target = pathlib.Path(path)
    ending = f'.{machine()}.{os.getpid()}.partial'
    partial = target.with_name(name_with(f'.{target.name}', ending))
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_left(target.parent)
    try:
        yield partial
        os.replace(partial, target)
    finally:
        _remove(partial)


def name_with(name: str, ending: str) -> str:
    """Returns the name with this ending; a checksum stands for the end of one that is too long."""
    whole, most = name.encode('utf-8', 'surrogateescape'), LONGEST - len(ending.encode())
    if len(whole) > most:
        mark = f'-{zlib.crc32(whole):08x}'
        name = whole[: most - len(mark)].decode('utf-8', 'ignore') + mark
    return name + ending


def remove_left(folder: pathlib.Path) -> None:
    """Removes temporary paths that processes of this host left in a folder when killed.

    Whether a process of another container runs cannot be seen, so its path must be a day old.
    """
    host, ours = re.escape(platform.node()), machine()
    of_host = re.compile(rf'\..+\.({host}(?:\.\d+)?)\.(\d{{1,9}})\.partial')
    with contextlib.suppress(OSError):  # there is no folder, or it may not be listed
        for path in map(folder.joinpath, os.listdir(folder)):
            if not (match := of_host.fullmatch(path.name)):
                continue
            if (not _runs(int(match[2]))) if match[1] == ours else _is_old(path):
                _remove(path)


def machine() -> str:
    """Names the processes that share numbers with this one, unlike those of other containers."""
    with contextlib.suppress(OSError):  # not on Linux
        return f'{platform.node()}.{os.stat("/proc/self/ns/pid").st_ino}'
    return platform.node()


def _is_old(path: pathlib.Path) -> bool:
    with contextlib.suppress(OSError):  # it has gone meanwhile
        return time.time() - path.stat().st_mtime > FOREIGN_SECONDS
    return False


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def check_writable(path: str | os.PathLike[str], flag: str) -> None:
    """Checks, before the work begins, that a file or folder can be written; creates nothing.

    Args:
      flag: the flag that gave the path; the error message begins with it.

    Raises:
      UserError: permissions are missing, a parent is a file, or the path is a FIFO or a device.
    """
    target = pathlib.Path(path)
    check_local(path, flag)
    check_regular(target, flag)
    if not target.exists():
        target = pathlib.Path(os.path.realpath(path))  # a link to a file that does not exist yet
    nearest = target if target.exists() else target.parent
    while not nearest.exists():
        nearest = nearest.parent
    if (nearest != target and not nearest.is_dir()) or not os.access(nearest, os.W_OK):
        why = file_above(target.parent) or f', and the permissions of {nearest}'
        raise UserError(f'{flag}: {path}: cannot be written; check the name{why}')


def check_file(path: str | os.PathLike[str], flag: str) -> None:
    """Like `check_writable`, for a path that must not be a folder.

    Raises:
      UserError: also if the path is a folder.
    """
    if pathlib.Path(path).is_dir():
        raise UserError(f'{flag}: {path}: cannot be written: it is a folder; name a file')
    check_writable(path, flag)


@contextlib.contextmanager
def written(path: str | os.PathLike[str], flag: str = '') -> Iterator[pathlib.Path]:
    """Like `replacing`, for a path that the user gave, or as `uploaded`, for a URL.

    Args:
      flag: the flag that gave the path; the error message begins with it.

    Raises:
      UserError: the block or the renaming failed with an OSError, such as a full disk, or the
        storage refuses it.
    """
    if is_remote(path):
        with uploaded(os.fspath(path), flag) as copy:
            yield copy
        return
    check_local(path, flag)
    check_regular(path, flag)
    try:
        with replacing(path) as partial:
            yield partial
    except OSError as error:
        raise UserError(
            f'{f"{flag}: " if flag else ""}{path}: cannot be written: {error.strerror or error}; '
            'check the folder, its permissions and the free space'
        ) from None
