"""Parquet files of images, read at random by row groups, of which the last used are kept."""

from __future__ import annotations

import collections
import threading
import typing
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import logging

from jaxunet.data.labels import Labels
from jaxunet.data.order import Pieces
from jaxunet.data.pixels import BadImage
from jaxunet.data.rules import MAGIC_BYTES
from jaxunet.data.shards import short_names
from jaxunet.data.tables import (
    ERRORS,
    Columns,
    Rows,
    check_labels_of,
    choose_columns,
    labels_of,
    library,
    unreadable,
)
from jaxunet.runtime.errors import UserError

KEPT = 2**30  # bytes of row groups that a process keeps
MAX_GROUP = 2**30  # bytes of images in one row group
MOST_OPEN = 64  # files


class ParquetRows(Rows):
    """The rows of parquet files, in their order.

    Args:
      path: the set, for messages.

    Raises:
      UserError: a file cannot be read, has no column of images or others than the first one, or
        row groups of more than `MAX_GROUP` bytes.
    """

    def __init__(self, path: Path, paths: Sequence[Path]) -> None:
        super().__init__(path)
        self._paths, self.files = paths, short_names(paths)
        self._cache = _Cache()
        groups: list[tuple[int, int, int]] = []  # file, number in it, rows
        counts, sizes = [], []
        for number, file in enumerate(paths):
            opened = _opened(file)
            columns = choose_columns(opened.schema_arrow, str(file), '')
            if number == 0:
                self._columns = columns
            elif columns.image != self._columns.image:
                raise UserError(
                    f'{path}: files of unequal columns: the images are in '
                    f'{self._columns.image[0]} of {self.files[0]}, and in {columns.image[0]} of '
                    f'{self.files[number]}; write them alike'
                )
            counts.append(opened.metadata.num_rows)
            for group, (rows, size) in enumerate(_row_groups(opened, file, columns)):
                groups.append((number, group, rows))
                sizes.append(size)
                if size > MAX_GROUP:
                    raise UserError(
                        f'{file}: row group {group} has {size / 2**30:.1f} GiB of images, '
                        f'more than the {MAX_GROUP / 2**30:g} accepted; write row groups of about '
                        '100 images'
                    )
        self.counts = counts
        self._groups = np.array(groups, np.int64).reshape(-1, 3)
        self._ends = np.cumsum(self._groups[:, 2])
        if (total := sum(sizes)) > KEPT:
            window = max(KEPT // 2 // max(sizes), 1)  # the rest of KEPT is for the next ones
            self.pieces = Pieces(self._groups[:, 2][self._groups[:, 2] > 0], window)
            logging.info(
                '%s: %.1f GiB of images in %d row groups of up to %.1f MiB, more than the %d MiB '
                'that are kept: a stream mixes the images of %d groups at a time',
                *(path, total / 2**30, len(groups), max(sizes) / 2**20, KEPT // 2**20, window),
            )

    def start(self, i: int) -> tuple[bytes, int]:
        """Reads the first bytes of row `i`; see `Container.start`."""
        data = self.read(i)
        return data[:MAGIC_BYTES], len(data)

    def read(self, i: int) -> bytes:
        """Reads the row group of row `i`, unless it is kept; see `Container.read`."""
        group = int(np.searchsorted(self._ends, i, 'right'))
        file, inside, rows = self._groups[group].tolist()
        kept = self._cache.get(group, self._paths[file], inside, self._columns)
        value = kept[i - int(self._ends[group]) + rows].as_py()
        if value is None:
            raise BadImage(self.describe(i), 'no bytes of an image')
        return typing.cast(bytes, value)

    def labels(self, how: str) -> Labels:
        """Reads the column of labels; see `Rows.labels`."""
        first = _opened(self._paths[0])
        columns = choose_columns(first.schema_arrow, str(self._paths[0]), how)
        chunks = []
        for path in self._paths if columns.label else ():
            file = _opened(path)
            check_labels_of(file.schema_arrow, path, columns)
            try:
                chunks.append(file.read([columns.label]).column(0))
            except ERRORS as error:
                raise unreadable(path, error) from None
        return labels_of(chunks, columns, self.counts, self.shown, how)


def _opened(path: Path) -> typing.Any:
    try:
        return library(path).parquet.ParquetFile(path)
    except ERRORS as error:
        raise unreadable(path, error) from None


def _row_groups(opened: typing.Any, path: Path, columns: Columns) -> list[tuple[int, int]]:
    """Returns the rows of each row group, and the bytes of its images by the file's own account."""
    name = '.'.join(columns.image)
    found = []
    try:
        for group in map(opened.metadata.row_group, range(opened.num_row_groups)):
            chunks = [group.column(i) for i in range(group.num_columns)]
            sizes = [c.total_uncompressed_size for c in chunks if c.path_in_schema == name]
            found.append((group.num_rows, sum(sizes)))
    except ERRORS as error:
        raise unreadable(path, error) from None
    return found


class _Cache:
    """The row groups and files that were used last; empty in another process."""

    def __init__(self) -> None:
        self._groups = collections.OrderedDict[int, typing.Any]()
        self._files = collections.OrderedDict[Path, tuple[typing.Any, threading.Lock]]()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[_Cache], tuple[()]]:
        return _Cache, ()

    def get(self, key: int, path: Path, group: int, columns: Columns) -> typing.Any:
        """Returns the images of a row group, pyarrow's column of bytes.

        Raises:
          UserError: the file is damaged.
        """
        with self._lock:
            if (kept := self._kept(key)) is not None:
                return kept
            if path not in self._files:
                self._files[path] = _opened(path), threading.Lock()
            self._files.move_to_end(path)
            file, busy = self._files[path]
            if len(self._files) > MOST_OPEN:
                self._files.popitem(last=False)
        with busy:  # a ParquetFile serves one thread
            with self._lock:
                if (kept := self._kept(key)) is not None:
                    return kept
            column = self._read(file, path, group, columns)
        with self._lock:
            self._groups[key] = column
            while len(self._groups) > 1 and self._size() > KEPT:
                self._groups.popitem(last=False)
        return column

    @staticmethod
    def _read(file: typing.Any, path: Path, group: int, columns: Columns) -> typing.Any:
        try:
            column = file.read_row_group(group, ['.'.join(columns.image)]).column(0)
        except ERRORS as error:
            raise unreadable(path, error) from None
        return column.flatten()[0] if len(columns.image) > 1 else column

    def _kept(self, key: int) -> typing.Any:
        if key in self._groups:
            self._groups.move_to_end(key)
        return self._groups.get(key)

    def _size(self) -> int:
        return sum(column.nbytes for column in self._groups.values())
