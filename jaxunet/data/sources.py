"""Opens anything that `data.path` accepts as a `Source`."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path

import numpy as np

from jaxunet.config import Config
from jaxunet.data import cifar10
from jaxunet.data.containers import Folder
from jaxunet.data.crop import Shape
from jaxunet.data.holdout import hold_out
from jaxunet.data.image_files import ImageFiles, decode_tar_stream, report_skipped
from jaxunet.data.npz import open_npy, open_npz
from jaxunet.data.open_files import EMBEDDED, FORMS, TAR, check_exists, open_container
from jaxunet.data.pairs import pair
from jaxunet.data.reading import PLAIN, Reading
from jaxunet.data.rules import MAGIC_BYTES, why_not_image
from jaxunet.data.shards import named_files
from jaxunet.data.source import ArraySource, Selection, Source
from jaxunet.data.tar import TarArchive, compression
from jaxunet.data.unetcu_bin import BinSource, open_compressed
from jaxunet.runtime.errors import UserError, near_misses
from jaxunet.runtime.paths import expanded, is_remote, shown_path
from jaxunet.runtime.remote import on_disk

DIGITS = Path(__file__).with_name('digits.npz')
OTHER_FIELDS = (
    'data.classes: ',
    'data.labels',
    'data.bits: ',
    'model.image_channels: ',
)  # begin errors that name their field
WEIGHTS = ('.pt', '.pth', '.safetensors', '.ckpt', '.pkl')


def open_images(config: Config, given: ArraySource | None = None) -> Source:
    """Opens the training images of `config.data` in the shape and with the classes that it names.

    Images that `data.holdout` keeps out of training are in `held_out` of the result, and those of
    data.condition=folder:PATH in `pictures`.

    Args:
      given: the images in memory that `data.path` stands for; None = it is a path.

    Raises:
      UserError: as `open_source` and `pair`, `data.holdout` leaves no image to train on, or random
        crops of images that are decoded only once.
    """
    if config.data.crop == 'random' and given is None and compressed_tar(config.data.path):
        raise UserError(
            'data.crop: random cuts images anew every epoch, but '
            f'{shown_path(config.data.path)} is a compressed tar, which is decoded once; '
            'unpack it, or use data.crop=center'
        )
    source = open_data(config, config.image_shape, given)
    if config.picture_path:
        shape = (*config.image_shape[:2], config.picture_channels)
        source.pictures = pair(source, open_pictures(config, shape))
    return hold_out(source, config.data.holdout)


def open_pictures(config: Config, image_shape: Shape) -> Source:
    """Opens the set of pictures that `data.condition=folder:PATH` names, in its own order.

    Raises:
      UserError: as `open_source`, or random crops of pictures that are decoded only once.
    """
    path = config.picture_path
    try:
        if config.data.crop == 'random' and compressed_tar(path):
            raise UserError(f'{path}: data.crop=random cannot cut a compressed tar; unpack it')
        return open_source(path, image_shape=image_shape, reading=Reading.of_pictures(config))
    except UserError as error:
        raise UserError(f'data.condition: {error}') from None


def images_key(config: Config) -> tuple[Hashable, ...]:
    """Returns a key that is equal for configs with the same images and pictures beside them."""
    data, reading = config.data, Reading.of(config)
    return data.path, config.loaded_shape, data.labels, data.classes, data.condition, reading


def open_data(config: Config, image_shape: Shape, given: ArraySource | None = None) -> Source:
    """Opens all images of `config.data`.

    Args:
      given: as for `open_images`.

    Raises:
      UserError: as `open_source`; names the field.
    """
    if given is not None:
        source, classes = given.at(image_shape, Reading.of(config)), config.data.classes
        _check_unlabelled(config.data.labels, source.name)
        return Selection(source, classes) if classes else source
    try:
        return open_source(
            config.data.path,
            image_shape=image_shape,
            labels=config.data.labels,
            classes=config.data.classes,
            reading=Reading.of(config),
        )
    except UserError as error:
        if str(error).startswith(OTHER_FIELDS):
            raise
        raise UserError(f'data.path: {error}') from None


def open_source(
    path: str,
    *,
    image_shape: Shape,
    labels: str = '',
    classes: tuple[str, ...] = (),
    option: str = 'data.classes',
    warn: bool = True,
    reading: Reading = PLAIN,
) -> Source:
    """Opens a set of images.

    Args:
      path: a folder, .zip or .tar(.gz|.xz) of images, searched recursively in sorted depth-first
        path order, with or without class sub-folders; one or several .tar, .parquet or .arrow
        (`jaxunet.data.shards`); an LMDB database; an .npz or .npy of images; unet.cu's data .bin or
        .bin.gz; `digits:` (embedded); `cifar10:` (downloads the official archive); `cifar10:PATH`
        (a copy of it, its extracted folder, or images in class folders); `cifar10_test:` or
        `cifar10_test:PATH` (the test images of the archive or a copy of it).
      image_shape: (height, width, channels) that `load` returns; images are cropped, resized and
        converted (`jaxunet.data.pixels`).
      labels: where the labels come from, as `data.labels`.
      classes: keep only these, as labels 0, 1, ...; empty keeps all, sorted by name.
      option: the field or flag that named the classes, for messages.
      warn: log a warning of the files that are not images; they are in `skipped` of the result.
      reading: how stored values become pixels.

    Raises:
      UserError: a wrong path, file or class.
    """
    if min(image_shape) < 1:
        raise UserError(
            f'image_shape: expected a height, width and channels of 1 or more, found {image_shape}'
        )
    try:
        source = _open(path, image_shape, labels, reading)
    except MemoryError:
        raise UserError(
            f'{path}: not enough memory to open it; '
            'convert it with `python -m jaxunet.prepare_data`, which streams'
        ) from None
    except OSError as error:
        raise UserError(
            f'{path}: cannot be read: {error.strerror or error}; check the file and its permissions'
        ) from None
    if source.reading != reading and not (reading.as_stored and not reading.keeps):
        raise UserError(
            f'data.bits: {source.name} holds opaque pixels of 8 bits; expected data.bits=8 and '
            'neither data.range nor data.background=keep'
        )
    if warn:
        report_skipped(source.name, source.skipped)
    return Selection(source, classes, option) if classes else source


def check_path(path: str) -> None:
    """Checks that the file or folder of a set is there; opens and downloads nothing.

    Args:
      path: as in `open_source`.

    Raises:
      UserError: it is not; the message has similar names.
    """
    local = cifar10.split_path(path)[1]
    if local and not local.endswith(':') and not is_remote(local):
        for file in named_files(Path(expanded(local))):
            check_exists(file)


def is_downloaded(path: str) -> bool:
    """Returns True for the path of a set that `open_source` downloads: it names no local file."""
    local = cifar10.split_path(path)[1]
    return not local or is_remote(local)


def compressed_tar(path: str) -> Path | None:
    """Returns the compressed tar of image files that a path names; None for anything else.

    `open_source` decodes such an archive into memory, at the size that it returns.

    Args:
      path: as in `open_source`.

    Raises:
      UserError: a damaged archive.
    """
    prefix, local = cifar10.split_path(path)
    file = Path(on_disk(local))
    if not (file.name.lower().endswith(TAR) and file.is_file() and compression(file)):
        return None
    if prefix == cifar10.TEST or (prefix and cifar10.is_official(file)):
        return None
    return file


def open_unpacked_tar(
    path: Path,
    shown: str,
    *,
    image_shape: Shape,
    labels: str,
    classes: tuple[str, ...],
    option: str,
    reading: Reading = PLAIN,
) -> Source:
    """Opens a compressed tar that was unpacked, like `open_source` without `warn`.

    Args:
      path: the plain tar.
      shown: the compressed tar, for messages.
      image_shape, labels, classes, option, reading: as in `open_source`.

    Raises:
      UserError: a wrong file or class.
    """
    source = ImageFiles(
        TarArchive(path, shown), image_shape, reading, strip_leading=True, labels=labels
    )
    return Selection(source, classes, option) if classes else source


def _check_unlabelled(labels: str, path: Path | str) -> None:
    """Raises `UserError` if `data.labels` is set for a set that has no files to look at."""
    if labels:
        raise UserError(
            f'data.labels: {labels} chooses the labels of image files and of tables, but {path} '
            'holds arrays, whose labels are known; leave it empty'
        )


def _open(path: str, shape: Shape, labels: str, reading: Reading) -> Source:
    prefix, local = cifar10.split_path(path)
    if path == 'digits:':
        _check_unlabelled(labels, path)
        return _digits(shape)
    if prefix:
        return _cifar10(prefix, local, shape, labels, reading)
    if re.fullmatch(r'\w+:', path):
        raise UserError(f'unknown set "{path}"{near_misses(path, EMBEDDED)}; expected {FORMS}')
    if not path:
        raise UserError(f'expected {FORMS}, found an empty path')
    return _open_path(Path(on_disk(path)), shape, labels, reading)


def _open_path(path: Path, shape: Shape, labels: str, reading: Reading) -> Source:
    container = open_container(path)
    if container is not None:
        folder = isinstance(container, Folder)
        return ImageFiles(container, shape, reading, strip_leading=not folder, labels=labels)
    name = path.name.lower()
    if not path.is_file():
        raise UserError(
            f'{path}: expected a file or folder, found something else (a pipe or device?)'
        )
    if path.stat().st_size == 0:
        raise UserError(f'{path}: expected {FORMS}, found an empty file')
    if name.endswith(TAR):
        return decode_tar_stream(path, shape, reading, labels)
    _check_unlabelled(labels, path)
    if name.endswith('.npz'):
        return open_npz(path, shape, reading)
    if name.endswith('.npy'):
        return open_npy(path, shape, reading)
    if name.endswith('.bin'):
        return BinSource(path, shape)
    if name.endswith('.bin.gz'):
        return open_compressed(path, shape)
    raise _unknown(path)


def _unknown(path: Path) -> UserError:
    with path.open('rb') as file:
        start = file.read(MAGIC_BYTES)
    if path.name.lower().endswith(WEIGHTS):
        return UserError(
            f'{path}: holds weights, expected images: {FORMS}; '
            'weights go to init_from or --checkpoint'
        )
    if not why_not_image(start, len(start), path.name):
        return UserError(f'{path}: is one image, expected many; give the folder that holds it')
    return UserError(f'{path}: unknown kind of file "{path.suffix}", expected {FORMS}')


def _digits(shape: Shape) -> Source:
    """Opens the embedded set: 1,797 grey 8×8 images, classes 0 to 9.

    Source: test set of UCI "Optical Recognition of Handwritten Digits", E. Alpaydin & C. Kaynak
    1998, doi 10.24432/C50P49, licence CC BY 4.0. Grey levels 0..16 became round(level · 255 / 16).
    """
    digits = open_npz(DIGITS, (8, 8, 1))
    return ArraySource(
        'digits:', digits.load(np.arange(len(digits))), shape, digits.labels, digits.class_names
    )


def _cifar10(prefix: str, local: str, shape: Shape, labels: str, reading: Reading) -> Source:
    if not local:
        _check_unlabelled(labels, prefix)
        return cifar10.open_official(None, shape, prefix)
    path = Path(on_disk(local))
    check_exists(path)
    if (path.is_dir() or path.name.lower().endswith(TAR)) and cifar10.is_official(path):
        return cifar10.open_official(path, shape, prefix)
    if prefix == cifar10.TEST:
        raise UserError(
            f'{path}: not the official archive of CIFAR-10 or its folder, so nothing says which '
            f'images are for testing; give the test images alone, without {prefix}'
        )
    return _open_path(path, shape, labels, reading)
