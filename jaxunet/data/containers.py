"""Containers of image files: a folder, a .zip or (in `tar.py`) a .tar.

A container lists its files and reads any of them by number, from any thread or process.
"""

from __future__ import annotations

import abc
import bz2
import os
import stat
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZIP_STORED

import numpy as np

from jaxunet.data.pixels import BadImage
from jaxunet.data.read_at import ReadAt, ReadMany
from jaxunet.data.rules import MAGIC_BYTES, is_hidden, why_not_image
from jaxunet.runtime import archives
from jaxunet.runtime.errors import UserError, printable
from jaxunet.runtime.untrusted import one_line

MAX_FILE_BYTES = 2**30  # most bytes of one image file
# Links can lead to one folder by endlessly many paths. Limit on the paths to folders already seen.
MAX_AGAIN = 10_000

Identity = tuple[int, int]  # device and number of a folder


class Container(abc.ABC):
    """Named files, in the container's own order, without those that `is_hidden`.

    Attributes:
      path: the folder or archive.
      shown: its name in messages.
      names: path of each file inside the container.
      unreadable: number -> reason, for files that are listed but can never be read.
      sharded: the first part of each name is the archive that holds the file.
    """

    sharded = False

    def __init__(self, path: Path, shown: str = '') -> None:
        self.path = path
        self.shown = shown or str(path)
        self.names: list[str] = []
        self.unreadable: dict[int, str] = {}

    @abc.abstractmethod
    def start(self, i: int) -> tuple[bytes, int]:
        """Returns the first MAGIC_BYTES bytes of file `i` (all of a shorter one) and its size.

        Raises:
          BadImage: the file cannot be read.
        """

    @abc.abstractmethod
    def read(self, i: int) -> bytes:
        """Returns the whole content of file `i`.

        Raises:
          BadImage: the file cannot be read, or exceeds MAX_FILE_BYTES.
          UserError: the archive cannot be read.
        """

    def __len__(self) -> int:
        return len(self.names)

    def check_size(self, i: int, size: int) -> None:
        """Raises `BadImage` if file `i` has more bytes than MAX_FILE_BYTES."""
        if size > MAX_FILE_BYTES:
            raise BadImage(self.describe(i), too_large(size))

    def describe(self, i: int) -> str:
        """Returns the name of file `i` for a message."""
        return f'{self.shown}: {printable(self.names[i])}'

    def reason(self, i: int) -> str:
        """Returns why file `i` is no image; '' if it is one."""
        name = self.names[i] if self.names else ''
        try:
            return self.unreadable.get(i) or why_not_image(*self.start(i), name)
        except BadImage as error:
            return error.reason


def too_large(size: int) -> str:
    """Returns why a file of so many bytes is not read."""
    return f'{size} bytes, more than the {MAX_FILE_BYTES} accepted for one image'


def path_order(name: str) -> tuple[str, ...]:
    """Returns a sort key: depth first, files and folders of one folder together by name."""
    if name[:1] != '/' and './' not in name and '//' not in name:  # eight times as fast
        return tuple(name.split('/'))
    return PurePosixPath(name).parts


class Folder(Container):
    """The files below a folder, at any depth; links are followed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        seen = set[Identity]()
        again = 0
        todo: list[tuple[str, tuple[Identity, ...]]] = [('', ())]  # path, the folders above
        while todo:
            below, above = todo.pop()
            folder = self.path / below
            try:
                info = folder.stat()
                this = info.st_dev, info.st_ino
                if this in above:
                    continue  # a link to a folder above
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError as error:
                raise UserError(
                    f'{folder}: the folder cannot be listed: {error.strerror}; '
                    'check its permissions'
                ) from None
            again += this in seen
            seen.add(this)
            if again > MAX_AGAIN:
                raise UserError(
                    f'{path}: links lead to the same folders by more than {MAX_AGAIN:,} paths, '
                    f'such as {printable(below)}; remove such links'
                )
            inside = []
            for entry in entries:
                if is_hidden(entry.name):
                    continue
                name = f'{below}/{entry.name}' if below else entry.name
                reason = ''
                try:
                    if entry.is_dir():
                        inside.append((name, (*above, this)))
                        continue
                    if not entry.is_file():
                        reason = 'broken link' if entry.is_symlink() else 'not a regular file'
                except OSError as error:  # a link to itself, or through a folder that is closed
                    reason = f'broken link: {error.strerror}'
                if reason:
                    self.unreadable[len(self.names)] = reason
                self.names.append(name)
            todo += reversed(inside)

    def describe(self, i: int) -> str:
        """Returns the path of file `i`."""
        return printable(str(self.path / self.names[i]))

    def start(self, i: int) -> tuple[bytes, int]:
        """Reads the first bytes of file `i`; see `Container.start`."""
        with self._open(i) as file:
            return self._content(i, file, MAGIC_BYTES), os.fstat(file.fileno()).st_size

    def read(self, i: int) -> bytes:
        """Reads file `i`; see `Container.read`."""
        with self._open(i) as file:
            size = os.fstat(file.fileno()).st_size
            self.check_size(i, size)
            return self._content(i, file, size)

    def _content(self, i: int, file: BinaryIO, size: int) -> bytes:
        try:
            return file.read(size)
        except OSError as error:
            raise BadImage(self.describe(i), f'cannot be read: {error.strerror}') from None

    def _open(self, i: int) -> BinaryIO:
        try:
            return open(self.path / self.names[i], 'rb')
        except OSError as error:
            raise BadImage(self.describe(i), f'cannot be opened: {error.strerror}') from None


class Spans(Container):
    """Files that lie in one piece, as they are, in one or several other files.

    Args:
      files: these other files.

    Attributes:
      spans: int64 (names, 3): the number of the other file, the first byte and the size of each.
    """

    def __init__(self, path: Path, files: Sequence[Path], shown: str = '') -> None:
        super().__init__(path, shown)
        self._bytes = ReadMany(files, [shown or str(file) for file in files])
        self.spans = np.empty((0, 3), np.int64)

    def start(self, i: int) -> tuple[bytes, int]:
        """Reads the first bytes of file `i`; see `Container.start`."""
        file, offset, size = self.spans[i].tolist()
        return self._bytes(file, offset, min(size, MAGIC_BYTES)), size

    def read(self, i: int) -> bytes:
        """Reads file `i`; see `Container.read`."""
        file, offset, size = self.spans[i].tolist()
        self.check_size(i, size)
        data = self._bytes(file, offset, size)
        if len(data) < size:
            raise BadImage(
                self.describe(i),
                f'the archive ends at byte {offset + len(data)}, expected {offset + size}',
            )
        return data


class ZipArchive(Container):
    """A .zip with stored, deflated or bzip2-compressed members; a backslash in a name is a slash.

    Raises:
      UserError: not a readable zip archive.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._bytes = ReadAt(path, self.shown)

        def damaged(error: object) -> UserError:
            return UserError(
                f'{path}: not a readable zip archive: {one_line(error)}; '
                'it may be truncated, copy or download it again'
            )

        with archives.open_zip(path, damaged) as archive:
            everything = archive.infolist()
        # Some programs on Windows write its own separator, against the format.
        slashed = {m: m.filename.replace('\\', '/') for m in everything}
        members = [m for m, name in slashed.items() if name[-1:] != '/' and not is_hidden(name)]
        archives.check_expanded(members, str(path), path.stat().st_size)
        try:
            self._headers = np.array([m.header_offset for m in members], np.int64)
            self._sizes = np.array(
                [(m.compress_size, m.file_size, m.CRC) for m in members], np.int64
            ).reshape(-1, 3)
        except OverflowError as error:
            raise damaged(error) from None
        self.names = [slashed[m] for m in members]
        self._methods = np.array([m.compress_type for m in members], np.int32)
        for i, member in enumerate(members):
            if member.flag_bits & 1:
                self.unreadable[i] = 'encrypted'
            elif member.compress_type not in (ZIP_STORED, ZIP_DEFLATED, ZIP_BZIP2):
                self.unreadable[i] = (
                    f'compressed by method {member.compress_type} '
                    '(expected stored, deflate or bzip2)'
                )
            elif stat.S_ISLNK(member.external_attr >> 16):
                self.unreadable[i] = 'symbolic link'

    def _offset(self, i: int) -> int:
        """Returns the first byte of a member's data, after its local header of variable length."""
        at = int(self._headers[i])
        header = self._bytes(at, 30)
        if len(header) < 30 or header[:4] != b'PK\x03\x04':
            raise BadImage(
                self.describe(i), f'no local file header at byte {at}; the archive is damaged'
            )
        name, extra = struct.unpack_from('<HH', header, 26)
        return at + 30 + name + extra

    def start(self, i: int) -> tuple[bytes, int]:
        """Decompresses the first bytes of member `i`; see `Container.start`."""
        size = int(self._sizes[i, 1])
        if self._methods[i] == ZIP_BZIP2:
            return self.read(i)[:MAGIC_BYTES], size  # bzip2 decompresses whole blocks
        data = self._bytes(self._offset(i), min(int(self._sizes[i, 0]), 4096))
        return self._inflate(i, data, MAGIC_BYTES), size

    def read(self, i: int) -> bytes:
        """Decompresses member `i` and checks its size and CRC; see `Container.read`."""
        packed, size, crc = (int(v) for v in self._sizes[i])
        self.check_size(i, max(size, packed))
        offset = self._offset(i)
        data = self._bytes(offset, packed)
        if len(data) < packed:
            raise BadImage(
                self.describe(i),
                f'the archive ends at byte {offset + len(data)}, '
                f'expected {packed} bytes from byte {offset}',
            )
        # Ask for one byte more than announced, to notice a longer member.
        data = self._inflate(i, data, size + 1)
        if len(data) != size:
            raise BadImage(
                self.describe(i),
                f'decompresses to {len(data)} bytes, expected {size}; the archive is damaged',
            )
        if zlib.crc32(data) != crc:
            raise BadImage(
                self.describe(i),
                f'checksum {zlib.crc32(data):08x}, expected {crc:08x}; the archive is damaged',
            )
        return data

    def _inflate(self, i: int, data: bytes, most: int) -> bytes:
        try:
            if self._methods[i] == ZIP_DEFLATED:
                return zlib.decompressobj(-15).decompress(data, most)
            if self._methods[i] == ZIP_BZIP2:
                return bz2.BZ2Decompressor().decompress(data, most)
        except (zlib.error, OSError) as error:
            raise BadImage(self.describe(i), f'cannot be decompressed: {one_line(error)}') from None
        return data[:most]
