"""The interface of a source of images: a length, labels, and random access to pixels."""

from __future__ import annotations

import abc
import math
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxunet.data.crop import Batch, Crops, Shape
from jaxunet.data.fitting import Values, check_fit, fit
from jaxunet.data.order import Pieces
from jaxunet.data.read_at import ReadAt
from jaxunet.data.reading import PLAIN, Reading, tell_rounding
from jaxunet.data.rules import class_order, whole_names
from jaxunet.runtime.errors import UserError, listed, near_misses

LOOKED_AT = 16  # images of a file whose values are checked when it is opened
MAX_MEMORY = 8 * 2**30  # bytes of pixels that a source decodes into host memory


class Source(abc.ABC):
    """Images in a fixed order.

    A source can be pickled: each process opens its files itself. Several threads may call `load`.

    Attributes:
      name: the path, for messages.
      image_shape: (height, width, channels) of the images that `load` returns.
      labels: int32 (n,), indices into `class_names`; all -1 if the source has no classes.
      class_names: empty if the source has no classes.
      unlabelled_by: what prevents classes, such as images beside class sub-folders; '' if nothing
        looks like classes.
      labelled_by: where the labels come from, for the log.
      skipped: (name, reason) of the files that are not images.
      pieces: parts that are read as a whole, for a stream to take them after another; None = images
        are read one by one.
      in_memory: this process holds the pixels, so that nothing is read or decoded.
      reading: how stored values became the pixels that `load` returns.
      held_out: images of the same set that `data.holdout` keeps out of training; None if it
        keeps none out.
      pictures: of data.condition=folder:PATH, one for each image, in the same order; None without.
    """

    name: str
    image_shape: Shape
    labels: Int[np.ndarray, ' images']
    class_names: tuple[str, ...] = ()
    unlabelled_by: str = ''
    labelled_by: str = ''
    skipped: tuple[tuple[str, str], ...] = ()
    pieces: Pieces | None = None
    in_memory: bool = False
    reading: Reading = PLAIN
    held_out: Source | None = None
    pictures: Source | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @abc.abstractmethod
    def load(self, indices: Int[np.ndarray, ' rows'], crops: Crops | None = None) -> Batch:
        """Returns the images at these indices, (rows, height, width, channels).

        They are uint8, or uint16 if `reading` keeps 16 bits.

        Args:
          crops: the part of each image to keep; None = the largest centred one.

        Raises:
          BadImage: one of them is corrupt.
        """

    def stored_size(self, index: int) -> tuple[int, int]:
        """Returns (height, width) of an image before `load` crops and resizes it.

        Raises:
          BadImage: the image is corrupt.
        """
        return self.image_shape[:2]

    def names(self) -> list[str] | None:
        """Returns the images' paths within the set, without suffix; None if there are no names."""
        return None

    def has_holes(self, index: int) -> bool:
        """Returns True if an image has pixels that are not opaque before `load` converts it.

        Raises:
          BadImage: the image is corrupt.
        """
        return False


def spread(n: int, count: int) -> Int[np.ndarray, ' rows']:
    """Returns the numbers of at most `count` of n images, spread over all of them."""
    return np.unique(np.linspace(0, n - 1, count).astype(int))


def no_labels(n: int) -> Int[np.ndarray, ' images']:
    """Returns the labels of n images without classes, all -1."""
    return np.full(n, -1, np.int32)


class ArraySource(Source):
    """Images in an array, converted and resized when loaded.

    Args:
      images: (n, height, width[, channels]), in memory or in a file.
      image_shape: (height, width, channels) that `load` returns.
      labels: indices into `class_names`; None = no classes.
      reading: how the array's values become pixels; None = `at` will say.

    Raises:
      UserError: the channels cannot be converted (`check_fit`), or an array in memory has values
        out of range; those of a file are checked when they are loaded.
    """

    def __init__(
        self,
        name: str,
        images: Values | FileArray,
        image_shape: Shape,
        labels: Int[np.ndarray, ' images'] | None = None,
        class_names: tuple[str, ...] = (),
        reading: Reading | None = PLAIN,
    ) -> None:
        self.in_memory = not isinstance(images, FileArray)
        self.file_names: list[str] | None = None  # of images that were decoded from files
        self._grey = len(images.shape) == 3
        stored = (*images.shape[1:], 1) if self._grey else images.shape[1:]
        self.reading = self._reading = reading or PLAIN
        check_fit(stored, image_shape, name, self.reading)
        self.name, self.image_shape = name, image_shape
        self.labels = no_labels(images.shape[0]) if labels is None else labels.astype(np.int32)
        self.class_names = class_names
        self._images = images
        if reading is None:
            return
        if reading.bits == 8 and images.dtype.itemsize > 1:
            tell_rounding(name, images.dtype.name)
        if images.dtype != reading.dtype or reading.range:
            # Values in another range fail here, not in the middle of training.
            rows = spread(len(self), LOOKED_AT)
            some = images if isinstance(images, np.ndarray) else images[rows]
            reading.check(some, name)

    def at(self, image_shape: Shape, reading: Reading) -> ArraySource:
        """Returns the same images, to be loaded in another shape and reading."""
        return ArraySource(
            self.name, self._images, image_shape, self.labels, self.class_names, reading
        )

    def load(self, indices: Int[np.ndarray, ' rows'], crops: Crops | None = None) -> Batch:
        """Converts the images at these indices; see `Source.load`."""
        images = self._images[indices]
        images = images[..., None] if self._grey else images
        return fit(images, self.image_shape, self.name, crops, self._reading)

    def names(self) -> list[str] | None:
        """Returns `file_names`; see `Source.names`."""
        return self.file_names

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self._images.shape

    def stored_size(self, index: int) -> tuple[int, int]:
        """Returns the size that the array gives to all images."""
        return self._images.shape[1], self._images.shape[2]


def of_pixels(
    name: str,
    pixels: Batch,
    reading: Reading,
    labels: Int[np.ndarray, ' images'],
    class_names: tuple[str, ...],
) -> ArraySource:
    """Returns the source of pixels that are already read as `reading` says."""
    kept = Reading('drop', reading.bits)
    source = ArraySource(name, pixels, (*pixels.shape[1:],), labels, class_names, kept)
    source.reading = reading
    return source


class FileArray:
    """An array inside a file, in C order; its first axis is read row by row when it is indexed.

    Args:
      path: a file that holds the whole array; the caller has checked its size.
      dtype: numpy's name of the type, such as '<f4'.
      shape: shape of the array.
      offset: its first byte in the file.
    """

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...], offset: int) -> None:
        self.path, self.shape, self._offset = path, shape, offset
        self.dtype = np.dtype(dtype)
        self._bytes = ReadAt(path, str(path))

    def __getitem__(self, rows: Int[np.ndarray, ' rows']) -> np.ndarray:
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        for i, row in enumerate(rows):
            start = self._offset + int(row) * size
            data = self._bytes(start, size)
            if len(data) < size:
                raise UserError(
                    f'{self.path}: ends at byte {start + len(data)}, expected {size} bytes from '
                    f'byte {start}; it was changed since it was opened, so copy or write it again'
                )
            out[i] = np.frombuffer(data, self.dtype).reshape(self.shape[1:])
        return out


class Subset(Source):
    """Some images of a source.

    Args:
      rows: their places in `source`, in the order of the subset; ascending if that has `pieces`.
      labels: their labels; default: those of `source`.
      class_names: names of the labels; default: those of `source`.
    """

    def __init__(
        self,
        source: Source,
        rows: Int[np.ndarray, ' rows'],
        labels: Int[np.ndarray, ' rows'] | None = None,
        class_names: tuple[str, ...] | None = None,
    ) -> None:
        self._source, self._rows = source, rows
        self.name, self.image_shape = source.name, source.image_shape
        self.in_memory, self.skipped = source.in_memory, source.skipped
        self.unlabelled_by, self.labelled_by = source.unlabelled_by, source.labelled_by
        self.reading = source.reading
        if source.pieces is not None:
            ends = np.cumsum(source.pieces.counts)
            counts = np.bincount(np.searchsorted(ends, rows, 'right'), minlength=len(ends))
            self.pieces = source.pieces._replace(counts=counts[counts > 0])
        if source.pictures is not None:
            self.pictures = Subset(source.pictures, rows)
        self.labels = source.labels[rows] if labels is None else labels
        self.class_names = source.class_names if class_names is None else class_names

    def load(self, indices: Int[np.ndarray, ' rows'], crops: Crops | None = None) -> Batch:
        """Loads these images of the subset; see `Source.load`."""
        return self._source.load(self._rows[indices], crops)

    def stored_size(self, index: int) -> tuple[int, int]:
        """Returns the size of an image of the subset; see `Source.stored_size`."""
        return self._source.stored_size(int(self._rows[index]))

    def names(self) -> list[str] | None:
        """Returns the names of the subset; see `Source.names`."""
        names = self._source.names()
        return None if names is None else [names[row] for row in self._rows.tolist()]

    def has_holes(self, index: int) -> bool:
        """Returns True if an image of the subset does; see `Source.has_holes`."""
        return self._source.has_holes(int(self._rows[index]))


class Selection(Subset):
    """The images of a source that belong to some of its classes.

    Args:
      classes: names of the classes to keep; they get labels 0, 1, ... in this order.
      option: the field or flag that named them, for messages.

    Raises:
      UserError: unknown or repeated classes, classes without images, or a source without classes.
    """

    def __init__(
        self, source: Source, classes: tuple[str, ...], option: str = 'data.classes'
    ) -> None:
        if not source.class_names:
            why = f', as {source.unlabelled_by}' if source.unlabelled_by else ''
            raise UserError(
                f'{option}: {source.name} has no classes to choose from{why}, '
                f'found {", ".join(classes)}; leave it empty'
            )
        classes = tuple(whole_names(classes, source.class_names))
        unknown = [name for name in classes if name not in source.class_names]
        if unknown:
            hint = near_misses(unknown[0], source.class_names)
            raise UserError(
                f'{option}: {source.name} has no class "{unknown[0]}"{hint}; '
                f'it has {listed(source.class_names)}'
            )
        if len(set(classes)) < len(classes):
            raise UserError(f'{option}: expected different names, found {", ".join(classes)}')
        # Old label -> new label; the last entry serves label -1.
        table = np.full(len(source.class_names) + 1, -1, np.int32)
        for new, name in enumerate(classes):
            table[source.class_names.index(name)] = new
        labels = table[source.labels]
        rows = np.flatnonzero(labels >= 0)
        if len(rows) == 0:
            raise UserError(f'{option}: {source.name} has no images of {", ".join(classes)}')
        super().__init__(source, rows, labels[rows], classes)


def with_class_order(source: Source, names: tuple[str, ...]) -> Source:
    """Returns a source with the labels of an earlier run, which sorted numbers as text.

    Args:
      names: names of the run's labels 0, 1, ...; empty if there is no run, or they are not known.

    Returns:
      `source` itself unless `names` are its classes, sorted as text instead of by `class_order`.
    """
    now = source.class_names
    if now == names or tuple(sorted(now)) != names or now != tuple(sorted(now, key=class_order)):
        return source
    table = np.array([*(names.index(name) for name in now), -1], np.int32)
    result = Subset(source, np.arange(len(source)), table[source.labels], names)
    if source.held_out is not None:
        result.held_out = with_class_order(source.held_out, names)
    return result
