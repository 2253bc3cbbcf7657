"""Reads one picture, and a mask for it, as the pixels of a model."""

from __future__ import annotations

import os

import numpy as np
from jaxtyping import Bool

from jaxunet.data.containers import MAX_FILE_BYTES
from jaxunet.data.crop import Pixels, Shape
from jaxunet.data.fitting import MODES
from jaxunet.data.pixels import BadImage, check_depth, decode, has_holes, size_of, stored_peak
from jaxunet.data.reading import PLAIN, Reading
from jaxunet.data.rules import MAGIC_BYTES, why_not_image
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.remote import on_disk
from jaxunet.runtime.untrusted import read_limited

Redraw = Bool[np.ndarray, 'height width']

WHITE = 128  # least grey value of a mask that means redraw


def read_picture(path: str | os.PathLike[str], shape: Shape, reading: Reading = PLAIN) -> Pixels:
    """Returns a picture in a model's shape: cropped, resized and converted as training images are.

    Args:
      shape: (height, width, channels) of the model.
      reading: that of the training images.

    Raises:
      UserError: the file cannot be read as an image, or the model's images are neither grey nor
        RGB, nor have opacity.
    """
    channels = shape[2]
    if channels not in MODES and not reading.keeps:
        raise UserError(
            f'{path}: a picture has 1 channel (grey) or 3 (RGB), but the model has {channels} '
            '(model.image_channels)'
        )
    data = _read(path)
    if reading.as_stored:
        check_depth(stored_peak(data), str(path))
    try:
        return decode(data, str(path), shape, reading=reading)
    except BadImage as error:
        raise UserError(f'{path}: {error.reason}') from None


def read_mask(
    path: str | os.PathLike[str], picture: str | os.PathLike[str], shape: Shape
) -> Redraw:
    """Returns which pixels of a picture a mask redraws: those where it is white, 128 or more.

    The mask is resized and cropped as the picture is.

    Args:
      picture: the picture's file, whose size the mask must have.
      shape: (height, width, channels) of the model.

    Raises:
      UserError: a file cannot be read as an image, or the mask has another size than the picture,
        is not opaque or redraws nothing.
    """
    data = _read(path)
    check_depth(stored_peak(data), str(path))
    try:
        size, expected = size_of(data, str(path)), size_of(_read(picture), str(picture))
        if size != expected:
            raise UserError(
                f'{path}: expected a mask of the size of {picture}, {expected[1]}x{expected[0]} '
                f'pixels (width x height), found {size[1]}x{size[0]}'
            )
        if has_holes(data, str(path)):
            raise UserError(
                f'{path}: is transparent in places, and a mask is read by its brightness: expected '
                'an opaque mask; flatten it, with white where the picture is redrawn and black '
                'where it is kept'
            )
        redraw = decode(data, str(path), (*shape[:2], 1))[..., 0] >= WHITE
    except BadImage as error:
        raise UserError(f'{error.name}: {error.reason}') from None
    if not redraw.any():
        raise UserError(
            f'{path}: nothing to redraw: the mask has no white at {shape[1]}x{shape[0]} pixels; '
            'white is redrawn, black is kept'
        )
    return redraw


def _read(path: str | os.PathLike[str]) -> bytes:
    data = read_limited(on_disk(path), MAX_FILE_BYTES, advice='give an image file')
    if reason := why_not_image(data[:MAGIC_BYTES], len(data), os.fspath(path)):
        raise UserError(f'{path}: {reason}; expected a PNG, JPEG or other image file')
    return data
