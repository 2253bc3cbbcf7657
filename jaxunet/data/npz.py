"""`.npz` files of images: our own, and guided-diffusion's sample files (`arr_0`, `arr_1`); `.npy`.

Arrays: `images` (or `arr_0`) of uint8, uint16 or floats, or other integers with `data.range`,
(n, height, width, channels), or (n, height, width) for grey; optionally `labels` (or `arr_1`),
integers or names (n,), and `class_names`, strings. A `.npy` has the images alone. Nothing is
unpickled. Uncompressed images in C order are read row by row, so a set may exceed memory.
"""

from __future__ import annotations

import contextlib
import math
import struct
import zipfile
from pathlib import Path

import numpy as np

from jaxunet.data.crop import Shape
from jaxunet.data.fitting import MAX_FLAT
from jaxunet.data.reading import PLAIN, Reading
from jaxunet.data.rules import by_class, spelled
from jaxunet.data.source import MAX_MEMORY, ArraySource, FileArray, no_labels
from jaxunet.runtime import archives
from jaxunet.runtime.class_names import class_name
from jaxunet.runtime.errors import UserError, listed, near_misses
from jaxunet.runtime.untrusted import one_line, plain

NAMES = {
    'images': ('images', 'arr_0'),
    'labels': ('labels', 'arr_1'),
    'class_names': ('class_names',),
}


def open_npz(path: Path, image_shape: Shape, reading: Reading = PLAIN) -> ArraySource:
    """Opens the images of a `.npz`.

    Args:
      image_shape: (height, width, channels) that `load` returns.
      reading: how the values become pixels.

    Raises:
      UserError: a damaged file, arrays of other names, types or shapes, or labels out of range.
    """

    def damaged(error: object) -> UserError:
        return UserError(
            f'{path}: not a readable .npz file: {one_line(error)}; '
            'it may be truncated, copy or write it again'
        )

    try:
        with archives.open_zip(path, damaged) as archive:
            images = _open_images(path, archive)
            labels = _read_small(path, archive, 'labels')
            names = _read_small(path, archive, 'class_names')
    except (*archives.ERRORS, OSError) as error:
        raise damaged(error) from None
    numbers, texts = check_labels(path, images.shape[0], labels, names)
    return ArraySource(str(path), images, image_shape, numbers, texts, reading)


def open_npy(path: Path, image_shape: Shape, reading: Reading = PLAIN) -> ArraySource:
    """Opens the images of a `.npy`, which has no labels; arguments as for `open_npz`.

    Raises:
      UserError: a damaged file, or an array of another type or shape.
    """
    try:
        header = _npy_header(path)
    except (*archives.ERRORS, EOFError) as error:
        raise UserError(
            f'{path}: not a readable .npy file: {one_line(error)}; copy or write it again'
        ) from None
    _check_images(str(path), header, path.stat().st_size)
    images: FileArray | np.ndarray
    images = FileArray(path, header.dtype.str, header.shape, header.size)
    if header.fortran:
        if header.bytes > MAX_MEMORY:
            raise _too_large(str(path), header.bytes, 'an array in Fortran order', 'save')
        images = np.load(path, allow_pickle=False)
    return ArraySource(str(path), images, image_shape, reading=reading)


def array_shape(path: Path) -> tuple[int, ...] | None:
    """Returns the shape of the images in a .npz or .npy; None for any other or a damaged file."""
    suffix = path.suffix.lower()
    if suffix not in ('.npz', '.npy') or not path.is_file():
        return None
    with contextlib.suppress(*archives.ERRORS, OSError):
        if suffix == '.npy':
            return _npy_header(path).shape
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.lower() in ('images.npy', 'arr_0.npy')]
            return archives.npy_header(archive, archive.getinfo(names[0])).shape
    return None


def _npy_header(path: Path) -> archives.NpyHeader:
    with path.open('rb') as file:
        return archives.npy_header_of(file.read(archives.NPY_START), path.name)


def _open_images(path: Path, archive: zipfile.ZipFile) -> np.ndarray | FileArray:
    key = _find(path, archive, 'images')
    if key is None:
        found = [plain(name.removesuffix('.npy')) for name in archive.namelist()]
        hint = near_misses('images', found)
        raise UserError(
            f'{path}: no array "images" (or "arr_0"), found {listed(found) or "none"}{hint}; '
            'save them as images=...'
        )
    member = archive.getinfo(key)
    header = archives.npy_header(archive, member)
    what = f'{path}: {key[:-4]}'
    _check_images(what, header, member.file_size)
    if member.compress_type == zipfile.ZIP_STORED and not header.fortran:
        offset = _data_offset(path, member) + header.size
        return FileArray(path, header.dtype.str, header.shape, offset)
    if member.file_size > MAX_MEMORY:
        kind = 'an array in Fortran order' if header.fortran else 'a compressed array'
        raise _too_large(what, member.file_size, kind, 'savez')
    archives.check_expanded([member], str(path), path.stat().st_size)
    return archives.read_npy(archive, member)


def _too_large(what: str, size: int, kind: str, save: str) -> UserError:
    order = ' and in C order' if 'Fortran' in kind else ''
    return UserError(
        f'{what}: {size} bytes decompressed, more than the {MAX_MEMORY / 2**30:g} GiB accepted for '
        f'{kind}; save it by np.{save}, uncompressed{order}, which is read from disk'
    )


def _check_images(what: str, header: archives.NpyHeader, size: int) -> None:
    """Raises `UserError` unless a header is that of images.

    Args:
      what: the array, for the message.
      size: bytes of the array with its header.
    """
    shape, dtype = header.shape, header.dtype
    if dtype.kind not in 'uif':
        raise UserError(
            f'{what}: expected dtype uint8 (0 to 255), uint16 or floats, found {dtype}; convert it '
            'before saving'
        )
    if len(shape) not in (3, 4):
        raise UserError(
            f'{what}: expected shape (n, height, width, channels) '
            f'or (n, height, width), found {shape}'
        )
    if len(shape) == 3 and shape[2] <= MAX_FLAT < min(shape[:2]):
        raise UserError(
            f'{what}: found shape {shape}, which is one image (height, width, '
            f'channels), or {shape[0]} grey ones of {shape[2]} pixels a side; expected (n, height, '
            'width, channels): for one image, store images[None]'
        )
    if math.prod(shape) == 0:
        raise UserError(f'{what}: expected at least one image and one pixel, found shape {shape}')
    if size != header.bytes:
        raise UserError(
            f'{what}: shape {shape} takes {header.bytes - header.size} bytes, '
            f'found {size - header.size}; the file is damaged'
        )


def _find(path: Path, archive: zipfile.ZipFile, what: str) -> str | None:
    members = archive.namelist()
    present = [found for name in NAMES[what] if (found := spelled(f'{name}.npy', members))]
    if len(present) > 1:
        raise UserError(
            f'{path}: expected one of {" and ".join(NAMES[what])}, found both; keep one'
        )
    return present[0] if present else None


def _data_offset(path: Path, member: zipfile.ZipInfo) -> int:
    """Returns the first byte of a stored member's content."""
    with path.open('rb') as file:
        file.seek(member.header_offset)
        header = file.read(30)
        offset = member.header_offset + 30 + sum(struct.unpack_from('<HH', header, 26))
        size = file.seek(0, 2)
    if offset + member.file_size > size:
        raise UserError(
            f'{path}: {member.filename}: ends at byte {offset + member.file_size}, '
            f'but the file has {size}; it is truncated'
        )
    return offset


def _read_small(path: Path, archive: zipfile.ZipFile, what: str) -> np.ndarray | None:
    """Reads the labels or class names; None if the archive has none."""
    key = _find(path, archive, what)
    if key is None:
        return None
    member = archive.getinfo(key)
    if archives.npy_header(archive, member).dtype.hasobject:
        raise UserError(
            f'{path}: {key[:-4]}: expected plain numbers or strings, found Python objects, which '
            'are never unpickled; save names as text, by .astype(str)'
        )
    archives.check_expanded([member], str(path), path.stat().st_size)
    return archives.read_npy(archive, member)


def check_labels(
    path: Path | str, n: int, labels: np.ndarray | None, names: np.ndarray | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns int32 labels (n,) and the names of their classes.

    Args:
      path: begins the messages.
      n: number of images.
      labels: whole numbers, or the names of classes; None = there are none.
      names: of the labels 0, 1, ...; None = names are sorted, numbers name themselves.

    Raises:
      UserError: they are no labels and names of n images.
    """
    if labels is None:
        return no_labels(n), ()
    if labels.dtype.kind not in 'iuU':
        raise UserError(
            f'{path}: labels: expected integers, or names of classes as text, found '
            f'{labels.dtype}; convert them by .astype(int) or .astype(str)'
        )
    if labels.shape != (n,):
        raise UserError(
            f'{path}: labels: expected shape ({n},), one for each image, found {labels.shape}'
        )
    if labels.dtype.kind == 'U':
        return _named(path, [class_name(label) for label in labels.tolist()], names)
    low, high = int(labels.min()), int(labels.max())
    if (low, high) == (-1, -1):
        return no_labels(n), ()
    if low < 0 or high >= 2**20:
        raise UserError(
            f'{path}: labels: expected 0 to {2**20 - 1} (or all -1: none), '
            f'found {low if low < 0 else high}'
        )
    if names is None:
        return labels.astype(np.int32), tuple(str(i) for i in range(high + 1))
    texts = _class_names(path, names)
    if high >= len(texts):
        raise UserError(
            f'{path}: labels: found {high}, but class_names has {len(texts)} names '
            f'(0 to {len(texts) - 1})'
        )
    return labels.astype(np.int32), texts


def _class_names(path: Path | str, names: np.ndarray) -> tuple[str, ...]:
    if names.ndim != 1 or names.dtype.kind != 'U':
        raise UserError(
            f'{path}: class_names: expected a list of strings, '
            f'found {names.dtype} of shape {names.shape}'
        )
    texts = [class_name(name) for name in names.tolist()]
    if len(set(texts)) < len(names):
        raise UserError(
            f'{path}: class_names: expected different names, found {listed(texts)}; '
            'give each label a name of its own'
        )
    return tuple(texts)


def _named(
    path: Path | str, labels: list[str], names: np.ndarray | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    if not all(map(str.strip, labels)):
        raise UserError(f'{path}: labels: expected names of classes, found an empty one')
    if names is None:
        return by_class(labels)
    texts = _class_names(path, names)
    if unknown := sorted(set(labels) - set(texts)):
        raise UserError(f'{path}: labels: class_names lacks {unknown[0]!r}; add it')
    numbers = {text: i for i, text in enumerate(texts)}
    return np.array([numbers[label] for label in labels], np.int32), texts
