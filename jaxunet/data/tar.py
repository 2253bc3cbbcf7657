"""Tar archives: a plain one is read at random, a compressed one (.tar.gz, .tar.xz) from front to back.

Python's tarfile takes an archive that is cut off or damaged in the middle for one that ends there; `TarReader` tells the difference.
"""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxunet.data.containers import MAX_FILE_BYTES, Archive
from jaxunet.data.pixels import MAGIC_BYTES, BadImage, printable, told
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.progress import progress_bar

GZIP, XZ = b'\x1f\x8b', b'\xfd7zXZ\x00'
ERRORS = (
    tarfile.TarError,
    EOFError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    ValueError,
    OverflowError,
)


def compression(path: Path) -> str:
    """'gz', 'xz' or '' (none), by the file's first bytes."""
    with path.open('rb') as file:
        start = file.read(len(XZ))
    return 'gz' if start.startswith(GZIP) else 'xz' if start == XZ else ''


def open_decompressed(path: Path) -> IO[bytes]:
    """The file's content, decompressed while it is read."""
    kind = compression(path)
    opener: Any = {'gz': gzip.open, 'xz': lzma.open, '': open}[kind]
    return opener(path, 'rb')


def decompress(path: Path, target: Path) -> None:
    """Writes the plain tar of a compressed one, with a progress bar over the compressed bytes. OSErrors are those of writing.

    Raises:
      UserError: the archive is damaged.
    """
    with (
        path.open('rb') as packed,
        target.open('wb') as plain,
        progress_bar(total=path.stat().st_size, unit='B', unit_scale=True) as bar,
    ):
        bar.set_description(f'unpacking {path.name}')
        opener: Any = {'gz': gzip.open, 'xz': lzma.open}[compression(path)]
        unpacked = opener(packed, 'rb')
        while True:
            try:
                chunk = unpacked.read(2**22)
            except ERRORS as error:
                raise _damaged(str(path), compression(path), error) from None
            if not chunk:
                return
            plain.write(chunk)
            bar.update(packed.tell() - bar.n)


def _damaged(name: str, kind: str, error: object) -> UserError:
    suffix = f'.tar.{kind}' if kind else '.tar'
    return UserError(
        f'{name}: not a readable {suffix} archive: {told(error)}; it may be truncated, copy or download it again'
    )


class TarReader:
    """`with TarReader(path, self.shown) as members`: iterates the members of a tar; damage becomes a UserError that tells where.

    `read` gives the content of the member that was reached last.
    """

    def __init__(self, path: Path, shown: str = '') -> None:
        self.path, self.shown = path, shown or str(path)
        self.compression = compression(path)
        self._member: tarfile.TarInfo | None = None
        self._content: IO[bytes] | None = None
        self._left = 0

    def __enter__(self) -> TarReader:
        self._file = open_decompressed(self.path)
        stream: Any = _Forward(self._file) if self.compression else self._file
        self._stream = stream
        try:
            self._tar: Any = tarfile.TarFile(fileobj=stream)
        except ERRORS as error:
            self._file.close()
            raise self._damaged(error) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> TarReader:
        return self

    def __next__(self) -> tarfile.TarInfo:
        try:
            member = self._tar.next()
            if member is None:
                self._check_end()
                raise StopIteration
        except ERRORS as error:
            raise self._damaged(error) from None
        self._tar.members.clear()  # tarfile would keep every one
        return member

    def _check_end(self) -> None:
        """An archive ends with a block of zeros, or at least at the end of the file."""
        if self.compression:
            header = self._stream.last
            while self._file.read(2**20):
                pass  # to the end, where the compressor's checksum is compared
        else:
            self._file.seek(self._tar.offset)
            header = self._file.read(tarfile.BLOCKSIZE)
        if header.strip(b'\x00') or 0 < len(header) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError(f'no valid member header at byte {self._tar.offset}')

    def read(self, member: tarfile.TarInfo, size: int) -> bytes:
        """The next `size` bytes of a regular file, or what is left of it."""
        try:
            if member is not self._member:
                self._member, self._content = member, self._tar.extractfile(member)
                self._left = member.size
            size = min(size, self._left)
            data = self._content.read(size) if self._content is not None else b''
        except ERRORS as error:
            raise self._damaged(error) from None
        if len(data) < size:
            raise self._damaged(
                f'{printable(member.name)} ends early, expected {member.size} bytes'
            )
        self._left -= size
        return data

    def _damaged(self, error: object) -> UserError:
        return _damaged(self.shown, self.compression, error)


class _Forward:
    """A compressed stream as tarfile needs it: it skips ahead, and at times steps one byte back, which must not decompress anew."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._position = 0
        self._back = 0  # 0 or 1
        self.last = b''  # what the last read gave

    def tell(self) -> int:
        return self._position - self._back

    def seek(self, target: int) -> int:
        if target == self._position - 1 and self.last:
            self._back = 1
            return target
        if target < self._position:
            raise io.UnsupportedOperation(
                f'stepping back from byte {self._position} to {target} of a compressed archive'
            )
        self._back = 0
        while self._position < target:
            skipped = self._file.read(min(target - self._position, 2**20))
            if not skipped:
                break
            self._position, self.last = self._position + len(skipped), skipped
        return self._position

    def read(self, size: int) -> bytes:
        again, self._back = self.last[-1:] * self._back, 0
        data = again + self._file.read(size - len(again))
        self._position += len(data) - len(again)
        self.last = data
        return data


class TarArchive(Archive):
    """A plain .tar."""

    def __init__(self, path: Path, shown: str = '') -> None:
        super().__init__(path, shown)
        spans = []
        size = path.stat().st_size
        with TarReader(path, self.shown) as members:
            for member in members:
                if member.isdir():
                    continue
                self.names.append(member.name)
                spans.append((member.offset_data, member.size))
                if not member.isreg() or member.sparse is not None:
                    self.unreadable[member.name] = (
                        'link' if member.islnk() or member.issym() else 'not a regular file'
                    )
                elif member.offset_data + member.size > size:
                    raise UserError(
                        f'{self.shown}: truncated in {printable(member.name)}: the file ends at byte {size}, expected '
                        f'{member.offset_data + member.size}; copy or download it again'
                    )
        self._spans = np.array(spans, np.int64).reshape(-1, 2)

    def start(self, i: int) -> tuple[bytes, int]:
        offset, size = (int(v) for v in self._spans[i])
        return self._bytes(offset, min(size, MAGIC_BYTES)), size

    def read(self, i: int) -> bytes:
        offset, size = (int(v) for v in self._spans[i])
        if size > MAX_FILE_BYTES:
            raise BadImage(
                self.describe(i),
                f'{size} bytes, more than the {MAX_FILE_BYTES} accepted for one image',
            )
        data = self._bytes(offset, size)
        if len(data) < size:
            raise BadImage(
                self.describe(i),
                f'the archive ends at byte {offset + len(data)}, expected {offset + size}',
            )
        return data
