"""Sets that are divided into several files: webdataset's shards, and the files of tables.

They are named by braces, `x-{000000..000009}.tar` or `{a,b}.parquet`, by `*` and `?`, or by the
folder that holds them and no image files.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from jaxunet.data.containers import Folder, Spans
from jaxunet.data.rules import PART
from jaxunet.data.tar import TarArchive, compression
from jaxunet.runtime.errors import UserError, listed, printable

BRACES = re.compile(r'\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}')
MAX_NAMES = 10**6  # that braces may stand for


def named_files(path: Path) -> list[Path]:
    """Returns the files that a path with braces, `*` or `?` names; any other path alone.

    Args:
      path: a file or folder that exists is meant itself.

    Raises:
      UserError: nothing has such a name, or braces stand for more than `MAX_NAMES`.
    """
    text = str(path)
    if path.exists() or not (BRACES.search(text) or set('*?') & set(text)):
        return [path]
    texts = _without_braces(text)
    files: list[Path] = []
    for each in texts:
        if set('*?') & set(each):
            files += map(Path, sorted(glob.glob(each.replace('[', '[[]'))))
        else:
            files.append(Path(each))
    if not files:
        raise UserError(f'{path}: no file has such a name; * stands for any letters, ? for one')
    return files


def _without_braces(text: str) -> list[str]:
    """Returns the texts that a text with braces stands for, in order."""
    parts: list[Sequence[str]] = []
    end, count = 0, 1
    for match in BRACES.finditer(text):
        first, last, names = match.groups()
        if first is None:
            choices: Sequence[str] = names.split(',')
        else:
            width = max(len(first), len(last)) if '0' in (first[0], last[0]) else 0
            numbers = range(int(first), int(last) + 1)
            count *= len(numbers)
            if not 0 < count <= MAX_NAMES:
                raise UserError(
                    f'{text}: {match[0]}: expected 1 to {MAX_NAMES:,} numbers, found {count:,}'
                )
            choices = [f'{n:0{width}d}' for n in numbers]
        parts += [text[end : match.start()]], choices
        end = match.end()
    return [''.join(each) for each in itertools.product(*parts, [text[end:]])]


def divided(folder: Folder, suffix: str) -> list[Path]:
    """Returns the files of this suffix in a folder that holds no image files; else [].

    Raises:
      UserError: they are of several parts of a set, such as train and test.
    """
    names = [name for name in folder.names if name.lower().endswith(suffix)]
    if not names:
        return []
    for i, name in enumerate(folder.names):
        if not name.lower().endswith(suffix) and not folder.reason(i):
            return []
    names.sort(key=lambda name: PurePosixPath(name).parts)
    of = [(_part_of(name), name) for name in names]
    if len(parts := sorted({part for part, _ in of})) > 1:
        example = next(name for part, name in of if part == parts[-1])
        example = re.sub(r'\d{4,}(-of-\d+)?', '*', example)
        raise UserError(
            f'{folder.path}: holds several parts of a set, '
            f'{listed([part or "others" for part in parts])}; name the files of one, such as '
            f'{folder.path / example}'
        )
    return [folder.path / name for name in names]


def _part_of(name: str) -> str:
    """Returns the part of a set, such as train, that a path names; '' if none."""
    words = re.split(r'[-_./]', name.lower())
    return next((word for word in words if PART.fullmatch(word)), '')


def short_names(files: Sequence[Path]) -> list[str]:
    """Returns different names for files, without slashes: their own, or with those of folders."""
    names = [file.name for file in files]
    return names if len(set(names)) == len(names) else [str(f).replace('/', ':') for f in files]


class Shards(Spans):
    """Plain tars that hold one set; the name of each file begins with that of its tar.

    Args:
      path: the set, for messages.

    Raises:
      UserError: one of them is missing, damaged, compressed or without files.
    """

    sharded = True

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        super().__init__(path, files)
        spans = []
        for number, (file, short) in enumerate(zip(files, short_names(files), strict=True)):
            if compression(file):
                raise UserError(
                    f'{file}: a compressed tar among several cannot be read at random; unpack it'
                )
            shard = TarArchive(file)
            if not shard.names:
                raise UserError(f'{file}: expected files in this tar, found none; leave it out')
            before = len(self.names)
            self.names += [f'{short}/{name}' for name in shard.names]
            self.unreadable |= {before + i: why for i, why in shard.unreadable.items()}
            spans.append(shard.spans)
            spans[-1][:, 0] = number
        self.spans = np.concatenate(spans)


def check_kind(path: Path, files: Sequence[Path], kinds: Sequence[str]) -> None:
    """Raises `UserError` unless the files that a path with braces names share one of `kinds`."""
    found = sorted({file.suffix.lower() for file in files})
    if len(found) > 1 or found[0] not in kinds:
        raise UserError(
            f'{path}: expected files of one kind, {", ".join(kinds)}, found '
            f'{listed([printable(name) or "no suffix" for name in found])}'
        )
