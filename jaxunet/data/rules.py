"""The two rules of every folder and archive: which files are images, which folders are classes.

An image is a file whose first bytes are those of an image format, unless its name says that it is
text about an image or camera raw. Hidden files, and the folders that systems keep for themselves,
do not count. A class is a top-level folder, if every image lies in one.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath

import numpy as np
from jaxtyping import Int

from jaxunet.runtime.class_names import class_name
from jaxunet.runtime.errors import listed, printable
from jaxunet.runtime.untrusted import LFS_POINTER, UNFETCHED

MAGIC_BYTES = 64  # bytes that identify an image file
# First bytes of image files: (offset, bytes).
MAGIC = (
    (0, b'\x89PNG\r\n\x1a\n'),
    (0, b'\xff\xd8\xff'),  # JPEG
    (0, b'GIF87a'),
    (0, b'GIF89a'),
    (0, b'II*\x00'),  # TIFF
    (0, b'MM\x00*'),
    (0, b'II+\x00'),  # BigTIFF
    (0, b'MM\x00+'),
    (0, b'\x00\x00\x00\x0cjP  '),  # JPEG 2000
    (0, b'\xff\x4f\xff\x51'),  # its codestream alone, as in .j2k
)
# Formats whose first bytes may also begin a text, such as "BMW" and "P3 robot": a RIFF file of the
# kind WEBP; a bitmap with the size of a known header; PBM, PGM or PPM with their numbers, or with
# comments to the end of the bytes.
GAP = rb'(?:\s|#[^\r\n]*[\r\n])+'
LONGER = re.compile(
    rb'RIFF.{4}WEBP'
    rb'|BM.{12}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\0\0\0'
    rb'|P1%(gap)b\d+%(gap)b\d+\s+[01#]|P4%(gap)b\d+%(gap)b\d+\s'
    rb'|P[23]%(gap)b\d+%(gap)b\d+%(gap)b\d+\s+[\d#]|P[56]%(gap)b\d+%(gap)b\d+%(gap)b\d+\s'
    rb'|P[1-6]\s+(?:#[^\r\n]*[\r\n]+)*#[^\r\n]*(?:[\r\n][\d\s]*)?\Z' % {b'gap': GAP},
    re.DOTALL,
)
# Brands of AVIF, and of HEIC, in which phones save photographs and which Pillow does not decode.
# Both kinds of file may begin with mif1 or msf1, and then name their own brand.
AVIF = frozenset((b'avif', b'avis'))
HEIC = frozenset((b'heic', b'heix', b'heim', b'heis', b'hevc', b'hevx', b'mif1', b'msf1'))
ARCHIVES = frozenset(('.zip', '.tar', '.tgz', '.gz', '.bz2', '.xz', '.zst', '.7z', '.rar'))
TEXTS = frozenset(('.txt', '.caption', '.json', '.jsonl', '.csv', '.tsv', '.xml', '.md'))
# Most of these are TIFF files whose first image is a thumbnail.
CAMERA_RAW = re.compile(
    r'\.(3fr|arw|cr2|cr3|crw|dcr|dng|erf|iiq|k25|kdc|mef|mos|mrw|nef|nrw|orf|pef|raf|raw|rw2|rwl|sr2'
    r'|srf|srw|x3f)'
)
# Folders of macOS's archives, Windows, Linux, Synology and QNAP.
SYSTEM_FOLDERS = re.compile(
    r'__macosx|\$recycle\.bin|recycler|system volume information|lost\+found|@eadir|@tmp|#recycle'
    r'|#snapshot|@recycle|@recently-snapshot',
    re.IGNORECASE,
)
# Names of the parts of a set, such as train, val2017 and test_set.
PART = re.compile(r'(train|training|val|valid|validation|test|testing|eval)([-_]?set)?[-_]?\d*')
# Files that hold the labels of a set (`jaxunet.data.labels`); of several, the first counts.
LABEL_FILES = ('dataset.json', 'metadata.jsonl', 'metadata.csv', 'labels.csv')
# Files in the storage folders of NVlabs' tools (StyleGAN, EDM).
STORED = re.compile(r'(?:.*/)?(\d{5})/img\1\d{3}\.\w+')


def why_not_image(start: bytes, size: int, name: str = '') -> str:
    """Returns why a file is not an image that can be decoded, or '' if it is one.

    Args:
      start: its first MAGIC_BYTES bytes.
      size: its size in bytes.
      name: its name; '' = the content alone decides.
    """
    suffix = posixpath.splitext(name)[1].lower()
    if size == 0:
        return 'empty file'
    if start.startswith(LFS_POINTER):
        return UNFETCHED
    if CAMERA_RAW.fullmatch(suffix):
        return 'camera raw, which is not supported: convert it to TIFF, PNG or JPEG'
    brands = _brands(start)
    if brands & HEIC and not brands & AVIF:
        return 'HEIC, which is not supported: convert it to JPEG or PNG'
    known = brands & AVIF or any(start.startswith(magic, offset) for offset, magic in MAGIC)
    if suffix not in TEXTS and (known or LONGER.match(start)):
        return ''
    if suffix in ARCHIVES:
        return 'an archive inside the set, which is not opened: unpack it, or give it alone'
    return 'not an image'


def _brands(start: bytes) -> set[bytes]:
    """Returns the brands of a file of the family of MP4, AVIF and HEIC; none of any other."""
    if start[4:8] != b'ftyp':
        return set()
    size = min(int.from_bytes(start[:4]), len(start))
    return {start[i : i + 4] for i in (8, *range(16, size, 4))}


def is_hidden(name: str) -> bool:
    """Returns True for the path of a hidden file, or of one in a hidden or a system's folder.

    Names of hidden ones begin with a dot, such as `.thumbnails` and macOS's `._1.png`.
    """
    return any(
        SYSTEM_FOLDERS.fullmatch(part) or (part.startswith('.') and part not in ('.', '..'))
        for part in name.split('/')
    )


def bare_name(path: str) -> str:
    """Returns the path of a file in a set without its suffix, in its one form (`class_name`)."""
    folder, slash, file = path.removeprefix('./').lstrip('/').rpartition('/')
    return class_name(folder + slash + (file.rpartition('.')[0] or file))


def whole_names(given: Sequence[str], known: Sequence[str]) -> list[str]:
    """Returns given names as they are spelled in `known`; unknown ones stay.

    A list on a command line is split at its commas. Pieces that are no name alone are joined to the
    shortest name that they begin, so that `tench, Tinca tinca,goldfish` are two names.
    """
    spelled = {_without_gaps(name): name for name in known}
    most = 1 + max((name.count(',') for name in known), default=0)
    whole, i = [], 0
    while i < len(given):
        for end in range(i + 1, min(i + most, len(given)) + 1):
            if (name := spelled.get(_without_gaps(','.join(given[i:end])))) is not None:
                break
        else:
            name, end = given[i], i + 1
        whole.append(name)
        i = end
    return whole


def _without_gaps(name: str) -> str:
    return re.sub(r'\s*,\s*', ',', class_name(name))


def spelled(name: str, columns: Collection[str]) -> str:
    """Returns the column of this name, or else the only one that differs in case; '' = none."""
    alike = [column for column in columns if column.casefold() == name.casefold()]
    return name if name in alike else alike[0] if len(alike) == 1 else ''


def class_order(name: str) -> tuple[bool, int, str]:
    """Returns a sort key of class names: numbers by their value, then other names as text."""
    number = name.isascii() and name.isdecimal()
    return not number, int(name) if number else 0, name


def by_class(values: Sequence[str]) -> tuple[Int[np.ndarray, ' images'], tuple[str, ...]]:
    """Returns int32 labels of the images with these names of classes, and the names in order."""
    names = tuple(sorted(set(values), key=class_order))
    numbers = {name: i for i, name in enumerate(names)}
    return np.array([numbers[value] for value in values], np.int32), names


def find_classes(
    names: list[str], *, strip_leading: bool
) -> tuple[Int[np.ndarray, ' images'], tuple[str, ...], str]:
    """Derives classes from paths: the top-level folders, if every image lies in one.

    A leading folder that all paths share is not a class if all images have folders below it.
    Folders that are named as the parts of a set, and those in which NVlabs' tools store images by
    number, are no classes.

    Args:
      names: path of each image in its container.
      strip_leading: a folder that all paths share is never a class, as archives often hold their
        files in one folder, such as `train/`.

    Returns:
      Labels, class names in `class_order`, and ''. Without classes: labels -1, no names, and what
      prevents them ('' if there are no sub-folders).
    """
    folders = [
        tuple(part for part in PurePosixPath(name).parts[:-1] if part != '/') for name in names
    ]
    depth = 0
    shortest = min(len(f) for f in folders)
    while depth < shortest and all(f[depth] == folders[0][depth] for f in folders):
        if depth + 1 == shortest and not (strip_leading and depth == 0):
            break
        depth += 1
    why = ''
    if all(STORED.fullmatch(name) for name in names):
        why = (
            "its folders are those in which NVlabs' tools store images by number, and the "
            f'{LABEL_FILES[0]} with the labels is missing'
        )
    elif depth >= shortest:
        loose = [name for name, f in zip(names, folders, strict=True) if len(f) == depth]
        beside = sorted({f[depth] for f in folders if len(f) > depth})
        why = _loose_images(loose, beside) if beside else ''
    else:
        named = {folder: class_name(folder) for folder in {f[depth] for f in folders}}
        labels, class_names = by_class([named[f[depth]] for f in folders])
        parts = [name for name in class_names if PART.fullmatch(name.lower())]
        if len(parts) < 2:
            return labels, class_names, ''
        why = (
            f'the folders {listed(parts)} are parts of a set, not classes '
            f'(give one of them, unpacked, such as .../{parts[0]})'
        )
    return np.full(len(names), -1, np.int32), (), why


def _loose_images(loose: list[str], folders: list[str]) -> str:
    images = (
        f'{printable(loose[0])} lies'
        if len(loose) == 1
        else f'{printable(loose[0])} and {len(loose) - 1} more images lie'
    )
    return (
        f'{images} beside the sub-folders {listed([printable(folder) for folder in folders])}: '
        'move such images into a class sub-folder or away'
    )
