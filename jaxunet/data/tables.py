"""Images in the rows of tables: parquet, and the Arrow files of Hugging Face's `datasets`.

One column holds the image files, as bytes or as a struct of `bytes` and `path`; another one may
hold labels. Needs pyarrow, the extra `parquet`.
"""

from __future__ import annotations

import abc
import importlib
import json
import typing
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxunet.data.containers import Container
from jaxunet.data.labels import FOLDERS, LABEL, NAMES, Labels, checked, numbered
from jaxunet.data.order import Pieces
from jaxunet.data.rules import spelled
from jaxunet.data.source import no_labels, spread
from jaxunet.runtime.errors import UserError, listed, near_misses, printable
from jaxunet.runtime.untrusted import one_line

IMAGES = ('image', 'img')  # names that decide between several columns of bytes
# Exceptions that pyarrow raises on a damaged file.
ERRORS = (ValueError, OSError, LookupError, NotImplementedError)
LOOKED_AT = 16  # rows whose bytes are looked at when a set is opened


class Rows(Container):
    """Images by number, without names, all of them taken for images when the set is opened.

    Attributes:
      counts: the number of rows of each file.
      files: the names of these files, for messages.
      pieces: see `Source.pieces`.
    """

    counts: Sequence[int] = ()
    files: Sequence[str] = ()
    pieces: Pieces | None = None

    def __len__(self) -> int:
        return sum(self.counts)

    def describe(self, i: int) -> str:
        """Returns the file and the number of row `i`, from 0."""
        ends = np.cumsum(self.counts)
        file = int(np.searchsorted(ends, i, 'right'))
        row = i - int(ends[file]) + self.counts[file]
        return f'{self.shown}: {printable(self.files[file])}: row {row}'

    def check_images(self) -> None:
        """Raises `UserError` if there are no rows, or none of a few of them holds an image."""
        if not len(self):
            raise UserError(f'{self.shown}: expected at least one image, found no rows')
        rows = spread(len(self), LOOKED_AT).tolist()
        reasons = [self.reason(i) for i in rows]
        if all(reasons):
            raise UserError(
                f'{self.describe(rows[0])}: expected an image file, found: {reasons[0]}'
            )

    @abc.abstractmethod
    def labels(self, how: str) -> Labels:
        """Returns the labels of all rows, by the value of `data.labels`.

        Raises:
          UserError: the labels that `how` names are missing or have mistakes.
        """


class Columns(typing.NamedTuple):
    """The columns of a table.

    Fields:
      image: the one that holds the images, as a path to its bytes: ('image', 'bytes') or ('jpg',).
      label: the one that holds the labels; '' = none.
      missing: why there is none.
      names: of the labels 0, 1, ...; None if they are not stated.
    """

    image: tuple[str, ...]
    label: str
    missing: str
    names: list[str] | None


def library(path: Path) -> typing.Any:
    """Returns pyarrow.

    Raises:
      UserError: it is not installed.
    """
    try:
        for part in ('ipc', 'parquet'):
            importlib.import_module(f'pyarrow.{part}')
        return importlib.import_module('pyarrow')
    except ImportError:
        raise UserError(
            f'{path}: parquet and Arrow files need pyarrow, which is not installed; '
            'pip install "jaxunet[parquet]"'
        ) from None


def unreadable(path: Path, error: object) -> UserError:
    """Returns the error for a file that pyarrow refuses."""
    kind = 'a parquet file' if path.suffix.lower() == '.parquet' else 'an Arrow file'
    return UserError(
        f'{path}: not readable as {kind}: {one_line(error)}; it may be truncated, copy or download '
        'it again'
    )


def choose_columns(schema: typing.Any, where: str, how: str) -> Columns:
    """Returns the columns of images and of labels of a table.

    Args:
      schema: pyarrow's.
      where: begins the messages.
      how: `data.labels`.

    Raises:
      UserError: no or several columns of images, or no column `how`.
    """
    features = _features(schema)
    try:
        image = _image_column(schema, features, where)
    except UnicodeError as error:  # names that are no text
        raise UserError(f'{where}: a damaged list of columns: {one_line(error)}') from None
    others = [name for name in schema.names if name != image[0]]
    classes = [name for name in others if features.get(name, {}).get('_type') == 'ClassLabel']
    label, missing = spelled(how or LABEL, others), ''
    if how and not label:
        raise UserError(
            f'data.labels: {where}: has no column {how!r}{near_misses(how, others)}; expected one '
            f'of {listed(others) or "none"}'
            + (f' ({FOLDERS} and {NAMES} are of image files)' if how in (FOLDERS, NAMES) else '')
        )
    if not label:
        label = classes[0] if len(classes) == 1 else ''
        if others and not label:
            missing = (
                f'no column is named {LABEL}: data.labels=NAME takes one of '
                f'{listed(classes or others)}'
            )
    return Columns(image, label, missing, _names_of(features, label))


def _names_of(features: dict[str, dict[str, typing.Any]], label: str) -> list[str] | None:
    """Returns the names of the classes of a column of the type ClassLabel; None if it has none."""
    feature = features.get(label, {})
    names = feature.get('names') if feature.get('_type') == 'ClassLabel' else None
    texts = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    return names if texts else None


def check_labels_of(schema: typing.Any, path: Path, columns: Columns) -> None:
    """Checks that a file of a set has the labels of the first one.

    Raises:
      UserError: it lacks the column, or names the classes otherwise.
    """
    if columns.label not in schema.names:
        raise UserError(f'{path}: files of unequal columns: has no {columns.label}')
    names = _names_of(_features(schema), columns.label)
    if names != columns.names:
        expected, found = (listed(each or []) or 'none' for each in (columns.names, names))
        raise UserError(
            f'{path}: files of unequal columns: {columns.label}: expected the classes of the first '
            f'file, {expected}, found {found}; write them alike'
        )


def _features(schema: typing.Any) -> dict[str, dict[str, typing.Any]]:
    """Returns what Hugging Face's `datasets` states of each column; {} of other tables."""
    try:
        features = json.loads(schema.metadata[b'huggingface'])['info']['features']
        return {name: each for name, each in features.items() if isinstance(each, dict)}
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
        return {}


def _image_column(
    schema: typing.Any, features: dict[str, dict[str, typing.Any]], where: str
) -> tuple[str, ...]:
    found: dict[str, tuple[str, ...]] = {}
    lists = []
    for column in schema:
        kind = str(column.type)
        if kind in ('binary', 'large_binary'):
            found[column.name] = (column.name,)
        elif kind.startswith('struct<') and {'bytes: binary', 'bytes: large_binary'} & {
            str(inner).removeprefix('pyarrow.Field<').removesuffix('>')
            for inner in (f'{f.name}: {f.type}' for f in column.type)
        }:
            found[column.name] = (column.name, 'bytes')
        elif 'list<' in kind or 'array' in kind:
            lists.append(column.name)
    stated = [name for name in found if features.get(name, {}).get('_type') == 'Image']
    names = stated or list(found)
    if len(names) > 1:
        names = [*filter(None, (spelled(name, names) for name in IMAGES))][:1] or names
    if len(names) > 1:
        raise UserError(
            f'{where}: expected one column of images, found {listed(names)}; keep one of them, or '
            f'name it {IMAGES[0]}'
        )
    if names:
        return found[names[0]]
    if lists:
        raise UserError(
            f'{where}: expected one image file a row, found nested lists in the column '
            f'{lists[0]}; store each image as PNG or JPEG bytes'
        )
    columns = listed([f'{column.name} ({column.type})'[:60] for column in schema])
    raise UserError(
        f'{where}: no column of images (bytes, or a struct of bytes and path), found '
        f'{columns or "no columns"}'
    )


def labels_of(
    chunks: Sequence[typing.Any], columns: Columns, counts: Sequence[int], where: str, how: str
) -> Labels:
    """Returns the labels in a column.

    Args:
      chunks: pyarrow's column of each file; [] if there is none.
      counts: rows of each file.
      how: `data.labels`; without one, mistakes mean that there are no labels.

    Raises:
      UserError: missing labels, or such as are neither whole numbers nor text.
    """
    if not columns.label:
        return Labels(no_labels(sum(counts)), missing=columns.missing)
    place = f'{where}: {columns.label}'
    try:
        raw = [value for chunk in chunks for value in _values(chunk, place)]
        values = [checked(value, f'{place}: row {row}') for row, value in enumerate(raw)]
        numbers, classes = numbered(values, place, columns.names)
    except UserError as error:
        if how:
            raise
        return Labels(no_labels(sum(counts)), missing=str(error))
    missing = '' if classes else f'all labels in the column {columns.label} are -1'
    return Labels(numbers, classes, missing, f'the column {columns.label}' if classes else '')


def _values(chunk: typing.Any, place: str) -> list[object]:
    kind = str(chunk.type)
    if not ('int' in kind or 'string' in kind) or '<' in kind.removeprefix('dictionary<'):
        raise UserError(f'{place}: expected whole numbers or text as labels, found {kind}')
    try:
        return list(chunk.to_pylist())
    except ERRORS as error:
        raise UserError(f'{place}: damaged: {one_line(error)}') from None
