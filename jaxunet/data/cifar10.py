"""Reads CIFAR-10's official archive, python version.

Source: Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images". The archive's
batches are pickles. Reading them executes no code of theirs (`jaxunet.runtime.pickles`): the only
names that they may use are the three below, and only for stand-ins that store their arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxunet.data.crop import Shape
from jaxunet.data.rules import is_hidden
from jaxunet.data.source import ArraySource, Source
from jaxunet.data.tar import TarReader
from jaxunet.runtime.download import cached
from jaxunet.runtime.errors import UserError, listed
from jaxunet.runtime.pickles import Global, PickleReader, Refused
from jaxunet.runtime.untrusted import one_line, shown

URL = 'https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz'
MD5 = 'c58f30108f718f92721af3b95e74349a'
ARCHIVE = 'cifar-10-python.tar.gz'
FOLDER = 'cifar-10-batches-py'
TRAINING, TEST = 'cifar10:', 'cifar10_test:'  # prefixes of a path
# The batches that hold the images of each.
BATCHES = {TRAINING: tuple(f'data_batch_{i}' for i in range(1, 6)), TEST: ('test_batch',)}
CLASSES = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')
PIXELS = 3 * 32 * 32
MAX_BATCH_BYTES = 2**28
OFFICIAL = re.compile(r'data_batch_\d|test_batch|batches\.meta|readme\.html')


def split_path(path: str) -> tuple[str, str]:
    """Returns `cifar10:` or `cifar10_test:` and the rest of a path; ('', path) of any other."""
    prefix = next((prefix for prefix in BATCHES if path.startswith(prefix)), '')
    return prefix, path.removeprefix(prefix)


def is_official(path: Path) -> bool:
    """Returns True if a folder or archive holds the official batches, not images in folders.

    Raises:
      UserError: a damaged archive.
    """
    if path.is_dir():
        first = [names[0] for names in BATCHES.values()]
        return any((f / name).is_file() for f in (path, path / FOLDER) for name in first)
    if not path.is_file():
        return False  # a pipe or a device, which no archive is
    with TarReader(path) as members:
        for member in members:
            if member.isreg() and not is_hidden(member.name):
                return OFFICIAL.fullmatch(Path(member.name).name) is not None
    return False


def open_official(path: Path | None, image_shape: Shape, prefix: str = TRAINING) -> Source:
    """Opens the 50,000 training images or the 10,000 test images, in the order of the files.

    Args:
      path: the archive or its extracted folder; None downloads the archive once.
      image_shape: (height, width, channels) that `load` returns.
      prefix: `TRAINING` or `TEST`.

    Raises:
      UserError: no network, or a file that differs from the official ones.
    """
    path = download(prefix) if path is None else path
    wanted = BATCHES[prefix]
    batches = _from_folder(path, wanted) if path.is_dir() else _from_archive(path, wanted)
    missing = [name for name in wanted if name not in batches]
    if missing:
        expected = {TRAINING: 'the five training batches', TEST: 'the test batch'}[prefix]
        raise UserError(
            f'{path}: no {", ".join(missing)}; expected {expected} of CIFAR-10, '
            f'python version ({URL})'
        )
    parts = [read_batch(batches[name], f'{path}: {name}') for name in wanted]
    images, labels = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    name = f'{TEST}{path}' if prefix == TEST else str(path)
    return ArraySource(name, images, image_shape, labels, CLASSES)


def _from_folder(path: Path, wanted: Sequence[str]) -> dict[str, bytes]:
    folder = path if (path / wanted[0]).is_file() else path / FOLDER
    found = [name for name in wanted if (folder / name).is_file()]
    for name in found:
        _check_size(str(folder / name), (folder / name).stat().st_size)
    return {name: (folder / name).read_bytes() for name in found}


def _from_archive(path: Path, wanted: Sequence[str]) -> dict[str, bytes]:
    batches = {}
    with TarReader(path) as members:
        for member in members:
            name = Path(member.name).name
            if member.isreg() and name in wanted:
                _check_size(f'{path}: {name}', member.size)
                batches[name] = members.read(member, member.size)
    return batches


def _check_size(name: str, size: int) -> None:
    if size > MAX_BATCH_BYTES:
        raise UserError(f'{name}: {size} bytes, expected about 31 million')


def read_batch(data: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads one pickled batch: images uint8 (n, 32, 32, 3) and labels int32 (n,).

    Args:
      name: begins every message.

    Raises:
      UserError: another object than the official dict, or arrays of other shapes.
    """
    try:
        content = _Reader().load(data)
    except Refused as error:
        raise UserError(
            f'{name}: byte {error.byte}: not a batch of CIFAR-10: {one_line(error)}; '
            'copy or download it again'
        ) from None
    if not isinstance(content, dict):
        raise UserError(f'{name}: expected a dict, found {type(content).__name__}')
    missing = [key for key in (b'data', b'labels') if key not in content]
    if missing:
        raise UserError(
            f'{name}: no entry "{missing[0].decode()}", '
            f'found {listed([shown(key) for key in content])}'
        )
    labels = content[b'labels']
    if not isinstance(labels, list) or not all(
        type(v) is int and 0 <= v < len(CLASSES) for v in labels
    ):
        raise UserError(f'{name}: labels: expected a list of integers 0 to {len(CLASSES) - 1}')
    if not labels:
        raise UserError(f'{name}: labels: expected at least one, found none')
    pixels = _pixels(content[b'data'], len(labels), f'{name}: data')
    return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), np.array(
        labels, np.int32
    )


def _pixels(array: object, n: int, name: str) -> np.ndarray:
    """Returns the array that numpy pickled as (version, shape, dtype, Fortran order, bytes)."""
    state = array.state if isinstance(array, _Array) else None
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _Dtype):
        raise UserError(f'{name}: expected a numpy array, found {type(array).__name__}')
    _, shape, dtype, fortran, raw = state
    if (
        not isinstance(shape, tuple)
        or [type(side) for side in shape] != [int, int]
        or shape != (n, PIXELS)
        or dtype.name not in (b'u1', 'u1')
    ):
        raise UserError(
            f'{name}: expected u1 of shape ({n}, {PIXELS}), '
            f'found {shown(dtype.name)} of shape {shown(shape)}'
        )
    if not isinstance(raw, bytes) or len(raw) != n * PIXELS:
        found = len(raw) if isinstance(raw, bytes) else type(raw).__name__
        raise UserError(f'{name}: expected {n * PIXELS} bytes, found {found}')
    return np.frombuffer(raw, np.uint8).reshape((n, PIXELS), order='F' if fortran else 'C')


class _Array:
    """Stands in for numpy.ndarray while unpickling."""

    state: object = None


class _Dtype:
    """Stands in for numpy.dtype while unpickling; its state is a byte order, which bytes lack."""

    def __init__(self, name: object) -> None:
        self.name = name


class _Reader(PickleReader):
    """Knows the three names in these files, in numpy's old and new modules."""

    RECONSTRUCT, ARRAY, DTYPE = Global('_reconstruct'), Global('ndarray'), Global('dtype')
    KNOWN = {  # a constant  # noqa: RUF012
        ('numpy.core.multiarray', '_reconstruct'): RECONSTRUCT,
        ('numpy._core.multiarray', '_reconstruct'): RECONSTRUCT,
        ('numpy', 'ndarray'): ARRAY,
        ('numpy', 'dtype'): DTYPE,
    }

    def __init__(self) -> None:
        super().__init__('a batch of CIFAR-10', 'the file is not safe and was not run')

    def find(self, module: str, name: str) -> object:
        """Returns the stand-in for a known name. Raises Refused for any other."""
        if (module, name) not in self.KNOWN:
            raise self.unknown_global(module, name)
        return self.KNOWN[module, name]

    def call(self, function: object, arguments: tuple[object, ...]) -> object:
        """Returns an empty array, or a type by its name."""
        if function is self.RECONSTRUCT:
            return _Array()
        if function is self.DTYPE and arguments:
            return _Dtype(arguments[0])
        return super().call(function, arguments)

    def build(self, target: object, state: object) -> None:
        """Stores the state of an array."""
        if isinstance(target, _Array):
            target.state = state
        elif not isinstance(target, _Dtype):
            super().build(target, state)


def download(prefix: str = TRAINING) -> Path:
    """Returns the official archive in the cache folder, downloading it if missing or damaged.

    Args:
      prefix: the path that asks for it, for messages.

    Raises:
      UserError: no connection, no disk space, or a wrong MD5.
    """
    instead = f'give its path: data.path={prefix}/path/to/{ARCHIVE}'
    return cached(
        URL,
        ARCHIVE,
        algorithm='md5',
        checksum=MD5,
        asked_by=f'data.path={prefix}',
        instead=instead,
        replace_damaged=True,
    )
