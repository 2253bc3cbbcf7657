"""Image files in a folder or archive, with or without class sub-folders."""

from __future__ import annotations

import contextlib
import itertools
import math
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from absl import logging
from jaxtyping import Int

from jaxunet.data.containers import MAX_FILE_BYTES, Container, path_order, too_large
from jaxunet.data.crop import Batch, Crop, Crops, Pixels, Shape, crop_of
from jaxunet.data.find_labels import find_labels
from jaxunet.data.labels import FileSet, Labels, most_bytes
from jaxunet.data.pixels import (
    NARROW,
    BadImage,
    check_channels,
    check_depth,
    decode,
    has_holes,
    size_of,
    stored_peak,
)
from jaxunet.data.reading import PLAIN, Reading, log_once, tell_rounding
from jaxunet.data.rules import MAGIC_BYTES, bare_name, is_hidden, why_not_image
from jaxunet.data.source import MAX_MEMORY, Source, no_labels, of_pixels, spread
from jaxunet.data.tables import Rows
from jaxunet.data.tar import TarReader, why_unreadable
from jaxunet.data.threads import ordered_map
from jaxunet.runtime.errors import UserError, plural, printable

NAMED = 5  # skipped files that a message names
FEW, MORE = 16, 256  # images whose depth is looked at, and if it is narrow
REPLACED = 'a later file has the same name'  # as where an archive was updated


class ImageFiles(Source):
    """The image files of a container, in sorted depth-first path order, decoded when loaded.

    Args:
      image_shape: (height, width, channels) that `load` returns.
      reading: how stored values become pixels.
      strip_leading: see `find_classes`.
      labels: `data.labels`.

    Raises:
      UserError: no images, channels that image files do not have, or labels with mistakes
        (`find_labels`).
    """

    def __init__(
        self,
        container: Container,
        image_shape: Shape,
        reading: Reading = PLAIN,
        *,
        strip_leading: bool,
        labels: str = '',
    ) -> None:
        check_channels(image_shape[2], reading)
        self.name, self.image_shape, self.reading = container.shown, image_shape, reading
        self._container = container
        skipped: list[tuple[str, str]] = []
        if isinstance(container, Rows):
            container.check_images()
            self._files = np.arange(len(container))
            self.pieces = container.pieces
            found = container.labels(labels)
        else:
            images, others = _image_files(container, skipped)
            if not images:
                raise no_images(self.name, tuple(skipped))
            self._files = np.array(images, np.int64)
            files = FileSet(
                self.name,
                [container.names[i] for i in images],
                list(others),
                lambda name: container.read(others[name]),
                strip_leading,
                container.sharded,
            )
            found = find_labels(files, labels)
        if reading.as_stored:
            self._check_depth()
        _label(self, found, skipped)

    def _check_depth(self) -> None:
        """Raises `UserError` if images of more than 8 bits use a small part of their range."""
        highest = (0, '')
        for count in (FEW, MORE):
            for i in self._files[spread(len(self._files), count)].tolist():
                with contextlib.suppress(BadImage):
                    peak = stored_peak(self._container.read(i))
                    highest = max(highest, (peak, self._container.describe(i)))
                if highest[0] > NARROW:
                    tell_rounding(self.name, '16-bit')
                    return
            if highest[0] == 0:
                return
        check_depth(*highest)

    def load(self, indices: Int[np.ndarray, ' rows'], crops: Crops | None = None) -> Batch:
        """Decodes the images at these indices; see `Source.load`."""
        out = np.empty((len(indices), *self.image_shape), self.reading.dtype)
        with _in_set(self.name):
            for row, index in enumerate(indices):
                out[row] = self._one(int(self._files[index]), crop_of(crops, row))
        return out

    def stored_size(self, index: int) -> tuple[int, int]:
        """Reads the size from the image file; see `Source.stored_size`."""
        i = int(self._files[index])
        with _in_set(self.name):
            return size_of(self._container.read(i), self._container.describe(i))

    def _one(self, i: int, crop: Crop) -> Pixels:
        data, name = self._container.read(i), self._container.describe(i)
        return decode(data, name, self.image_shape, crop, self.reading)

    def names(self) -> list[str] | None:
        """Returns the paths of the files; see `Source.names`."""
        container = self._container
        if isinstance(container, Rows):
            return None
        paths = (container.names[i] for i in self._files.tolist())
        return [bare_name(p.partition('/')[2] if container.sharded else p) for p in paths]

    def has_holes(self, index: int) -> bool:
        """Looks for pixels that are not opaque in the image file; see `Source.has_holes`."""
        i = int(self._files[index])
        with _in_set(self.name):
            return has_holes(self._container.read(i), self._container.describe(i))


def _image_files(
    container: Container, skipped: list[tuple[str, str]]
) -> tuple[list[int], dict[str, int]]:
    """Returns the numbers of the images, sorted by path, and those of the other files by name.

    Adds these to `skipped`, with the files that cannot be read.
    """
    keys = [path_order(name) for name in container.names]
    last = {key: i for i, key in enumerate(keys)}
    images, others = [], {}
    for i in sorted(range(len(keys)), key=keys.__getitem__):
        replaced = last[keys[i]] != i
        reason = REPLACED if replaced else container.reason(i)
        if not reason:
            images.append(i)
            continue
        skipped.append((printable(container.names[i]), reason))
        if not replaced and i not in container.unreadable:
            others[container.names[i]] = i
    return images, others


def _label(source: Source, found: Labels, skipped: list[tuple[str, str]]) -> None:
    """Gives a source its labels, and the files that were skipped without those that hold them."""
    source.labels, source.class_names = found.numbers, found.names
    source.unlabelled_by, source.labelled_by = found.missing, found.origin
    used = {printable(name) for name in found.used}
    source.skipped = tuple(each for each in skipped if each[0] not in used)


def decode_tar_stream(
    path: Path, image_shape: Shape, reading: Reading = PLAIN, labels: str = ''
) -> Source:
    """Decodes a compressed tar into memory, in sorted depth-first path order.

    Args:
      labels: `data.labels`.

    Raises:
      UserError: a corrupt image, no images, more than `MAX_MEMORY` bytes of pixels, or labels with
        mistakes (`find_labels`).
    """
    check_channels(image_shape[2], reading)
    names: list[str] = []
    skipped: list[tuple[str, str]] = []
    texts: dict[str, bytes] = {}
    peaks = [(0, '')]

    def one(file: tuple[str, bytes]) -> Pixels:
        peaks.append((stored_peak(file[1]), file[0]))
        return decode(file[1], file[0], image_shape, reading=reading)

    with _in_set(str(path)), TarReader(path) as members:
        each = math.prod(image_shape) * reading.dtype.itemsize
        files = _image_members(members, each, image_shape, names, skipped, texts)
        pixels = list(ordered_map(one, files))
    if not names:
        raise no_images(str(path), tuple(skipped))
    if reading.as_stored and max(peaks)[0]:
        check_depth(*max(peaks))
        tell_rounding(str(path), '16-bit')
    order = sorted((i for i in range(len(names)) if names[i]), key=lambda i: path_order(names[i]))
    found = find_labels(
        FileSet(
            str(path), [names[i] for i in order], list(texts), texts.__getitem__, strip_leading=True
        ),
        labels,
    )
    images = np.empty((len(order), *image_shape), reading.dtype)
    for row, i in enumerate(order):
        images[row] = pixels[i]
        pixels[i] = images[row]  # frees the separate copy
    source = of_pixels(str(path), images, reading, no_labels(len(images)), ())
    source.file_names = [bare_name(names[i]) for i in order]
    _label(source, found, skipped)
    return source


def tar_stream_sizes(path: Path, count: int) -> list[tuple[int, int]]:
    """Returns (height, width) of the first images of a compressed tar, at most `count`.

    Raises:
      BadImage: one of them is corrupt.
    """
    with _in_set(str(path)), TarReader(path) as members:
        files = _image_members(members, 1, (1, 1, 1), [], [], {})
        return [size_of(data, name) for name, data in itertools.islice(files, count)]


@contextlib.contextmanager
def _in_set(images: str) -> Iterator[None]:
    """Adds the path of the set to the error of an image in it."""
    try:
        yield
    except BadImage as error:
        raise BadImage(error.name, error.reason, images) from None


def _image_members(
    members: TarReader,
    each: int,
    shape: Shape,
    names: list[str],
    skipped: list[tuple[str, str]],
    texts: dict[str, bytes],
) -> Iterator[tuple[str, bytes]]:
    """Yields the description and content of every image; adds to `names` and `skipped`.

    `texts` gets the content of the files that may hold labels.

    The name of an image that a later file replaces becomes ''.

    Args:
      each: bytes of a decoded image.
    """
    places: dict[tuple[str, ...], int] = {}  # in `names`
    for member in members:
        if member.isdir() or is_hidden(member.name):
            continue
        key = path_order(member.name)
        if (place := places.pop(key, None)) is not None:
            skipped.append((printable(names[place]), REPLACED))
            names[place] = ''
        start, reason = b'', why_unreadable(member)
        if not reason and member.size > MAX_FILE_BYTES:
            reason = too_large(member.size)
        elif not reason:
            start = members.read(member, MAGIC_BYTES)
            reason = why_not_image(start, member.size, member.name)
        if reason:
            skipped.append((printable(member.name), reason))
            if 0 < member.size <= most_bytes(member.name) and member.isreg():
                texts[member.name] = start + members.read(member, member.size)
            continue
        places[key] = len(names)
        names.append(member.name)
        if len(names) * each > MAX_MEMORY:
            raise UserError(
                f'{members.path}: {len(names)} images or more, which take over '
                f'{MAX_MEMORY / 2**30:g} GiB of memory at {shape[0]}x{shape[1]}x{shape[2]}, as a '
                'compressed tar cannot be read at random; convert it with `python -m '
                f'jaxunet.prepare_data --input {shlex.quote(str(members.path))} '
                f'--output images.npz --image_size {shape[0]},{shape[1]}`'
            )
        yield f'{members.path}: {printable(member.name)}', start + members.read(member, member.size)


def report_skipped(name: str, skipped: tuple[tuple[str, str], ...]) -> None:
    """Logs one warning, once, that counts the files left out and names the first ones."""
    if skipped:
        count = '1 file is' if len(skipped) == 1 else f'{len(skipped)} files are'
        log_once(logging.warning, f'{name}: {count} left out: {_listed(skipped)}')


def no_images(name: str, skipped: tuple[tuple[str, str], ...]) -> UserError:
    """Returns the error for a container without images.

    Args:
      skipped: (name, reason) of its other files.
    """
    if any(
        PurePosixPath(file).name.startswith(('data_batch_', 'test_batch')) for file, _ in skipped
    ):
        return UserError(
            f"{name}: holds CIFAR-10's official batches, not image files; "
            f'write data.path as "cifar10:{name}", or "cifar10_test:{name}" for the test images'
        )
    found = 'no files at all, or only hidden ones'
    if skipped:
        found = f'{plural(len(skipped), "other file")}: {_listed(skipped)}'
    return UserError(
        f'{name}: no images (PNG, JPEG, GIF, WebP, BMP, TIFF, PNM, AVIF, JPEG 2000) in it, '
        f'found {found}'
    )


def _listed(skipped: tuple[tuple[str, str], ...]) -> str:
    return ', '.join(f'{file} ({reason})' for file, reason in skipped[:NAMED]) + (
        ', ...' if len(skipped) > NAMED else ''
    )
