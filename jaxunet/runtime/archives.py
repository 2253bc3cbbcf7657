"""Reads archives that may be damaged or hostile: their expanded size, .zip, .npy.

All sizes are checked before anything is allocated. `expanded_limit` bounds the expanded size.
"""

from __future__ import annotations

import collections
import errno
import io
import lzma
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import plain, shown

LIMIT = 'JAXUNET_MAX_EXPANDED_GIB'  # environment variable
ALWAYS = 2**28  # bytes to which any archive may expand
TIMES = 32  # an archive may also expand to this many times its own size
NPY_START = 2**14  # bytes that hold the header of any .npy that numpy reads
ENCRYPTED = 0x1  # flag bit of a zip entry
# Exceptions of zipfile, numpy and the decompressors for a damaged archive.
ERRORS = (
    zipfile.BadZipFile,
    EOFError,
    ValueError,
    ArithmeticError,
    LookupError,
    TypeError,
    RuntimeError,  # NotImplementedError, and RecursionError
    zlib.error,
    lzma.LZMAError,
    struct.error,
)


def expanded_limit(packed: int) -> int:
    """Returns the bytes to which an archive of `packed` bytes may expand.

    The limit is 256 MiB, or 32 times the archive's size if that is more. The environment variable
    JAXUNET_MAX_EXPANDED_GIB sets another limit.

    Raises:
      UserError: JAXUNET_MAX_EXPANDED_GIB is not a number above 0.
    """
    given = os.environ.get(LIMIT)
    if given is None:
        return max(ALWAYS, TIMES * packed)
    try:
        gib = float(given)
        if 0 < gib < 2**33:
            return int(gib * 2**30)
    except ValueError:
        pass
    raise UserError(f'{LIMIT}: expected a number of GiB above 0, found {given[:40]!r}')


def too_large(source: str, size: int, packed: int) -> UserError:
    """Returns the error of an archive of `packed` bytes that expands to `size` or more."""
    return UserError(
        f'{source}: {packed:,} bytes that expand to {size:,} or more, expected at most '
        f'{expanded_limit(packed):,}; if you trust it, set {LIMIT} to the GiB that it may take'
    )


class Expanding(io.RawIOBase):
    """A decompressed stream that raises UserError once it exceeds `expanded_limit`.

    Args:
      file: stream of the decompressed bytes.
      source: the archive, for the message.
      packed: its size in bytes.
    """

    def __init__(self, file: IO[bytes], source: str, packed: int) -> None:
        super().__init__()
        self._file, self._source, self._packed = file, source, packed
        self._limit, self._done = expanded_limit(packed), 0

    def read(self, size: int = -1) -> bytes:
        """Returns the next `size` bytes, or the rest."""
        left = self._limit - self._done
        data = self._file.read(min(size, left + 1) if size >= 0 else left + 1)
        self._done += len(data)
        if self._done > self._limit:
            raise too_large(self._source, self._done, self._packed)
        return data

    def readable(self) -> bool:
        """Returns True."""
        return True

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()


def open_zip(
    file: str | Path | IO[bytes], damaged: Callable[[object], UserError]
) -> zipfile.ZipFile:
    """Opens a zip archive.

    Args:
      damaged: makes the error for a damaged archive from the reason.

    Raises:
      UserError: the file is not a zip archive, an entry has no name, or two have the same name.
      OSError: the file cannot be opened.
    """
    try:
        archive = zipfile.ZipFile(file)
    except ERRORS as error:
        raise damaged(error) from None
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: zipfile seeks to before the file's start
            raise
        raise damaged(error) from None
    names = collections.Counter(info.filename for info in archive.infolist())
    reason = ''
    if '' in names:
        reason = 'it has an entry without a name'
    elif len(names) < names.total():
        twice = next(name for name, count in names.items() if count > 1)
        reason = f'it has two entries of one name, {shown(twice)}'
    if reason:
        archive.close()
        raise damaged(reason)
    return archive


def check_expanded(infos: Iterable[zipfile.ZipInfo], source: str, packed: int) -> None:
    """Checks the expanded size that the entries of a zip archive state.

    Args:
      source: the archive, for the message.
      packed: its size in bytes.

    Raises:
      UserError: the entries expand to more than `expanded_limit`.
    """
    total = sum(info.file_size for info in infos)
    if total > expanded_limit(packed):
        raise too_large(source, total, packed)


def open_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    """Opens a stored or deflated entry; decompressors of other methods do not bound their output.

    Raises:
      ValueError: the entry has another method of compression, or is encrypted.
    """
    if info.flag_bits & ENCRYPTED:
        raise ValueError(f'{shown(info.filename)} is encrypted')
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(
            f'{shown(info.filename)} is compressed by method {info.compress_type}, '
            'expected stored or deflate'
        )
    return archive.open(info)


class NpyHeader(NamedTuple):
    """The header of a .npy.

    Fields:
      shape, dtype: shape and type of the array.
      fortran: True if the array is in Fortran order.
      size: bytes of the header.
    """

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype
    size: int

    @property
    def bytes(self) -> int:
        """Bytes of header and array."""
        return self.size + math.prod(self.shape) * self.dtype.itemsize


def npy_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NpyHeader:
    """Reads the header of a .npy in an .npz.

    Raises:
      ValueError: it is damaged; other exceptions of `ERRORS` are possible.
    """
    with open_entry(archive, info) as file:
        return npy_header_of(file.read(NPY_START), plain(info.filename.removesuffix('.npy')))


def npy_header_of(data: bytes, name: str) -> NpyHeader:
    """Reads the header in the first `NPY_START` bytes of a .npy; raises as `npy_header`."""
    start = io.BytesIO(data)
    version = np.lib.format.read_magic(start)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f'{name}: expected .npy format 1 to 3, found {version}')
    read = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    try:
        shape, fortran, dtype = read(start)
    except Exception as error:  # numpy parses it as Python's source, which raises nearly everything
        raise ValueError(f'{name}: the header is damaged ({type(error).__name__})') from None
    if any(not isinstance(side, int) or side < 0 for side in shape):
        raise ValueError(f'{name}: expected sizes of 0 or more, found shape {shown(shape)}')
    return NpyHeader(tuple(int(side) for side in shape), bool(fortran), dtype, start.tell())


def read_npy(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Returns the array of a .npy in an .npz: numbers or text, never a pickled object.

    Call `check_expanded` before.

    Raises:
      ValueError: it is damaged or has another type; other exceptions of `ERRORS` are possible.
    """
    name, header = plain(info.filename.removesuffix('.npy')), npy_header(archive, info)
    if header.dtype.kind not in 'biufcSU' or header.dtype.itemsize == 0:
        raise ValueError(f'{name}: expected numbers or text, found {header.dtype}')
    if len(header.shape) > 32 or header.bytes != info.file_size:
        raise ValueError(
            f'{name}: shape {shown(header.shape)} of {header.dtype} takes '
            f'{shown(header.bytes - header.size)} bytes, found {info.file_size - header.size}'
        )
    with open_entry(archive, info) as file:
        data = bytearray(file.read(info.file_size))
    values = np.frombuffer(data, header.dtype, offset=header.size)
    return values.reshape(header.shape, order='F' if header.fortran else 'C')
