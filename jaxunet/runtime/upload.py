"""Writes whole files and folders to URLs of fsspec, such as s3://bucket/samples.npz."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import cache_dir, shown_url
from jaxunet.runtime.untrusted import one_line


@contextlib.contextmanager
def uploaded(url: str, flag: str = '') -> Iterator[Path]:
    """Yields a path of the same name on this machine, whose file or folder is then sent to the URL.

    A file appears there whole. A folder is sent file by file.

    Args:
      flag: the flag that gave the URL; begins the messages.

    Raises:
      UserError: as `check_uploadable`, or the storage refuses it.
    """
    system, root = check_uploadable(url, flag)
    with tempfile.TemporaryDirectory(prefix='jaxunet.') as folder:
        copy = Path(folder) / (Path(root).name or 'output')
        yield copy
        files = [path for path in (copy, *sorted(copy.rglob('*'))) if path.is_file()]
        try:
            for file in files:
                below = file.relative_to(copy).as_posix()
                system.put_file(str(file), root if file == copy else f'{root}/{below}')
        except Exception as error:  # each storage has its own kinds
            raise UserError(
                f'{f"{flag}: " if flag else ""}{shown_url(url)}: cannot be written: '
                f'{type(error).__name__}: {one_line(error)}'
            ) from None


def check_uploadable(url: str, flag: str = '') -> tuple[Any, str]:
    """Checks, before the work begins, that `uploaded` knows the storage; writes nothing.

    Returns fsspec's file system of the URL and the path in it.

    Raises:
      UserError: the protocol is unknown or needs a package, or web pages are only read.
    """
    import fsspec.core  # noqa: PLC0415 (slow, and seldom needed)

    begin = f'{flag}: {shown_url(url)}' if flag else shown_url(url)
    if url.lower().startswith(('http://', 'https://')):
        raise UserError(f'{begin}: cannot be written: the web is only read; name a file')
    try:
        system, root = fsspec.core.url_to_fs(url)
    except Exception as error:  # no such protocol, no package, no credentials
        raise UserError(f'{begin}: cannot be written: {one_line(error)}') from None
    return system, root


def staging(url: str) -> Path:
    """Returns a path in the cache folder for what a command keeps until it writes to a URL."""
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    return cache_dir() / 'uploads' / f'{name}{Path(url).suffix}'
