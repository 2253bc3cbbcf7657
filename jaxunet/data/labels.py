"""Labels of image files: a file of labels, files beside the images, their folders or their names.

`data.labels` chooses. Left empty, the first of these that a set has gives the labels:

- `dataset.json` of NVlabs' tools (StyleGAN, EDM): {"labels": [["00000/img00000000.png", 6], ...]};
- `metadata.jsonl`, `metadata.csv` (Hugging Face's imagefolder) or `labels.csv`: a column of paths,
  and the column `label`, or the only other column of `labels.csv`;
- beside each image, in the form of webdataset, `KEY.cls`, or `KEY.json` with a field `label`;
- the folders (`jaxunet.data.rules.find_classes`).

`folders` takes the folders in any case, and `names` the part of each file's name before its first
underscore, as guided-diffusion does. Any other value names a column of the files above, a field of
`KEY.json`, or the suffix of a file beside each image.
"""

from __future__ import annotations

import csv
import io
import posixpath
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import numpy as np
from jaxtyping import Int

from jaxunet.data.npz import check_labels
from jaxunet.data.rules import LABEL_FILES, class_name, class_order, find_classes
from jaxunet.data.source import no_labels
from jaxunet.runtime.errors import UserError, listed, near_misses, printable
from jaxunet.runtime.untrusted import MAX_JSON, parse_json, shown

FOLDERS, NAMES = 'folders', 'names'  # values of data.labels that name no column
LABEL, FILE_NAME = 'label', 'file_name'  # Hugging Face's names of columns
FILE_COLUMNS = (FILE_NAME, 'filename', 'image', 'path')
CLS, JSON = 'cls', 'json'  # suffixes of webdataset
MAX_BESIDE = 2**16  # bytes of a file of labels beside each image
ADVICE = 'mend it, or set data.labels (docs/training.md)'


class Labels(typing.NamedTuple):
    """The labels of a set.

    Fields:
      numbers: int32 (images,), indices into `names`; all -1 without classes.
      names: of the classes; empty without them.
      missing: why there are none; '' if nothing looks like labels.
      origin: where they come from, for the log.
      used: the files that hold them, or belong to an image as these do.
    """

    numbers: Int[np.ndarray, ' images']
    names: tuple[str, ...] = ()
    missing: str = ''
    origin: str = ''
    used: frozenset[str] = frozenset()


@dataclass
class FileSet:
    """The files among which labels are looked for.

    Fields:
      shown: the set, for messages.
      images: path of each image, in the order of the set.
      others: paths of the files that are no images.
      read: returns the content of one of the others.
      strip_leading: see `find_classes`.
      shards: the first folder of each path is an archive.
      columns: names that `data.labels` could have had, for messages.
    """

    shown: str
    images: Sequence[str]
    others: Sequence[str]
    read: Callable[[str], bytes]
    strip_leading: bool
    shards: bool = False
    columns: list[str] = field(default_factory=list)


class _Entry(typing.NamedTuple):
    """A line of a file of labels: its place, for messages, the image's path and the label."""

    at: str
    image: str
    value: object


def find_labels(files: FileSet, how: str = '') -> Labels:
    """Returns the labels of a set, by the value of `data.labels`.

    Without one, labels with mistakes are no labels, and `missing` of the result says why.

    Raises:
      UserError: the labels that `how` names are missing or have mistakes.
    """
    labels = _find(files, how)
    if not files.shards:
        return labels
    known = {sample_key(name)[0] for name in files.images}
    beside = {name for name in files.others if sample_key(name)[0] in known}
    return labels._replace(used=labels.used | beside)


def _find(files: FileSet, how: str) -> Labels:
    if how == NAMES:
        return _by_names(files)
    if how != FOLDERS:
        try:
            labels = _by_table(files, how) or _by_side(files, how)
        except UserError as error:
            if how:
                raise
            return Labels(no_labels(len(files.images)), missing=str(error))
        if labels is not None:
            return labels
        if how:
            columns = [*dict.fromkeys(files.columns)]
            raise UserError(
                f'data.labels: {files.shown} has no labels named {how!r}'
                f'{near_misses(how, [*columns, FOLDERS, NAMES])}; expected {FOLDERS}, {NAMES}'
                + (f', or one of {listed(columns)}' if columns else ', or a column of metadata.csv')
            )
    paths = [name.partition('/')[2] for name in files.images] if files.shards else files.images
    found, names, missing = find_classes(list(paths), strip_leading=files.strip_leading)
    if not names and files.columns and not missing:
        missing = (
            f'no column is named {LABEL}: data.labels=NAME takes one of {listed(files.columns)}'
        )
    return Labels(found, names, missing, 'folders' if names else '')


def most_bytes(name: str) -> int:
    """Returns the most bytes that a file of this name may have for its labels to be read."""
    return MAX_JSON if PurePosixPath(name).name in LABEL_FILES else MAX_BESIDE


def numbered(
    values: Sequence[int | str], where: str
) -> tuple[Int[np.ndarray, ' images'], tuple[str, ...]]:
    """Returns int32 labels and the names of their classes.

    Values that are all whole numbers are the labels themselves. Others are names, which are sorted
    as those of folders.

    Args:
      where: begins the messages.

    Raises:
      UserError: numbers that are no labels.
    """
    if all(isinstance(v, int) or _is_number(v) for v in values):
        try:
            return check_labels(where, len(values), np.array([int(v) for v in values]), None)
        except OverflowError:
            raise UserError(f'{where}: labels: found a number of more than 64 bits') from None
    texts = [class_name(str(value)) for value in values]
    names = tuple(sorted(set(texts), key=class_order))
    numbers = {name: i for i, name in enumerate(names)}
    return np.array([numbers[text] for text in texts], np.int32), names


def checked(value: object, where: str) -> int | str:
    """Returns the label of an image: a whole number, or the name of a class.

    Args:
      where: file and entry; begins the message.

    Raises:
      UserError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip():
        return value.strip()
    empty = value is None or isinstance(value, str)
    raise UserError(
        f'{where}: expected a label, a whole number or the name of a class, found '
        f'{"nothing" if empty else shown(value)}; {ADVICE}'
    )


def _is_number(text: str) -> bool:
    return text.removeprefix('-').isdecimal() and text.isascii()


def _by_names(files: FileSet) -> Labels:
    """Takes the part of each file's name before the first underscore."""
    values = []
    for name in files.images:
        start, underscore, _ = PurePosixPath(name).name.partition('_')
        if not (start and underscore):
            raise UserError(
                f'data.labels=names: {files.shown}: {printable(name)}: expected a class before an '
                'underscore, as in cat_0001.png, found none; rename it, or remove it'
            )
        values.append(class_name(start))
    names = tuple(sorted(set(values), key=class_order))
    numbers = {name: i for i, name in enumerate(names)}
    found = np.array([numbers[value] for value in values], np.int32)
    return Labels(found, names, origin='file names')


def _by_table(files: FileSet, how: str) -> Labels | None:
    """Reads the file of labels nearest to the top of the set; None if it has no such labels."""
    tables = [name for name in files.others if PurePosixPath(name).name in LABEL_FILES]
    depth = min((name.count('/') for name in tables), default=0)
    tables = [name for name in tables if name.count('/') == depth]
    for kind in LABEL_FILES:
        of_kind = [name for name in tables if PurePosixPath(name).name == kind]
        if not of_kind:
            continue
        name = of_kind[0]
        where = f'{files.shown}: {printable(name)}'
        if kind == 'dataset.json':
            entries, column = _of_nvlabs(files.read(name), where, how), ''
        else:
            rows = _jsonl(files.read(name), where) if kind.endswith('l') else _csv(files, name)
            entries, column = _of_column(list(rows), where, how, files, kind == 'labels.csv')
        if entries is None:
            continue
        if len(of_kind) > 1:
            raise UserError(
                f'{files.shown}: expected one file of labels, found {listed(of_kind)}; give the '
                'folder of one of them'
            )
        if not entries:
            return Labels(
                no_labels(len(files.images)),
                missing=f'its {kind} has no labels',
                used=frozenset([name]),
            )
        values = _assigned(entries, posixpath.dirname(name), files, where)
        origin = f'{kind}, column {column}' if column else kind
        return Labels(*numbered(values, where), origin=origin, used=frozenset([name]))
    return None


def _of_nvlabs(data: bytes, where: str, how: str) -> list[_Entry] | None:
    """Returns the entries of `dataset.json`, [] if its labels are null; None if it is another."""
    if b'"labels"' not in data or how:
        return None
    content = parse_json(data, where, advice=ADVICE)
    if 'labels' not in content:
        return None
    labels = content['labels']
    if labels is not None and not isinstance(labels, list):
        raise UserError(
            f'{where}: labels: expected a list or null, found {shown(labels)}; {ADVICE}'
        )
    entries = []
    for i, pair in enumerate(labels or []):
        at = f'labels[{i}]'
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise UserError(
                f'{where}: {at}: expected ["PATH", LABEL], found {shown(pair)}; {ADVICE}'
            )
        if not isinstance(pair[1], int) or isinstance(pair[1], bool):
            raise UserError(
                f'{where}: {at}: {printable(pair[0])}: expected a whole number as the label, found '
                f'{shown(pair[1])}; {ADVICE}'
            )
        entries.append(_Entry(at, pair[0].replace('\\', '/'), pair[1]))
    return entries


def _of_column(
    rows: list[tuple[str, dict[str, typing.Any]]], where: str, how: str, files: FileSet, only: bool
) -> tuple[list[_Entry] | None, str]:
    """Returns the entries of a table, and the name of its column of labels.

    None in place of the entries: it has no such column.

    Args:
      rows: the place and the columns of each line.
      only: the only column beside the paths holds the labels, whatever its name.
    """
    columns = list(dict.fromkeys(name for _, row in rows for name in row))
    paths = next((name for name in FILE_COLUMNS if name in columns), '')
    others = [name for name in columns if name != paths]
    files.columns += others if paths else []
    column = how or (others[0] if only and len(others) == 1 else LABEL)
    if column not in others:
        return None, ''
    if not paths:
        raise UserError(
            f'{where}: expected a column {FILE_NAME}, found {listed(columns)}; {ADVICE}'
        )
    entries = []
    for at, row in rows:
        if not isinstance(image := row.get(paths), str) or not image:
            raise UserError(f'{where}: {at}: expected a path in {paths}, found none; {ADVICE}')
        entries.append(_Entry(at, image, row.get(column)))
    return entries, column


def _jsonl(data: bytes, where: str) -> Iterator[tuple[str, dict[str, typing.Any]]]:
    for i, line in enumerate(data.split(b'\n'), 1):
        if line.strip():
            yield f'line {i}', parse_json(line, f'{where}: line {i}', advice=ADVICE)


def _csv(files: FileSet, name: str) -> Iterator[tuple[str, dict[str, typing.Any]]]:
    """Yields the lines of a CSV file with a header."""
    where, data = f'{files.shown}: {printable(name)}', files.read(name)
    try:
        text = data.decode('utf-8-sig')
        reader = csv.reader(io.StringIO(text, newline=''), strict=True)
        header = [column.strip() for column in next(reader, [])]
        for row in reader:
            if row:
                yield f'line {reader.line_num}', dict(zip(header, row, strict=False))
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f'{where}: not a readable CSV file: {error}; {ADVICE}') from None


def _assigned(entries: list[_Entry], folder: str, files: FileSet, where: str) -> list[int | str]:
    """Returns the label of each image, from entries whose paths begin at `folder`.

    Raises:
      UserError: an entry without an image, an image without an entry, two of one image, or an entry
        without a label.
    """
    rows = {posixpath.normpath(name): i for i, name in enumerate(files.images)}
    of = [rows.get(posixpath.normpath(posixpath.join(folder, e.image)), -1) for e in entries]
    values: list[int | str | None] = [None] * len(rows)
    places: dict[int, str] = {}
    lost = [entry for entry, row in zip(entries, of, strict=True) if row < 0]
    if lost:
        raise UserError(
            f'{where}: {lost[0].at}: {printable(lost[0].image)}: no such image in the set'
            f'{_more(len(lost))}; {ADVICE}'
        )
    for entry, row in zip(entries, of, strict=True):
        if row in places:
            raise UserError(
                f'{where}: {entry.at}: {printable(entry.image)}: has a label already, in '
                f'{places[row]}; {ADVICE}'
            )
        places[row] = entry.at
        values[row] = checked(entry.value, f'{where}: {entry.at}: {printable(entry.image)}')
    without = [name for name, value in zip(files.images, values, strict=True) if value is None]
    if without:
        raise UserError(
            f'{where}: no label for {printable(without[0])}{_more(len(without))}; {ADVICE}'
        )
    return typing.cast(list[int | str], values)


def _more(count: int) -> str:
    return f' ({count:,} are like that)' if count > 1 else ''


def sample_key(name: str) -> tuple[str, str]:
    """Returns the key that the files of one sample share in webdataset, and the suffix of this."""
    folder, _, file = name.rpartition('/')
    key, _, suffix = file.partition('.')
    return f'{folder}/{key}', suffix.lower()


def _by_side(files: FileSet, how: str) -> Labels | None:
    """Reads a file beside each image; None if there are none of the kind."""
    beside: dict[str, dict[str, str]] = {}  # suffix -> key -> file
    for name in files.others:
        key, suffix = sample_key(name)
        beside.setdefault(suffix, {})[key] = name
    keys = [sample_key(name)[0] for name in files.images]
    known = set(keys)
    beside = {suffix: found for suffix, found in beside.items() if not known.isdisjoint(found)}
    suffix, column = how or CLS, ''
    if suffix not in beside:
        sample = next((beside[JSON][key] for key in keys if key in beside.get(JSON, ())), None)
        if sample is None:
            return None
        first = _loaded(files, sample)
        files.columns += [*beside, *first]
        suffix, column = JSON, how or LABEL
        if column not in first:
            return None
    found = beside[suffix]
    _check_keys(files, keys, found, suffix)
    values = []
    for key in keys:
        content = _loaded(files, found[key]).get(column) if column else _text(files, found[key])
        values.append(checked(content, f'{files.shown}: {printable(found[key])}'))
    used = frozenset(name for name in files.others if sample_key(name)[0] in known)
    origin = f'.{suffix} beside each image' + (f', field {column}' if column else '')
    return Labels(*numbered(values, f'{files.shown}: .{suffix}'), origin=origin, used=used)


def _check_keys(files: FileSet, keys: list[str], found: dict[str, str], suffix: str) -> None:
    """Checks that every image has a file of labels beside it, and each of these its image."""
    if files.shards:
        shards = {key.partition('/')[0] for key in found}
        lacking = [name for name in files.images if name.partition('/')[0] not in shards]
        if lacking:
            raise UserError(
                f'{files.shown}: shards of unequal keys: {printable(min(shards))} has .{suffix} '
                f'beside its images, {printable(lacking[0].partition("/")[0])} has none; write '
                'them alike, or give those that are'
            )
    known = set(keys)
    for key, name in found.items():
        if key not in known:
            raise UserError(
                f'{files.shown}: {printable(name)}: the label of an image that is missing; {ADVICE}'
            )
    without = [name for key, name in zip(keys, files.images, strict=True) if key not in found]
    if without:
        raise UserError(
            f'{files.shown}: {printable(without[0])}: expected a .{suffix} beside it, as other '
            f'images have, found none{_more(len(without))}; {ADVICE}'
        )


def _text(files: FileSet, name: str) -> str:
    return files.read(name)[:1024].decode(errors='backslashreplace')


def _loaded(files: FileSet, name: str) -> dict[str, typing.Any]:
    return parse_json(files.read(name), f'{files.shown}: {printable(name)}', advice=ADVICE)
