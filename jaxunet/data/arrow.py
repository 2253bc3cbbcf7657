"""Arrow files of Hugging Face's `datasets` (`save_to_disk`), read at random.

The bytes of each image lie in one piece in the file. Opening a file finds these places, and reading
an image needs neither pyarrow nor a memory map.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from jaxunet.data.containers import Spans
from jaxunet.data.labels import Labels
from jaxunet.data.pixels import BadImage
from jaxunet.data.shards import short_names
from jaxunet.data.tables import (
    ERRORS,
    Rows,
    check_labels_of,
    choose_columns,
    labels_of,
    library,
    unreadable,
)
from jaxunet.runtime.errors import UserError

ABSENT = -1  # size of an image that a row lacks


class ArrowRows(Rows, Spans):
    """The rows of Arrow files (streams or files), in their order.

    Args:
      path: the set, for messages.

    Raises:
      UserError: a file cannot be read, is compressed, or has no column of images.
    """

    def __init__(self, path: Path, paths: Sequence[Path]) -> None:
        Spans.__init__(self, path, paths)
        self._paths, self.files = paths, short_names(paths)
        counts, spans = [], []
        for number, file in enumerate(paths):
            schema, batches, base = _batches(file)
            image = choose_columns(schema, str(file), '').image
            inside = [_places(batch.column(image[0]), image[1:], base, file) for batch in batches]
            counts.append(sum(map(len, inside)))
            spans += [np.insert(each, 0, number, axis=1) for each in inside]
        self.counts = counts
        self.spans = np.concatenate(spans or [np.empty((0, 3), np.int64)])

    def start(self, i: int) -> tuple[bytes, int]:
        """Reads the first bytes of row `i`; see `Container.start`."""
        self._check(i)
        return super().start(i)

    def read(self, i: int) -> bytes:
        """Reads row `i`; see `Container.read`."""
        self._check(i)
        return super().read(i)

    def _check(self, i: int) -> None:
        if self.spans[i, 2] == ABSENT:
            raise BadImage(self.describe(i), 'no bytes of an image')

    def labels(self, how: str) -> Labels:
        """Reads the column of labels; see `Rows.labels`."""
        columns = choose_columns(_batches(self._paths[0])[0], str(self._paths[0]), how)
        chunks = []
        for path in self._paths if columns.label else ():
            schema, batches, _ = _batches(path)
            check_labels_of(schema, path, columns)
            chunks += [batch.column(columns.label) for batch in batches]
        return labels_of(chunks, columns, self.counts, self.shown, how)


def _batches(path: Path) -> tuple[typing.Any, list[typing.Any], range]:
    """Returns the schema and the record batches of a file, and the memory that it is mapped to."""
    arrow = library(path)
    try:
        source = arrow.memory_map(str(path))
        whole = source.read_buffer()
        source.seek(0)
        if whole[:6].to_pybytes() == b'ARROW1':
            file = arrow.ipc.open_file(source)
            batches = [file.get_batch(i) for i in range(file.num_record_batches)]
        else:
            file = arrow.ipc.open_stream(source)
            batches = list(file)
        for batch in batches:
            batch.validate()
    except ERRORS as error:
        raise unreadable(path, error) from None
    return file.schema, batches, range(whole.address, whole.address + whole.size)


def _places(
    column: typing.Any, inner: tuple[str, ...], mapped: range, path: Path
) -> Int64[np.ndarray, 'rows 2']:
    """Returns the first byte in the file and the size of each image of a record batch.

    Args:
      column: the images.
      inner: name of the bytes in a struct; () = the column holds them itself.
      mapped: the memory that the file is mapped to.
    """
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    if inner:
        column = column.field(inner[0])
        valid &= column.is_valid().to_numpy(zero_copy_only=False)
    _, offsets, data = column.buffers()
    out = np.full((len(column), 2), ABSENT, np.int64)
    if not valid.any():
        return out
    kind = np.int64 if str(column.type) == 'large_binary' else np.int32
    ends = np.frombuffer(offsets, kind, column.offset + len(column) + 1)[column.offset :]
    ends = ends.astype(np.int64)
    if data.address not in mapped or not 0 <= ends[0] <= ends[-1] <= data.size:
        raise UserError(
            f'{path}: its record batches are compressed or damaged; write them without compression'
        )
    out[:, 0], out[:, 1] = ends[:-1] + data.address - mapped.start, np.diff(ends)
    out[~valid, 1] = ABSENT
    if out[valid, 1].min() < 0:
        raise UserError(f'{path}: a row ends before it begins; the file is damaged')
    return out
