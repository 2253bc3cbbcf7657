"""Downloads into the cache folder, verified by checksum; a file appears only when complete."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path

from absl import logging

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.progress import progress_bar
from jaxunet.runtime.whole_files import replacing

TIMEOUT = 60  # seconds without an answer


def cache_dir() -> Path:
    """Returns $XDG_CACHE_HOME/jaxunet or ~/.cache/jaxunet."""
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'jaxunet'


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
      checksum: hexadecimal digits, all of them or the published prefix.
      asked_by: the option that needs the file; error messages begin with it.
      instead: advice for a user without a network, to follow "fetch URL elsewhere and".
      replace_damaged: download a damaged file again, with a warning, instead of raising.

    Raises:
      UserError: no connection, no space, or a wrong checksum.
    """
    target = cache_dir() / name
    help_text = f'fetch {url} elsewhere and {instead}'
    digits = 2 * hashlib.new(algorithm, usedforsecurity=False).digest_size
    expected = checksum if len(checksum) == digits else f'{checksum}...'
    label = {'md5': 'MD5', 'sha256': 'SHA-256'}.get(algorithm, algorithm)
    if target.is_file():
        if digest(target, algorithm).startswith(checksum):
            return target
        if not replace_damaged:
            raise UserError(
                f'{target}: its {label} is not {expected}; '
                'it is damaged: remove it, and it is downloaded again'
            )
        logging.warning(
            '%s is damaged (its %s is not %s); downloading it again', target, label, expected
        )
    try:
        _download(url, target, algorithm=algorithm, checksum=checksum)
    except _WrongChecksum as error:
        raise UserError(
            f'{url}: {label} {error}, expected {expected}; '
            f'the download was damaged, try again, or {help_text}'
        ) from None
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
            f'check the folder and the free space, or {help_text}'
        ) from None
    return target


class _WrongChecksum(Exception):
    """The checksum of a downloaded file that is not the expected one."""


def _download(url: str, target: Path, *, algorithm: str, checksum: str) -> None:
    """Downloads to a temporary file, and renames it to `target` if its checksum is right."""
    with replacing(target) as partial:
        _fetch(url, partial, target.name)
        if not (found := digest(partial, algorithm)).startswith(checksum):
            raise _WrongChecksum(found)


def _fetch(url: str, target: Path, name: str) -> None:
    """Writes the response to `target`, with a progress bar titled `name`."""
    request = urllib.request.Request(url, headers={'User-Agent': 'jaxunet'})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response, target.open('wb') as file:
        total = int(response.headers.get('Content-Length') or 0) or None
        with progress_bar(total=total, unit='B', unit_scale=True, desc=name) as bar:
            while chunk := response.read(2**20):
                file.write(chunk)
                bar.update(len(chunk))
