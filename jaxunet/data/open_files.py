"""Opens files of images that are read at random: folders, archives, shards, tables, databases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jaxunet.data import cifar10, lmdb_rows
from jaxunet.data.arrow import ArrowRows
from jaxunet.data.containers import Container, Folder, ZipArchive
from jaxunet.data.parquet import ParquetRows
from jaxunet.data.rules import MAGIC_BYTES
from jaxunet.data.shards import Shards, check_kind, divided, named_files
from jaxunet.data.tar import TarArchive, compression
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.paths import why_missing
from jaxunet.runtime.untrusted import check_fetched

EMBEDDED = ('digits:', *cifar10.BATCHES)
TAR = ('.tar', '.tar.gz', '.tgz', '.tar.xz', '.txz')
FORMS = (
    'a folder of images, .zip, .tar, .tar.gz, .tar.xz, x-{00..99}.tar, .parquet, .arrow, LMDB, '
    '.npz, .npy, unet.cu .bin or .bin.gz, digits:, cifar10: or cifar10_test:'
)
# Kinds of files of which a set may have several.
DIVIDED: dict[str, Callable[[Path, Sequence[Path]], Container]] = {
    '.tar': Shards,
    '.parquet': ParquetRows,
    '.arrow': ArrowRows,
}
TABLES = ('.parquet', '.arrow')


def open_container(path: Path) -> Container | None:
    """Opens the image files of a folder, of archives that are read at random, or of tables.

    Args:
      path: a folder, a file, or files with braces, `*` or `?` (`jaxunet.data.shards`).

    Returns None for files of any other kind.

    Raises:
      UserError: a missing or wrong file.
    """
    files = _complete(named_files(path))
    if lmdb_rows.is_database(path):
        return lmdb_rows.LmdbRows(path)
    if path.is_dir():
        folder = Folder(path)
        for suffix, opener in DIVIDED.items():
            if inside := divided(folder, suffix):
                return opener(path, _complete(inside))
        return folder
    name = path.name.lower()
    if files != [path] or name.endswith(TABLES):
        check_kind(path, files, tuple(DIVIDED))
        return DIVIDED[files[0].suffix.lower()](path, files)
    if not path.is_file() or not path.stat().st_size:
        return None
    if name.endswith('.zip'):
        archive = ZipArchive(path)
        if any(name in ('images.npy', 'arr_0.npy') for name in archive.names):
            raise UserError(
                f'{path}: holds numpy arrays, so it is an .npz with the name of a .zip; rename it'
            )
        return archive
    return TarArchive(path) if name.endswith(TAR) and not compression(path) else None


def _complete(files: list[Path]) -> list[Path]:
    """Returns the files; raises `UserError` if one is missing, or a pointer of Git LFS."""
    for each in files:
        check_exists(each)
        if each.is_file():
            with each.open('rb') as file:
                check_fetched(file.read(MAGIC_BYTES), each)
    return files


def check_exists(path: Path) -> None:
    """Raises `UserError` with similar names if there is no such file or folder."""
    if path.exists():
        return
    if why := why_missing(path):
        raise UserError(f'{path}: no such file or folder{why}')
    parent = path
    while not parent.exists() and parent != parent.parent:
        missing, parent = parent, parent.parent
    siblings = [p.name for p in parent.iterdir()] if parent.is_dir() else []
    hint = near_misses(missing.name, siblings) or near_misses(str(path), EMBEDDED)
    where = 'the current folder' if parent == Path() else parent
    raise UserError(
        f'{path}: no such file or folder: {where} has no "{missing.name}"'
        f'{hint or f"; expected {FORMS}"}'
    )
