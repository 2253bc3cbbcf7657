"""LMDB databases of image files, as LSUN is published, read at random by their keys."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from absl import logging

from jaxunet.data.containers import MAX_FILE_BYTES
from jaxunet.data.labels import Labels
from jaxunet.data.pixels import BadImage
from jaxunet.data.rules import MAGIC_BYTES
from jaxunet.data.source import no_labels
from jaxunet.data.tables import Rows
from jaxunet.runtime.errors import UserError, printable
from jaxunet.runtime.untrusted import one_line

DATA = 'data.mdb'  # the file in the folder of a database
SUFFIXES = ('.mdb', '.lmdb')
# Keys with which programs store the number of images and the like, beside them.
NO_IMAGES = frozenset((b'length', b'num-samples', b'num_samples', b'__len__', b'__keys__'))


def is_database(path: Path) -> bool:
    """Returns True for the folder of a database, and for a file with the suffix of one."""
    return (path / DATA).is_file() or (path.suffix.lower() in SUFFIXES and path.is_file())


class LmdbRows(Rows):
    """The values of a database, in the order of their keys, which stay in memory.

    Args:
      path: the folder of the database, or its file.

    Raises:
      UserError: lmdb is not installed, or the database is damaged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = str(path / DATA if path.is_dir() else path)
        start = time.monotonic()
        with _reading(self._file, path) as reader:
            keys = list(map(bytes, reader.cursor().iternext(values=False)))
        keys = [key for key in keys if key not in NO_IMAGES]
        self._keys, self._ends = b''.join(keys), np.cumsum([0, *map(len, keys)])
        self.counts, self.files = (len(keys),), (path.name,)
        logging.info(
            '%s: %s keys, listed in %.1f s, take %.1f MiB of memory',
            *(path, f'{len(keys):,}', time.monotonic() - start),
            (len(self._keys) + self._ends.nbytes) / 2**20,
        )

    def describe(self, i: int) -> str:
        """Returns the key of row `i` for a message."""
        return f'{self.shown}: key {printable(self._key(i).decode(errors="backslashreplace"))}'

    def start(self, i: int) -> tuple[bytes, int]:
        """Reads the first bytes of row `i`; see `Container.start`."""
        return self._value(i, MAGIC_BYTES)

    def read(self, i: int) -> bytes:
        """Reads row `i`; see `Container.read`."""
        data, size = self._value(i, MAX_FILE_BYTES)
        self.check_size(i, size)
        return data

    def labels(self, how: str) -> Labels:
        """Returns no labels, which such a database does not have; see `Rows.labels`."""
        if how:
            raise UserError(f'data.labels: {self.shown}: an LMDB has no labels, found {how!r}')
        return Labels(no_labels(len(self)))

    def _key(self, i: int) -> bytes:
        return self._keys[self._ends[i] : self._ends[i + 1]]

    def _value(self, i: int, most: int) -> tuple[bytes, int]:
        """Returns the first `most` bytes of a value, and its size."""
        with _reading(self._file, self.path) as reader:
            value = reader.get(self._key(i))
            if value is None:
                raise BadImage(self.describe(i), 'has gone since the set was opened')
            return bytes(value[:most]), len(value)


@contextlib.contextmanager
def _reading(file: str, shown: Path) -> Iterator[typing.Any]:
    """Begins a transaction, whose values are memory of the database, for the block.

    Raises:
      UserError: lmdb is not installed, or the database is damaged.
    """
    try:
        lmdb = importlib.import_module('lmdb')
    except ImportError:
        raise UserError(
            f'{file}: an LMDB database needs lmdb, which is not installed; '
            'pip install "jaxunet[lmdb]"'
        ) from None
    try:
        with _environment(file).begin(buffers=True) as reader:
            yield reader
    except (lmdb.Error, OSError) as error:
        raise UserError(
            f'{shown}: not a readable LMDB database: {one_line(error)}; it may be truncated, copy '
            'or download it again'
        ) from None


@functools.cache
def _environment(file: str) -> typing.Any:
    """Opens a database; a process can open each only once.

    Raises:
      OSError: the file is truncated, which would end the process when it is read.
    """
    lmdb = importlib.import_module('lmdb')
    environment = lmdb.open(file, subdir=False, readonly=True, lock=False, readahead=False)
    needed = (environment.info()['last_pgno'] + 1) * environment.stat()['psize']
    if (size := Path(file).stat().st_size) < needed:
        environment.close()
        raise OSError(f'it has {size} bytes, expected {needed}')
    return environment
