"""Reads the pictures that a network enlarges or colours."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt, UInt32

from jaxunet.data.classes import Classes
from jaxunet.data.containers import MAX_FILE_BYTES
from jaxunet.data.crop import Shape
from jaxunet.data.picture import read_picture
from jaxunet.data.pixels import BadImage, size_of
from jaxunet.data.reading import PLAIN, Reading
from jaxunet.data.source import Source, no_labels, of_pixels
from jaxunet.data.sources import compressed_tar, open_source
from jaxunet.metrics.image_sets import read_grid
from jaxunet.model.low_res import grey
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.remote import on_disk
from jaxunet.runtime.untrusted import read_limited

IMAGE_FILES = ('.png', '.jpg', '.jpeg', '.webp', '.bmp')


class LowRes(NamedTuple):
    """n pictures to enlarge; sample i is made from picture i mod n.

    Fields:
      pixels: as the model's, at the size that the network was trained with.
      labels: their classes; empty if they have none.
      note: where they come from, and how many there are.
    """

    pixels: UInt[np.ndarray, 'pictures height width channels']
    labels: Int[np.ndarray, ' labels']
    note: str

    def of(self, indices: Int[np.ndarray, ' samples']) -> UInt[np.ndarray, 'samples h w c']:
        """Returns the pictures of some samples."""
        return self.pixels[indices % len(self.pixels)]

    def checksums(self, samples: int) -> UInt32[np.ndarray, ' samples']:
        """Returns the CRC-32 of each sample's picture, and of its class if pictures have any."""
        found = [
            zlib.crc32(self.labels[i : i + 1].tobytes(), zlib.crc32(picture))
            for i, picture in enumerate(np.ascontiguousarray(self.pixels))
        ]
        return np.resize(np.array(found, np.uint32), samples)


def read_low_res(
    path: str,
    shape: Shape,
    limit: int | None,
    classes: Classes,
    *,
    colourless: bool = False,
    reading: Reading = PLAIN,
) -> LowRes:
    """Reads the pictures to enlarge or to colour.

    Args:
      path: a picture, a .png grid of `jaxunet.sample`, or anything that `data.path` accepts.
      shape: (height, width, channels) that they must have; grey and RGB convert.
      limit: number of pictures to read, the first ones; None = all.
      classes: of the model; a count of 0 leaves out the pictures' classes.
      colourless: the model was trained with grey pictures (data.condition=grey); those with
        colours become grey.
      reading: that of the model's images.

    Raises:
      UserError: a wrong path, or a picture of another size or class.
    """
    file = Path(on_disk(path))
    if file.suffix.lower() in IMAGE_FILES and file.is_file():
        pixels = _of_one_file(file, shape, reading)
        source: Source = of_pixels(path, pixels, reading, no_labels(len(pixels)), ())
    elif compressed_tar(path):
        raise UserError(
            f'--low_res: {path}: a compressed tar shows no sizes before it is decoded; unpack it'
        )
    else:
        source = open_source(path, image_shape=shape, reading=reading)
    rows = np.arange(min(len(source), limit or len(source)))
    for row in rows:
        if (found := source.stored_size(int(row))) != shape[:2]:
            raise _wrong_size(path, shape, found, f'picture {row}')
    labels = np.zeros(0, np.int32)
    if classes.count and source.class_names:
        used = {i: _label(path, source.class_names[i], classes) for i in source.labels[rows]}
        labels = np.array([used[i] for i in source.labels[rows]], np.int32)
    pixels = source.load(rows)
    if colourless:
        pixels = np.rint(np.asarray(grey(jnp.asarray(pixels, jnp.float32)))).astype(pixels.dtype)
    return LowRes(pixels, labels, f'{path}: {len(source)} pictures')


def _label(path: str, name: str, classes: Classes) -> int:
    try:
        return classes.label_of(name)
    except UserError:
        known = ' or its name' * bool(classes.names)
        raise UserError(
            f'--low_res: {path}: expected the label of a class of the model, 0 to '
            f'{classes.count - 1}{known}, found {name!r}; correct it or give --class_labels'
        ) from None


def _of_one_file(
    file: Path, shape: Shape, reading: Reading
) -> UInt[np.ndarray, 'pictures height width channels']:
    """Returns the picture in an image file, or the pictures of a grid."""
    data = read_limited(file, MAX_FILE_BYTES, advice='give pictures to --low_res')
    try:
        found = size_of(data, str(file))
        if found == shape[:2]:
            return read_picture(file, shape, reading)[None]
        if file.suffix.lower() == '.png' and reading.as_stored and not reading.keeps:
            return read_grid(file, shape[:2])
    except BadImage as error:
        raise UserError(f'--low_res: {file}: {error.reason}') from None
    except OSError as error:
        raise UserError(f'--low_res: {file}: cannot be read: {error.strerror or error}') from None
    except UserError:
        if found == shape[:2]:
            raise
    raise _wrong_size(str(file), shape, found, 'no grid of such pictures, but one')


def _wrong_size(path: str, shape: Shape, found: tuple[int, int], what: str) -> UserError:
    height, width = shape[:2]
    return UserError(
        f'--low_res: {path}: expected pictures of {height}x{width} pixels (height x width), which '
        f'the model was trained with, found {what} of {found[0]}x{found[1]}; resize them, a set '
        f'of pictures by python -m jaxunet.prepare_data --image_size {height},{width}'
    )
