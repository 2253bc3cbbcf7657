"""Reads files and folders at URLs, through copies in the cache folder.

A copy is whole or absent. It lies in a folder that is named after the address and the version of
what is there: names, sizes and the server's checksums or times. So a file that has changed is
copied again, and one that has not is not. Without checksums or times it is always copied again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import os
import re
import shutil
import threading
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from absl import logging

from jaxunet.runtime.download import open_url
from jaxunet.runtime.errors import UserError, printable
from jaxunet.runtime.paths import SCHEME, cache_dir, expanded, is_remote, shown_url
from jaxunet.runtime.progress import progress_bar
from jaxunet.runtime.untrusted import one_line
from jaxunet.runtime.whole_files import replacing

FOLDER = 'remote'  # in the cache folder
ATTEMPTS = 3  # to read a file
FRESH_SECONDS = 60.0  # in which a process does not ask again for the version of a copy
CONNECTIONS = 16  # files of a folder that are read at the same time
CHUNK = 2**20  # bytes
INSTEAD = 'if this machine cannot reach it, fetch it elsewhere and give its path'
SEVERAL = re.compile(r'\*|\{[^{}]*(\.\.|,)[^{}]*\}')  # as in x-{00..99}.tar
# What storages call the version of a file.
VERSIONS = (
    *('ETag', 'etag', 'generation', 'blob_id', 'mtime', 'LastModified', 'last_modified'),
    *('updated', 'modify', 'modificationTime', 'sha', 'created'),
)


class _Entry(NamedTuple):
    """A file at a URL: its size in bytes, None if it is not known, and its version."""

    size: int | None
    version: str


class _Remote(NamedTuple):
    """A URL that can be read.

    Fields:
      files: returns its files by their paths in it; a single file has the path ''.
      open: opens one of them.
    """

    files: Callable[[], dict[str, _Entry]]
    open: Callable[[str], contextlib.AbstractContextManager[BinaryIO]]


class _UnreachableError(UserError):
    """The server does not answer, so that an earlier copy may be used."""


_recent: dict[str, tuple[float, str]] = {}  # time and copy by URL


def on_disk(path: str | os.PathLike[str]) -> str:
    """Returns the path on this machine of what the user named: `expanded`, or a copy of a URL.

    The log says where the copy is, and how large. If the server cannot be reached, the last copy
    serves, with a warning.

    Raises:
      UserError: there is nothing at the URL, it cannot be read, a package for it is missing, it
        changes while it is copied, or the cache folder is full.
    """
    text = expanded(path)
    if not is_remote(text):
        file = SCHEME.match(text)
        return urllib.parse.unquote(urllib.parse.urlsplit(text).path) if file else text
    asked, copy = _recent.get(text, (0.0, ''))
    if not copy or time.monotonic() - asked > FRESH_SECONDS or not os.path.exists(copy):
        copy = str(_copy(text))
        _recent[text] = time.monotonic(), copy
    return copy


def _copy(url: str) -> Path:
    """Returns the path of a copy of this version of a URL."""
    if SEVERAL.search(url.partition('?')[0]):
        raise UserError(
            f'{shown_url(url)}: braces and * name several files of this machine only; give the URL '
            'of the folder that holds them, or copy them here'
        )
    folder = cache_dir() / FOLDER / _digest(url)
    scheme = SCHEME.match(url)
    assert scheme is not None
    try:
        remote = _web(url) if scheme[1].lower() in ('http', 'https') else _storage(url, scheme[1])
        with _explained(url):
            files = remote.files()
    except _UnreachableError as error:
        versions = sorted(folder.glob('*/'), key=lambda path: path.stat().st_mtime)
        earlier = [path for path in (each / _name(url) for each in versions) if path.exists()]
        if not earlier:
            raise UserError(f'{error}; {INSTEAD}') from None
        logging.warning('%s; using the last copy, %s', error, earlier[-1])
        return earlier[-1]
    version = repr(sorted(files.items()))
    if not all(entry.version for entry in files.values()):
        version += str(time.time_ns())  # nothing says that it is the same as before
    target = folder / _digest(version) / _name(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not target.exists():
                _fetch(url, remote, files, target)
    except OSError as error:
        raise UserError(
            f'{shown_url(url)}: its copy {target} cannot be written: {error.strerror or error}; '
            'check the folder and the free space, or set XDG_CACHE_HOME to another folder'
        ) from None
    return target


def _name(url: str) -> Path:
    """Returns the last two names of a URL: a checkpoint, for one, is known by its folder's name."""
    parts = urllib.parse.urlsplit(url)
    names = urllib.parse.unquote(f'{parts.hostname or parts.netloc}/{parts.path}').split('/')
    safe = [re.sub(r'[^\w.+=@-]', '_', name).lstrip('.').encode()[-100:] for name in names]
    return Path(*[name.decode(errors='ignore') for name in safe if name][-2:])


def _fetch(url: str, remote: _Remote, files: dict[str, _Entry], target: Path) -> None:
    """Copies a URL to `target`, if it does not change meanwhile."""
    size = sum(entry.size or 0 for entry in files.values())
    free = shutil.disk_usage(cache_dir()).free
    if size > free:
        raise UserError(
            f'{shown_url(url)}: has {_size(size)}, but {cache_dir()} has {_size(free)} free; set '
            'XDG_CACHE_HOME to a folder with more'
        )
    many = '' if '' in files else f' in {len(files)} files'
    logging.info('copying %s (%s%s) to %s', shown_url(url), _size(size), many, target)
    with (
        replacing(target) as partial,
        progress_bar(total=size or None, unit='B', unit_scale=True, desc=target.name) as bar,
    ):
        stopped = threading.Event()

        def update(count: int) -> None:
            if stopped.is_set():
                raise UserError(f'{shown_url(url)}: the copy was stopped')
            bar.update(count)

        def one(name: str) -> None:
            path = partial / name if name else partial
            path.parent.mkdir(parents=True, exist_ok=True)
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    with _explained(url), remote.open(name) as stream:
                        _stream(stream, path, files[name].size, update)
                    return
                except _UnreachableError as error:
                    if attempt == ATTEMPTS:
                        raise
                    logging.warning('%s; trying again', error)

        pool = ThreadPoolExecutor(CONNECTIONS)
        try:
            list(pool.map(one, files))
        finally:  # an error, or Ctrl-C, does not wait for the rest
            stopped.set()
            pool.shutdown(cancel_futures=True)
        with _explained(url):
            if remote.files() != files:
                raise UserError(f'{shown_url(url)}: changed while it was copied; try again')


def _stream(
    stream: BinaryIO, path: Path, size: int | None, update: Callable[[int], object]
) -> None:
    """Writes all of a stream to a file, and checks its size."""
    count = 0
    with path.open('wb') as file:
        while chunk := _read(stream):
            file.write(chunk)
            update(len(chunk))
            count += len(chunk)
    if size is not None and count != size:
        update(-count)
        raise ConnectionError(f'ended after {count} of {size} bytes')


def _read(stream: BinaryIO) -> bytes:
    try:
        return stream.read(CHUNK)
    except Exception as error:  # each storage has its own kinds
        raise ConnectionError(f'ended: {type(error).__name__}: {error}') from None


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turns an error of reading a URL into a UserError.

    Errors of the cache folder, which name a file, pass.
    """
    begin = f'{shown_url(url)}: '
    try:
        yield
    except UserError:
        raise
    except urllib.error.HTTPError as error:
        error.close()
        text = f'{begin}{"no such file" if error.code == 404 else "refused"} (HTTP {error.code}'
        kind = _UnreachableError if error.code >= 500 or error.code == 429 else UserError
        raise kind(f'{text}, {error.reason}); check the address') from None
    except ImportError as error:
        raise UserError(f'{begin}needs a package that is not installed: {error}') from None
    except FileNotFoundError:
        raise UserError(f'{begin}no such file or folder; check the address') from None
    except PermissionError as error:
        raise UserError(f'{begin}refused: {one_line(error)}; check your rights to it') from None
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as e:
        reason = getattr(e, 'reason', None) or e
        raise _UnreachableError(f'{begin}cannot be read: {one_line(reason)}') from None
    except OSError as error:
        if error.filename is not None:
            raise
        raise _UnreachableError(f'{begin}cannot be read: {one_line(error)}') from None
    except Exception as error:  # each storage has its own kinds
        name = type(error).__name__
        kind = _UnreachableError if re.search('Connect|Timeout', name) else UserError
        raise kind(f'{begin}{name}: {one_line(error)}') from None


def _web(url: str) -> _Remote:
    """Returns a file at http:// or https://."""

    def files() -> dict[str, _Entry]:
        with open_url(url) as response:  # some servers answer no HEAD
            headers = response.headers
        size = headers.get('Content-Length')
        version = headers.get('ETag') or headers.get('Last-Modified') or ''
        return {'': _Entry(int(size) if size else None, version)}

    return _Remote(files, lambda _: open_url(url))


def _storage(url: str, scheme: str) -> _Remote:
    """Returns a file or folder of fsspec."""
    import fsspec.core  # noqa: PLC0415 (slow, and seldom needed)

    with _explained(url):
        try:
            system, root = fsspec.core.url_to_fs(url)
        except ValueError as error:
            raise UserError(
                f'{shown_url(url)}: {scheme}:// is unknown: {one_line(error)}'
            ) from None

    def entry(info: dict[str, Any]) -> _Entry:
        version = next((str(info[name]) for name in VERSIONS if info.get(name)), '')
        return _Entry(info.get('size'), version)

    def files() -> dict[str, _Entry]:
        system.invalidate_cache()
        info = system.info(root)
        if info['type'] != 'directory':
            return {'': entry(info)}
        below = system.find(root, detail=True)
        found = {
            name.removeprefix(info['name']).lstrip('/'): entry(each)
            for name, each in below.items()
            # Links to folders are left out; some storages keep an empty file in place of a folder.
            if each['type'] == 'file' and not name.endswith('/')
        }
        for name in found:
            if '..' in PurePosixPath(name).parts:
                raise UserError(f'{shown_url(url)}: {printable(name)!r} is no name of a file in it')
        if not found:
            raise UserError(f'{shown_url(url)}: the folder is empty')
        return found

    return _Remote(files, lambda name: system.open(f'{root}/{name}' if name else root, 'rb'))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one process of this machine at a time copy to a folder."""
    with (folder / '.lock').open('w') as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _size(count: int) -> str:
    return f'{count / 2**20:,.1f} MiB'
