"""Reads the files that hold the labels of a set: `dataset.json`, `metadata.jsonl` and the like."""

from __future__ import annotations

import csv
import io
import posixpath
import typing
from collections.abc import Iterator
from pathlib import PurePosixPath

from jaxunet.data.labels import (
    ADVICE,
    LABEL,
    FileSet,
    Labels,
    and_more,
    checked,
    numbered,
)
from jaxunet.data.rules import LABEL_FILES, bare_name, spelled
from jaxunet.data.source import no_labels
from jaxunet.runtime.class_names import class_name
from jaxunet.runtime.errors import UserError, listed, printable
from jaxunet.runtime.untrusted import parse_json, shown

FILE_NAME = 'file_name'  # Hugging Face's name of the column of paths
FILE_COLUMNS = (FILE_NAME, 'filename', 'image', 'path')


class _Entry(typing.NamedTuple):
    """A line of a file of labels: its place, for messages, the image's path and the label."""

    at: str
    image: str
    value: object


def by_table(files: FileSet, how: str) -> Labels | None:
    """Reads the file of labels nearest to the top of the set; None if it has no such labels."""
    tables = [name for name in files.others if PurePosixPath(name).name.lower() in LABEL_FILES]
    depth = min((name.count('/') for name in tables), default=0)
    tables = [name for name in tables if name.count('/') == depth]
    for kind in LABEL_FILES:
        of_kind = [name for name in tables if PurePosixPath(name).name.lower() == kind]
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
        entries.append(_Entry(at, pair[0], pair[1]))
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
    paths = next(filter(None, (spelled(name, columns) for name in FILE_COLUMNS)), '')
    others = [name for name in columns if name != paths]
    files.columns += others if paths else []
    column = others[0] if only and len(others) == 1 and not how else spelled(how or LABEL, others)
    if not column:
        if not paths:
            what = (
                f'a column {FILE_NAME}, found {listed(columns)}' if columns else 'rows, found none'
            )
            files.passed_over.append(f'{where}: expected {what}')
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
    """Yields the lines of a CSV file with a header, whose columns Excel may separate otherwise."""
    where, data = f'{files.shown}: {printable(name)}', files.read(name)
    try:
        text = data.decode('utf-8-sig')
        separator = max(',', ';', '\t', key=text.partition('\n')[0].count)
        reader = csv.reader(io.StringIO(text, newline=''), delimiter=separator, strict=True)
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
    rows = {_key(name): i for i, name in enumerate(files.images)}
    of = [rows.get(_key(posixpath.join(folder, entry.image)), -1) for entry in entries]
    values: list[int | str | None] = [None] * len(files.images)
    places: dict[int, str] = {}
    lost = [entry for entry, row in zip(entries, of, strict=True) if row < 0]
    if lost:
        whole = {bare_name(name): name for name in files.images}.get(_key(lost[0].image))
        raise UserError(
            f'{where}: {lost[0].at}: {printable(lost[0].image)}: no such image in the set'
            f'{and_more(len(lost))}'
            + (f'; did you mean "{printable(whole)}"?' if whole else '')
            + f'; {ADVICE}'
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
            f'{where}: no label for {printable(without[0])}{and_more(len(without))}; {ADVICE}'
        )
    return typing.cast(list[int | str], values)


def _key(path: str) -> str:
    """Returns a path in one form, with the slashes and accents of any system."""
    return class_name(posixpath.normpath(path.replace('\\', '/')))
