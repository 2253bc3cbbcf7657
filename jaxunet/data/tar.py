"""Tar archives: a plain one is read at random, a compressed one (.tar.gz, .tar.xz) front to back.

Python's tarfile silently ends at the damage of a truncated or damaged archive; `TarReader` raises
an error.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

import numpy as np

from jaxunet.data.containers import Spans
from jaxunet.data.rules import is_hidden
from jaxunet.runtime import archives
from jaxunet.runtime.errors import UserError, printable
from jaxunet.runtime.progress import progress_bar
from jaxunet.runtime.untrusted import one_line

OPENERS: dict[str, Callable[..., object]] = {'gz': gzip.open, 'xz': lzma.open, '': open}
GZIP, XZ = b'\x1f\x8b', b'\xfd7zXZ\x00'
MAGIC_AT = 257  # place of 'ustar' in a header
MAX_HEADER = 2**18  # bytes that describe one member: long names, attributes, sparse maps
MAX_SIZE = 2**62  # bytes of one member
MAX_SHARED = 64  # attributes that a header gives to all members after it
# tarfile's patterns take quadratic time over digits.
DIGITS = re.compile(rb'[0-9]{256}')
OCTAL = re.compile(rb'[ ]*([0-7]+)[ \0]*')
POSIX, GNU = b'ustar\x0000', b'ustar  \x00'
TIMES = re.compile(rb'(?:\d+ [acm]time=[\d.]+\n)+')  # attributes of a member

# Exceptions that tarfile and the decompressors raise on a damaged archive.
ERRORS = (*archives.ERRORS, tarfile.TarError, OSError)

# Name, first byte and size of a member, and why it cannot be read.
Member = tuple[str, int, int, str]


def compression(path: Path) -> str:
    """Returns 'gz', 'xz' or '' (none), by the file's first bytes."""
    with path.open('rb') as file:
        start = file.read(len(XZ))
    return 'gz' if start.startswith(GZIP) else 'xz' if start == XZ else ''


def open_decompressed(path: Path) -> IO[bytes]:
    """Opens a file for reading; its content is decompressed as it is read.

    Reading raises UserError where the content exceeds `archives.expanded_limit`.
    """
    kind = compression(path)
    file = cast(IO[bytes], OPENERS[kind](path, 'rb'))
    if not kind:
        return file
    return cast(IO[bytes], archives.Expanding(file, str(path), path.stat().st_size))


def decompress(path: Path, target: Path) -> None:
    """Decompresses a .tar.gz or .tar.xz into a plain tar, with a progress bar.

    Raises:
      UserError: the archive is damaged, or expands to more than `archives.expanded_limit`.
      OSError: `target` cannot be written.
    """
    size = path.stat().st_size
    with (
        path.open('rb') as packed,
        target.open('wb') as plain,
        progress_bar(total=size, unit='B', unit_scale=True) as bar,
    ):
        bar.set_description(f'unpacking {path.name}')
        kind = compression(path)
        unpacked = archives.Expanding(cast(IO[bytes], OPENERS[kind](packed, 'rb')), str(path), size)
        while True:
            try:
                chunk = unpacked.read(2**22)
            except ERRORS as error:
                raise _damaged(str(path), kind, error) from None
            if not chunk:
                return
            plain.write(chunk)
            bar.update(packed.tell() - bar.n)


def _damaged(name: str, kind: str, error: object) -> UserError:
    suffix = f'.tar.{kind}' if kind else '.tar'
    return UserError(
        f'{name}: not a readable {suffix} archive: {one_line(error)}; '
        'it may be truncated, copy or download it again'
    )


class TarReader:
    """Iterates over the members of a tar, as in `with TarReader(path) as members`.

    `read` returns the content of the current member. Damage raises a UserError that says where.

    Args:
      shown: the archive's name in messages; '' = its path.
    """

    def __init__(self, path: Path, shown: str = '') -> None:
        self.path, self.shown = path, shown or str(path)
        self.compression = compression(path)
        self._member: tarfile.TarInfo | None = None
        self._content: IO[bytes] | None = None
        self._left = 0
        self._started = False

    def __enter__(self) -> TarReader:
        self._file = open_decompressed(self.path)
        self._stream = _Forward(self._file)
        self._guard = _Guard(cast(IO[bytes], self._stream) if self.compression else self._file)
        try:
            self._tar = tarfile.TarFile(fileobj=cast(IO[bytes], self._guard))
        except ERRORS as error:
            self._file.close()
            raise self._damaged(error) from None
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> TarReader:
        return self

    def __next__(self) -> tarfile.TarInfo:
        try:
            # The constructor has read the first member, and `next` gives it once more.
            before = self._tar.offset if self._started else -1
            self._started = True
            with self._guard:
                member = self._tar.next()
            if member is None:
                self._check_end()
            else:
                self._check_member(member, before)
        except ERRORS as error:
            raise self._damaged(error) from None
        if member is None:
            raise StopIteration
        self._tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep them all
        return member

    def _check_member(self, member: tarfile.TarInfo, before: int) -> None:
        """Checks that a member has a possible size, and that the next one lies behind it.

        Args:
          before: place of the member's header.
        """
        if not 0 <= member.size <= MAX_SIZE or self._tar.offset <= before:
            raise tarfile.ReadError(
                f'{printable(member.name[:100])} claims an impossible size of {member.size} bytes'
            )
        shared = self._tar.pax_headers
        if len(shared) > MAX_SHARED or any(name.startswith('GNU.sparse') for name in shared):
            raise tarfile.ReadError('a header gives too much to all members after it')

    def _check_end(self) -> None:
        """Checks that the archive ends with a block of zeros, or at the end of the file.

        Raises:
          UserError: another archive follows.
          tarfile.ReadError: damage.
        """
        if self.compression:
            header = self._stream.last
        else:
            self._file.seek(self._tar.offset)
            header = self._file.read(tarfile.BLOCKSIZE)
        behind = b''  # from the first block behind the end that is not empty
        while chunk := self._file.read(2**20):
            if not behind:
                blank = len(chunk) - len(chunk.lstrip(b'\x00'))
                behind = chunk[blank - blank % tarfile.BLOCKSIZE :]
            elif not self.compression:  # else to the end, where the checksum is
                break
        if header.strip(b'\x00') or 0 < len(header) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError(f'no valid member header at byte {self._tar.offset}')
        if behind[MAGIC_AT : MAGIC_AT + 5] == b'ustar':
            raise UserError(
                f'{self.shown}: another archive begins behind the end of this one, as where cat '
                'has joined two, and most programs leave it out; unpack both, or join them with '
                'tar --concatenate'
            )

    def read(self, member: tarfile.TarInfo, size: int) -> bytes:
        """Returns the next `size` bytes of a regular file, or the rest of it.

        Raises:
          UserError: the archive is damaged.
        """
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


class _Guard:
    """The file that tarfile reads; as a context, it bounds what one header makes tarfile read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.tell, self.seek = file.tell, file.seek
        self._left: int | None = MAX_HEADER  # the constructor of TarFile reads a header

    def __enter__(self) -> None:
        self._left = MAX_HEADER

    def __exit__(self, *_: object) -> None:
        self._left = None

    def read(self, size: int) -> bytes:
        """Returns the next `size` bytes, or the rest. Raises tarfile.ReadError: too many."""
        if size < 0 or (self._left is not None and size > self._left):
            raise tarfile.ReadError(
                f'a header of more than {MAX_HEADER} bytes, or of a negative size'
            )
        data = self._file.read(size)
        if self._left is not None:
            self._left -= max(size, 1)  # also at the end, where tarfile may read for ever
            if DIGITS.search(data):
                raise tarfile.ReadError('a header with an endless number')
        return data


class _Forward:
    """A compressed stream that skips ahead and steps one byte back.

    tarfile needs both; stepping back must not decompress again from the start.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._position = 0
        self._back = 0  # bytes stepped back, 0 or 1
        self.last = b''  # result of the last read

    def tell(self) -> int:
        """Returns the position in the decompressed content."""
        return self._position - self._back

    def seek(self, target: int) -> int:
        """Moves ahead, or one byte back. Raises io.UnsupportedOperation for a larger step back."""
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
        """Returns the next `size` bytes, or the rest."""
        again, self._back = self.last[-1:] * self._back, 0
        data = again + self._file.read(size - len(again))
        self._position += len(data) - len(again)
        self.last = data
        return data


def why_unreadable(member: tarfile.TarInfo) -> str:
    """Returns why a member that is no folder has no content of its own; '' if it has."""
    if member.isreg() and member.sparse is None:
        return ''
    return 'link' if member.islnk() or member.issym() else 'not a regular file'


class TarArchive(Spans):
    """A plain .tar.

    Raises:
      UserError: not a readable tar, or a truncated one.
    """

    def __init__(self, path: Path, shown: str = '') -> None:
        super().__init__(path, [path], shown)
        members = _plain_members(path)
        if members is None:
            members = self._members()
        members = [each for each in members if not is_hidden(each[0])]
        for i, (name, _, _, why) in enumerate(members):
            self.names.append(name)
            if why:
                self.unreadable[i] = why
        self.spans = np.array([(0, each[1], each[2]) for each in members], np.int64).reshape(-1, 3)

    def _members(self) -> list[Member]:
        """Returns the members of any tar."""
        found = []
        size = self.path.stat().st_size
        with TarReader(self.path, self.shown) as members:
            for member in members:
                if member.isdir():
                    continue
                why = why_unreadable(member)
                if not why and member.offset_data + member.size > size:
                    raise UserError(
                        f'{self.shown}: truncated in {printable(member.name)}: the file ends at '
                        f'byte {size}, expected {member.offset_data + member.size}; '
                        'copy or download it again'
                    )
                found.append((member.name, member.offset_data, member.size, why))
        return found


def _plain_members(path: Path) -> list[Member] | None:
    """Returns the members of a tar that has only short names, small files and folders.

    None if it has anything else or damage, which `TarReader`, ten times slower, reads or reports.
    """
    found: list[Member] = []
    with path.open('rb') as file:
        size = os.fstat(file.fileno()).st_size
        while True:
            header = file.read(tarfile.BLOCKSIZE)
            if header.count(0) == tarfile.BLOCKSIZE:  # the end, and at most a record of zeros
                rest = file.read(tarfile.RECORDSIZE + 1)
                return found if len(rest) <= tarfile.RECORDSIZE and not any(rest) else None
            fields = _plain_header(header)
            if fields is None:
                return None
            name, kind, length = fields
            start = file.tell()
            padded = -(-length // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            if start + length > size:
                return None
            if kind == b'x':
                if length > MAX_HEADER or not TIMES.fullmatch(file.read(padded)[:length]):
                    return None
                continue
            if kind == b'0' and name[-1:] != '/':
                found.append((name, start, length, ''))
            elif kind != b'5' or length:
                return None
            file.seek(start + padded)


def _plain_header(header: bytes) -> tuple[str, bytes, int] | None:
    """Returns the name, type and size in a member's header; None if it is not of the usual form."""
    size, total = (OCTAL.fullmatch(header[a:b]) for a, b in ((124, 136), (148, 156)))
    kind, magic, prefix = header[156:157], header[257:265], header[345:500].partition(b'\0')[0]
    if (
        size is None
        or total is None
        or magic not in ((POSIX,) if prefix else (POSIX, GNU))
        or int(total[1], 8) != sum(header) - sum(header[148:156]) + 256
        or kind not in (b'0', b'5', b'x')
    ):
        return None
    name = header[:100].partition(b'\0')[0]
    return os.fsdecode(prefix + b'/' + name if prefix else name), kind, int(size[1], 8)
