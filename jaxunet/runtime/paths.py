"""Paths as users write them, with `~` for a home folder."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

from absl import flags

from jaxunet.runtime.errors import UserError, printable

URL = re.compile(r'(^|/)(https?|ftp|s3|gs|gcs|az|abfss?|hdfs|dbfs|hf|file):/', re.IGNORECASE)
SCHEME = re.compile(r'([a-z][a-z0-9+.-]*)://', re.IGNORECASE)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns True for a URL, such as s3://bucket/photos.zip, but not for one of a local file."""
    scheme = SCHEME.match(os.fspath(path))
    return scheme is not None and scheme[1].lower() != 'file'


def shown_url(url: str) -> str:
    """Returns a URL for messages: without passwords, as before an @ and behind a ?."""
    return printable(re.sub(r'//[^/@]*@', '//', url.partition('?')[0]))


def shown_path(path: str) -> str:
    """Returns a path for messages and for files that others may see; a URL as `shown_url`."""
    return shown_url(path) if is_remote(path) else path


def expanded(path: str | os.PathLike[str]) -> str:
    """Returns a path with `~` or `~NAME` at its start replaced by that home folder.

    A shell does the same, but not after the = of --workdir=~/run or in a config file. A path
    object is returned as it is: `./~x` names a file, and loses its `./` in one.

    Raises:
      UserError: there is no such user, or this account has no home folder.
    """
    text = os.fspath(path)
    if not isinstance(path, str) or not text.startswith('~'):
        return text
    full = os.path.expanduser(text)
    if full == text:
        name = text.partition('/')[0][1:]
        why = (
            f'there is no user "{name}" on this machine'
            if name
            else 'this account has no home folder, and HOME is not set'
        )
        raise UserError(
            f'{text}: {why}; give the whole path, or ./{text} for a file of that very name'
        )
    return full


def check_path(
    value: object, name: str, expected: str = 'a path, as text or a path object'
) -> None:
    """Raises UserError unless the argument `name` of a Python function is a path."""
    if not isinstance(value, str | os.PathLike):
        kind = value if value is None else f'an object of type {type(value).__name__}'
        raise UserError(f'{name}: expected {expected}, found {kind}')
    if '\0' in os.fsdecode(value):
        raise UserError(
            f'{name}: expected {expected}, found {os.fspath(value)!r}, with a NUL in it'
        )


def cache_dir() -> pathlib.Path:
    """Returns $XDG_CACHE_HOME/jaxunet or ~/.cache/jaxunet.

    Raises:
      UserError: there is no such home folder, as for a container's user without a passwd entry.
    """
    named = os.environ.get('XDG_CACHE_HOME')
    try:
        return pathlib.Path(expanded(named or '~/.cache')) / 'jaxunet'
    except UserError as error:
        why = (
            f'XDG_CACHE_HOME={error}'
            if named
            else 'neither XDG_CACHE_HOME nor HOME is set, and this account has no home folder'
        )
        raise UserError(f'no cache folder: {why}; set XDG_CACHE_HOME to a folder') from None


def check_local(path: str | os.PathLike[str], flag: str) -> None:
    """Checks that a path to write to is no URL, which would make folders such as `gs:` here.

    Few commands write to one (`jaxunet.runtime.upload`); a path object has lost a slash of it.

    Args:
      flag: the flag that gave the path; begins the message.

    Raises:
      UserError: it is.
    """
    if URL.search(os.fspath(path)):
        raise UserError(
            f'{flag}{": " if flag else ""}{path}: is a URL; here only files and folders of this '
            'machine are written: name one, and copy it, or mount the other storage'
        )


def file_above(path: str | os.PathLike[str]) -> str:
    """Returns ': X is a file, not a folder' if a path or a parent of it is one, and '' if not."""
    whole = pathlib.Path(path)
    found = next((each for each in (whole, *whole.parents) if os.path.exists(each)), whole)
    return f': {found} is a file, not a folder' if os.path.isfile(found) else ''


def why_missing(path: str | os.PathLike[str]) -> str:
    """Returns why a path leads nowhere, with a colon before; '' if nothing special is known.

    It may be a URL, or a link in it may be broken.
    """
    whole = pathlib.Path(path)
    if URL.search(str(whole)):
        return ': a URL has two slashes, as in s3://bucket/x; give it as text, not as a path object'
    for part in (*reversed(whole.parents), whole):
        try:
            if part.is_symlink() and not part.exists():
                return f': {part} is a link to {part.readlink()}, which is missing or a loop'
        except (OSError, ValueError):  # without a permission, or a name that cannot exist
            return ''
    return ''


class _Expanding(flags.ArgumentParser):
    """Parses a path, or a list of paths, and expands it."""

    def __init__(self, inner: flags.ArgumentParser) -> None:
        self._inner = inner
        self.syntactic_help = inner.syntactic_help

    def parse(self, argument: str) -> str | list[str]:
        """Returns the path, or the paths, without `~`."""
        value: Any = self._inner.parse(argument)
        try:
            if isinstance(value, list):
                return [expanded(path) for path in value]
            return expanded(value)
        except UserError as error:
            raise ValueError(str(error)) from None  # absl adds the flag's name

    def flag_type(self) -> str:
        """Returns the name of the flag's type in --helpfull."""
        return self._inner.flag_type()


def of_user(*holders: flags.FlagHolder[Any]) -> None:
    """Makes the values of these flags `expanded` paths."""
    for holder in holders:
        flag = flags.FLAGS[holder.name]
        flag.parser = _Expanding(flag.parser)
