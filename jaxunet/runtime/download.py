"""Downloads into the cache folder, verified by checksum; a file appears only when complete."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from absl import logging

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.paths import cache_dir
from jaxunet.runtime.progress import progress_bar
from jaxunet.runtime.whole_files import replacing

TIMEOUT = 15  # seconds without an answer; behind a firewall, users wait this long for the error


def digest(path: Path, algorithm: str) -> str:
    """Returns the checksum of a file as hexadecimal digits; `algorithm` is a name of hashlib."""
    with path.open('rb') as file:
        return hashlib.file_digest(
            file, lambda: hashlib.new(algorithm, usedforsecurity=False)
        ).hexdigest()


def cached(
    url: str,
    name: str,
    *,
    algorithm: str,
    checksum: str,
    asked_by: str,
    instead: str,
    replace_damaged: bool = False,
) -> Path:
    """Returns the path of the file `name` in the cache folder; downloads it if it is missing.

    Args:
      url: address of the file.
      name: file name in the cache folder.
      algorithm: checksum algorithm, a name of hashlib.
      checksum: hexadecimal digits: all of them, or the prefix that was published.
      asked_by: the option that needs the file; error messages begin with it.
      instead: advice for a user without a network; follows the words "fetch it elsewhere and".
      replace_damaged: download a damaged file again, with a warning, instead of raising.

    Raises:
      UserError: no connection, no space, no cache folder, or a wrong checksum.
    """
    target = cache_dir() / name
    help_text = f'fetch it elsewhere and {instead}'
    expected = _Checksum(algorithm, checksum)
    if _is_whole(target, expected, replace_damaged):
        return target
    try:
        with replacing(target) as partial:
            _fetch(url, partial, name)
            if not (found := digest(partial, algorithm)).startswith(checksum):
                raise UserError(
                    f'{url}: {expected.label} {found}, expected {expected}; '
                    f'the download was damaged, try again, or {help_text}'
                )
    except (
        urllib.error.URLError,
        http.client.HTTPException,
        TimeoutError,
        ConnectionError,
    ) as error:
        raise UserError(
            f'{asked_by}: cannot download {url}: {getattr(error, "reason", None) or error}; '
            f'{help_text}'
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f'{target}: cannot be written: {reason}; '
            f'check the folder and the free space, or fetch {url} elsewhere and {instead}'
        ) from None
    return target


class _Checksum(NamedTuple):
    """The published checksum of a file: all its hexadecimal digits, or the first few."""

    algorithm: str
    digits: str

    @property
    def label(self) -> str:
        """The algorithm's name in messages."""
        return {'md5': 'MD5', 'sha256': 'SHA-256'}.get(self.algorithm, self.algorithm)

    def __str__(self) -> str:
        size = hashlib.new(self.algorithm, usedforsecurity=False).digest_size
        return self.digits if len(self.digits) == 2 * size else f'{self.digits}...'


def _is_whole(target: Path, expected: _Checksum, replace_damaged: bool) -> bool:
    """Returns True if the file is there and undamaged, False if it is to be downloaded.

    Raises:
      UserError: it is damaged, and is not to be replaced.
    """
    if not target.is_file():
        return False
    if digest(target, expected.algorithm).startswith(expected.digits):
        return True
    if not replace_damaged:
        raise UserError(
            f'{target}: its {expected.label} is not {expected}; '
            'it is damaged: remove it, and it is downloaded again'
        )
    logging.warning(
        '%s is damaged (its %s is not %s); downloading it again', target, expected.label, expected
    )
    return False


def _fetch(url: str, target: Path, name: str) -> None:
    """Writes the response to `target`, with a progress bar titled `name`."""
    logging.info('downloading %s to %s', url, target.parent)
    with open_url(url) as response, target.open('wb') as file:
        total = int(response.headers.get('Content-Length') or 0) or None
        with progress_bar(total=total, unit='B', unit_scale=True, desc=name) as bar:
            while chunk := response.read(2**20):
                file.write(chunk)
                bar.update(len(chunk))


def open_url(url: str) -> http.client.HTTPResponse:
    """Opens a URL of http or https."""
    request = urllib.request.Request(url, headers={'User-Agent': 'jaxunet'})
    return urllib.request.urlopen(request, timeout=TIMEOUT)
