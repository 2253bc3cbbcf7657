"""Converts arrays of images to pixels of a given shape, as image files are converted."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Shaped, UInt
from PIL import Image

from jaxunet.data.crop import CENTRE, Crop, Crops, Shape, crop_of, resized
from jaxunet.data.reading import PLAIN, Reading
from jaxunet.runtime.errors import UserError, heading, plural

MODES = {1: 'L', 3: 'RGB'}
MAX_FLAT = 4  # pixels: a side that is a number of channels in truth
BRIGHTNESS = np.array([0.299, 0.587, 0.114], np.float32)  # as Pillow converts (ITU-R BT.601)

Values = Shaped[np.ndarray, 'images height width channels']
Levels = Float[np.ndarray, 'height width channels']
Opacity = Float[np.ndarray, 'height width 1']


def fit(
    images: Values, shape: Shape, name: str, crops: Crops | None = None, reading: Reading = PLAIN
) -> UInt[np.ndarray, 'images new_height new_width new_channels']:
    """Converts and resizes arrays of images like image files.

    Channels other than grey, RGB and opacity are resized one by one.

    Args:
      shape: (height, width, channels) to return.
      name: for the error.
      crops: the part of each image to keep; None = the centre.
      reading: the range of the values, and the bits to keep.

    Raises:
      UserError: the channels cannot be converted (`check_fit`), or values are out of range.
    """
    height, width, channels = shape
    found = images.shape[3]
    check_fit(images.shape[1:], shape, name, reading)
    same = images.shape[1:] == shape and crops is None
    if same and images.dtype == reading.dtype and not (reading.range or reading.keeps):
        return images
    out = np.empty((len(images), *shape), reading.dtype)
    if images.dtype == np.uint8 and reading.as_stored and not reading.keeps:
        for i, pixels in enumerate(images):
            crop = crop_of(crops, i)
            if found in MODES and channels in MODES:
                image = Image.fromarray(pixels[..., 0] if found == 1 else pixels)
                image = resized(image.convert(MODES[channels]), height, width, crop)
                out[i] = np.asarray(image).reshape(shape)
            else:
                out[i] = _planes(pixels, height, width, crop)
        return out
    for i, values in enumerate(images):
        levels, opacity = reading.levels(values, name), None
        if reading.keeps and found == 4:
            levels, opacity = levels[..., :3], levels[..., 3:] / np.float32(reading.top)
        out[i] = fit_levels(levels, opacity, shape, reading, crop_of(crops, i))
    return out


def fit_levels(
    levels: Levels, opacity: Opacity | None, shape: Shape, reading: Reading, crop: Crop = CENTRE
) -> UInt[np.ndarray, 'new_height new_width new_channels']:
    """Converts one image of values from 0 to `reading.top`.

    Args:
      levels: its channels, without opacity.
      opacity: 0 to 1; None = 1.
      shape: (height, width, channels) to return.
    """
    height, width, channels = shape
    channels -= reading.keeps
    if opacity is not None and reading.keeps:
        levels = levels * opacity  # so that hidden colours cannot matter
    elif opacity is not None and reading.background != 'drop':
        ground = np.array(reading.colour, np.float32) * np.float32(reading.top / 255)
        levels = levels * opacity + ground * (1 - opacity)  # grey ones become RGB
    if levels.shape[2] == 3 and channels == 1:
        levels = levels @ BRIGHTNESS[:, None]
    elif levels.shape[2] == 1:
        levels = np.repeat(levels, channels, axis=2)
    if reading.keeps:
        opacity = np.ones((*levels.shape[:2], 1), np.float32) if opacity is None else opacity
        levels = np.concatenate([levels, opacity * np.float32(reading.top)], axis=2)
    pixels = reading.rounded(_planes(levels.astype(np.float32), height, width, crop))
    # The filter may overshoot where the opacity ends.
    return np.minimum(pixels, pixels[..., 3:]) if reading.keeps else pixels


def _planes(
    image: Shaped[np.ndarray, 'height width channels'], height: int, width: int, crop: Crop
) -> Shaped[np.ndarray, 'new_height new_width channels']:
    """Resizes an image of any number of channels, uint8 or float32, channel by channel."""
    if image.shape[:2] == (height, width) and crop.share == 1:
        return image
    planes = [Image.fromarray(np.ascontiguousarray(image[..., c])) for c in range(image.shape[2])]
    return np.stack([np.asarray(resized(p, height, width, crop)) for p in planes], axis=2)


def check_fit(found: tuple[int, ...], shape: Shape, name: str, reading: Reading = PLAIN) -> None:
    """Checks that the channels of images of shape `found` convert to those of `shape`, (H, W, C).

    Raises:
      UserError: they do not, or `found` has another order.
    """
    if found[2] > MAX_FLAT >= min(found[:2]):
        raise UserError(
            f'{heading(name)} images of shape {found}, expected (height, width, channels): an '
            f'image of {min(found[:2])} pixels a side with {found[2]} channels cannot be meant, so '
            'the order is another one; for channels first, store images.transpose(0, 2, 3, 1)'
        )
    converts = found[2] in MODES and (shape[2] in MODES or reading.keeps)
    if found[2] != shape[2] and not converts:
        opaque = '; if the last channel is transparency, store the images without it'
        if found[2] == 4 and shape[2] == 3:
            opaque = '; if the last channel is opacity, also set data.background=keep'
        raise UserError(
            f'{heading(name)} images have {plural(found[2], "channel")}, but '
            f'model.image_channels is {shape[2]}; '
            f'only 1 (grey) and 3 (RGB) convert into each other, so set it to {found[2]}'
            f'{opaque if found[2] == shape[2] + 1 else ""}'
        )
