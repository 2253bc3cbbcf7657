"""Reads the pictures that a network sees: those that it enlarges or colours, or others."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Int, UInt, UInt32

from jaxunet.config import Config
from jaxunet.data.arrays import values_of
from jaxunet.data.classes import Classes
from jaxunet.data.containers import MAX_FILE_BYTES
from jaxunet.data.crop import Shape
from jaxunet.data.fitting import fit
from jaxunet.data.images import from_pixels, to_pixels
from jaxunet.data.picture import read_picture
from jaxunet.data.pixels import BadImage, size_of
from jaxunet.data.reading import PLAIN, Reading
from jaxunet.data.source import Source, no_labels, of_pixels
from jaxunet.data.sources import compressed_tar, open_source
from jaxunet.metrics.image_sets import read_grid
from jaxunet.model.low_res import grey, shrunk
from jaxunet.runtime.errors import UserError, heading, plural
from jaxunet.runtime.remote import on_disk
from jaxunet.runtime.untrusted import read_limited

Pixels = UInt[np.ndarray, 'pictures height width channels']

IMAGE_FILES = ('.png', '.jpg', '.jpeg', '.webp', '.bmp')


class LowRes(NamedTuple):
    """n pictures that a network sees; sample i is made from picture i mod n.

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


def missing(config: Config) -> str:
    """Returns the message for a model that sees pictures and gets none; begins with the option."""
    shape = config.low_res_shape
    assert shape is not None
    if config.picture_path:
        return (
            f'condition: missing; the model draws from pictures like those in '
            f'{config.picture_path}, of {plural(shape[2], "channel")}'
        )
    return f'low_res: missing; the model enlarges pictures of {shape[0]}x{shape[1]} pixels'


def read_pictures(config: Config, path: str, limit: int | None, classes: Classes) -> LowRes:
    """Reads the pictures that a model sees.

    Those of a model of pairs (data.condition=folder:PATH) may have any size, and are cut and
    resized as in training. Those of other models have the size `model.low_res_size`.

    Args:
      path, limit, classes: as for `read_low_res`.

    Raises:
      UserError: as `read_low_res`.
    """
    shape, reading = config.low_res_shape, Reading.of_pictures(config)
    assert shape is not None
    if not config.picture_path:
        colourless = config.data.condition == 'grey'
        return read_low_res(path, shape, limit, classes, colourless=colourless, reading=reading)
    source = _any_size(path, (*config.image_shape[:2], shape[2]), reading)
    rows = np.arange(min(len(source), limit or len(source)))
    labels = _labels(path, source, rows, classes)
    pixels = fitted(config, source.load(rows))
    return LowRes(pixels, labels, f'{heading(path)} {plural(len(source), "picture")}')


def given_pictures(
    config: Config, given: str | os.PathLike[str] | ArrayLike | None
) -> Pixels | None:
    """Returns the pictures that a model sees; None for a model that draws from noise alone.

    Args:
      given: a path as for `read_pictures`, or arrays (n, height, width[, channels]).

    Raises:
      UserError: the model sees pictures and there are none, or the other way round, or they cannot
        be read or have another shape.
    """
    shape = config.low_res_shape
    if shape is None:
        if given is None:
            return None
        raise UserError(
            'low_res, condition: the model draws from noise alone (model.low_res_size=()); leave '
            'it out'
        )
    if given is None:
        raise UserError(missing(config))
    if isinstance(given, str | os.PathLike):
        return read_pictures(config, os.fspath(given), None, Classes(0)).pixels
    option, reading = 'condition' if config.picture_path else 'low_res', Reading.of_pictures(config)
    pictures = values_of(given, option)
    if not config.picture_path and pictures.shape[1:] != shape:
        raise UserError(f'low_res: expected shape (n, {shape}), found {pictures.shape}')
    if pictures.shape[3] != shape[2]:
        raise UserError(
            f'condition: expected shape (n, height, width, {shape[2]}), found {pictures.shape}'
        )
    whole = (*config.image_shape[:2], shape[2]) if config.picture_path else shape
    return fitted(config, fit(pictures, whole, option, reading=reading))


def _any_size(path: str, shape: Shape, reading: Reading) -> Source:
    """Opens a picture or a set of pictures, to be loaded in this shape."""
    try:
        file = Path(on_disk(path))
        if file.suffix.lower() in IMAGE_FILES and file.is_file():
            pixels = read_picture(file, shape, reading)[None]
            return of_pixels(path, pixels, reading, no_labels(1), ())
        return open_source(path, image_shape=shape, reading=reading)
    except UserError as error:
        raise UserError(f'--condition: {error}') from None


def fitted(config: Config, pixels: Pixels) -> Pixels:
    """Returns pictures of the image's size at `model.low_res_size`."""
    shape = config.low_res_shape
    if shape is None or pixels.shape[1:] == shape:
        return pixels
    return to_pixels(shrunk(jnp.asarray(from_pixels(pixels)), shape), pixels.dtype)


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
    labels = _labels(path, source, rows, classes)
    pixels = source.load(rows)
    if colourless:
        pixels = np.rint(np.asarray(grey(jnp.asarray(pixels, jnp.float32)))).astype(pixels.dtype)
    return LowRes(pixels, labels, f'{heading(path)} {plural(len(source), "picture")}')


def _labels(
    path: str, source: Source, rows: Int[np.ndarray, ' pictures'], classes: Classes
) -> Int[np.ndarray, ' labels']:
    if not (classes.count and source.class_names):
        return np.zeros(0, np.int32)
    used = {i: _label(path, source.class_names[i], classes) for i in source.labels[rows]}
    return np.array([used[i] for i in source.labels[rows]], np.int32)


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
