"""The interface of a source of images: a length, labels, and random access to uint8 pixels."""

from __future__ import annotations

import abc
import math
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxunet.data.order import Pieces
from jaxunet.data.pixels import Batch, Crops, Shape, check_fit, fit
from jaxunet.data.read_at import ReadAt
from jaxunet.data.rules import class_order, whole_names
from jaxunet.runtime.errors import UserError, listed, near_misses

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
      held_out: images of the same set that `data.holdout` keeps out of training; None if it
        keeps none out.
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
    held_out: Source | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @abc.abstractmethod
    def load(self, indices: Int[np.ndarray, ' rows'], crops: Crops | None = None) -> Batch:
        """Returns the images at these indices, uint8 (rows, height, width, channels).

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


def spread(n: int, count: int) -> Int[np.ndarray, ' rows']:
    """Returns the numbers of at most `count` of n images, spread over all of them."""
    return np.unique(np.linspace(0, n - 1, count).astype(int))


def no_labels(n: int) -> Int[np.ndarray, ' images']:
    """Returns the labels of n images without classes, all -1."""
    return np.full(n, -1, np.int32)


class ArraySource(Source):
    """Images in memory as uint8 pixels, converted and resized when loaded.

    Args:
      images: uint8 (n, height, width, channels).
      image_shape: (height, width, channels) that `load` returns.
      labels: indices into `class_names`; None = no classes.

    Raises:
      UserError: the channels cannot be converted (`check_fit`).
    """

    in_memory = True

    def __init__(
        self,
        name: str,
        images: Batch,
        image_shape: Shape,
        labels: Int[np.ndarray, ' images'] | None = None,
        class_names: tuple[str, ...] = (),
    ) -> None:
        check_fit(images.shape[1:], image_shape, name)
        self.name, self.image_shape = name, image_shape
        self.labels = no_labels(len(images)) if labels is None else labels.astype(np.int32)
        self.class_names = class_names
        self._images = images

    def at(self, image_shape: Shape) -> ArraySource:
        """Returns the same images, to be loaded in another shape."""
        return ArraySource(self.name, self._images, image_shape, self.labels, self.class_names)

    def load(self, indices: Int[np.ndarray, ' rows'], crops: Crops | None = None) -> Batch:
        """Converts the images at these indices; see `Source.load`."""
        return fit(self._images[indices], self.image_shape, self.name, crops)

    def stored_size(self, index: int) -> tuple[int, int]:
        """Returns the size of the arrays in memory."""
        return self._images.shape[1], self._images.shape[2]


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
        self._dtype = np.dtype(dtype)
        self._bytes = ReadAt(path, str(path))

    def __getitem__(self, rows: Int[np.ndarray, ' rows']) -> np.ndarray:
        out = np.empty((len(rows), *self.shape[1:]), self._dtype)
        size = math.prod(self.shape[1:]) * self._dtype.itemsize
        for i, row in enumerate(rows):
            start = self._offset + int(row) * size
            data = self._bytes(start, size)
            if len(data) < size:
                raise UserError(
                    f'{self.path}: ends at byte {start + len(data)}, expected {size} bytes from '
                    f'byte {start}; it was changed since it was opened, so copy or write it again'
                )
            out[i] = np.frombuffer(data, self._dtype).reshape(self.shape[1:])
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
        if source.pieces is not None:
            ends = np.cumsum(source.pieces.counts)
            counts = np.bincount(np.searchsorted(ends, rows, 'right'), minlength=len(ends))
            self.pieces = source.pieces._replace(counts=counts[counts > 0])
        self.labels = source.labels[rows] if labels is None else labels
        self.class_names = source.class_names if class_names is None else class_names

    def load(self, indices: Int[np.ndarray, ' rows'], crops: Crops | None = None) -> Batch:
        """Loads these images of the subset; see `Source.load`."""
        return self._source.load(self._rows[indices], crops)

    def stored_size(self, index: int) -> tuple[int, int]:
        """Returns the size of an image of the subset; see `Source.stored_size`."""
        return self._source.stored_size(int(self._rows[index]))


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


def in_order_of(source: Source, names: tuple[str, ...]) -> Source:
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
        result.held_out = in_order_of(source.held_out, names)
    return result
