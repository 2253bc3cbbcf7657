"""Converts an image file or an array to uint8 pixels of a given shape.

Conversion: the first frame of an animation; EXIF orientation applied; palette, CMYK and other modes
through Pillow to RGB or grey; transparency dropped without compositing, as unet.cu and
guided-diffusion do; 16-bit grey scaled by 1/257, and refused where a set of it ends at 4095 or
less. Metadata that cannot be read leave the image as it is stored.
Resizing: the largest centred crop of the target's aspect ratio, then an antialiased Lanczos filter.
An image of the target's size keeps its pixels, unless a smaller part of it is cut out.
"""

from __future__ import annotations

import importlib.util
import io
import math
import re
import shlex
import warnings
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from jaxtyping import Float64, UInt8
from PIL import Image, PngImagePlugin

from jaxunet.runtime.errors import UserError, printable
from jaxunet.runtime.untrusted import one_line

Shape = tuple[int, int, int]  # height, width, channels
Pixels = UInt8[np.ndarray, 'height width channels']
Batch = UInt8[np.ndarray, 'images height width channels']
Crops = Float64[np.ndarray, 'images 3']  # rows of the fields of `Crop`


class Crop(NamedTuple):
    """The part of an image to keep.

    Fields:
      share: its sides, as a share of the largest crop of the target's aspect ratio.
      down, right: its place from top to bottom and from left to right, 0 to 1.
    """

    share: float
    down: float
    right: float


CENTRE = Crop(1.0, 0.5, 0.5)

MODES = {1: 'L', 3: 'RGB'}
MAX_FLAT = 4  # pixels: a side that is a number of channels in truth
MAX_PIXELS = 2**26  # limit for one image file; a larger one may be a decompression bomb
SIXTEEN = re.compile(r';16[BLN]?\b')  # in Pillow's name of how pixels are stored
NARROW = 4095  # values up to this one take 12 bits
ORIENTATION = 0x0112  # EXIF tag
SUBFILE_TYPE, REDUCED = 0xFE, 1  # TIFF tag, and its bit of an image that is a thumbnail
TURNED = range(5, 9)  # its values that swap width and height
UPRIGHT = {  # turns the image upright; others than 1 to 8 do not exist
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# A box filter by a whole factor first reduces an image to this many times its final size: almost
# as good as Lanczos alone, and much faster.
REDUCING_GAP = 3.0

# Formats that Pillow may decode. It has more formats: for EPS it would run Ghostscript.
FORMATS: tuple[str, ...] = ('PNG', 'JPEG', 'GIF', 'BMP', 'PPM', 'WEBP', 'TIFF', 'JPEG2000')
if importlib.util.find_spec('PIL.AvifImagePlugin') is not None:  # since Pillow 11.3
    FORMATS += ('AVIF',)

# Pillow refuses the pixels of a PNG with a colour profile or a text of more than 1 MiB. All texts
# together keep their limit.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
# `decode` has its own limit, below the one of Pillow's warning.
warnings.filterwarnings('ignore', category=Image.DecompressionBombWarning)


class BadImage(UserError):
    """An image file whose pixels cannot be read.

    Args:
      name: the file.
      reason: the problem, for the message.
      images: path of the set that the file is in, for advice; '' if it is not known.
    """

    def __init__(self, name: str, reason: str, images: str = '') -> None:
        super().__init__(name, reason, images)  # all arguments, so that it can be pickled
        self.name, self.reason, self.images = name, reason, images

    def __str__(self) -> str:
        text = printable(f'{self.name}: {self.reason}')
        if not self.images:
            return text
        return (
            f'{text}; remove the file, or convert the set, which leaves it out: python -m '
            f'jaxunet.prepare_data --input {shlex.quote(self.images)} --output images.npz '
            '--image_size ...'
        )


def check_channels(channels: int) -> None:
    """Checks that image files can provide this many channels: 1 (grey) or 3 (RGB).

    Raises:
      UserError: they cannot.
    """
    if channels not in MODES:
        raise UserError(
            f'model.image_channels: expected 1 (grey) or 3 (RGB) for image files, found '
            f'{channels}; other channels only from .npz or .bin'
        )


def open_image(file: str | Path | IO[bytes]) -> Image.Image:
    """Opens an image file with Pillow, of the `FORMATS` alone.

    Raises:
      OSError: another format, or a damaged file; Pillow raises nearly everything else too.
    """
    image = Image.open(file, formats=FORMATS)
    if image.format == 'TIFF' and image.tag_v2.get(SUBFILE_TYPE, 0) & REDUCED:  # type: ignore[attr-defined]
        raise OSError(
            'its first image is a thumbnail, as in camera raw, which is not supported; convert it '
            'to TIFF, PNG or JPEG'
        )
    return image


def decode(data: bytes, name: str, shape: Shape, crop: Crop = CENTRE) -> Pixels:
    """Decodes an image file.

    Args:
      data: the file's bytes.
      name: for the error.
      shape: (height, width, channels) to return; channels is 1 or 3.
      crop: the part to keep.

    Raises:
      BadImage: corrupt, truncated, too large, or without an 8-bit meaning.
    """
    height, width, channels = shape
    try:
        with open_image(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadImage(
                    name,
                    f'{image.width}x{image.height} pixels, more than the {MAX_PIXELS} accepted',
                )
            # Let a JPEG decoder halve the size as it decodes, as long as the part to keep stays
            # twice as large as the target.
            least = math.ceil(2 * max(height, width) / crop.share)
            image.draft(None, (least, least))
            return _finish(_eight_bits(_upright(image), MODES[channels]), shape, crop)
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # Pillow's plugins raise nearly everything on damaged files
        raise BadImage(name, f'cannot be decoded: {one_line(error)}') from None


def size_of(data: bytes, name: str) -> tuple[int, int]:
    """Returns (height, width) of an image file after EXIF orientation.

    Args:
      data: the file's bytes.
      name: for the error.

    Raises:
      BadImage: corrupt or too large.
    """
    try:
        with open_image(io.BytesIO(data)) as image:
            width, height = image.size
            turned = _orientation(image) in TURNED
            if turned and image.format == 'TIFF' and width * height <= MAX_PIXELS:
                image.load()  # Pillow turns TIFF itself; versions differ in when its size changes
                (width, height), turned = image.size, False
    except Exception as error:  # Pillow raises nearly everything on damaged files
        raise BadImage(name, f'cannot be decoded: {one_line(error)}') from None
    if width * height > MAX_PIXELS:
        raise BadImage(name, f'{width}x{height} pixels, more than the {MAX_PIXELS} accepted')
    return (width, height) if turned else (height, width)


def _upright(image: Image.Image) -> Image.Image:
    """Applies the EXIF orientation.

    `ImageOps.exif_transpose` also writes the EXIF anew, which fails on fields of wrong types.
    """
    image.load()  # turns TIFF, whose orientation is then gone
    turn = UPRIGHT.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation, or that of XMP; 1 (upright) if they cannot be read.

    Pillow raises nearly everything on metadata that are damaged, though the pixels are not. Its
    version 11.2 refuses XMP that is not UTF-8.
    """
    if isinstance(xmp := image.info.get('xmp'), bytes):
        image.info['xmp'] = xmp.decode(errors='replace').encode()
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:
        return 1


def _eight_bits(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith('I'):  # 16-bit grey, also in 32-bit containers
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(
                f'32-bit pixels from {values.min()} to {values.max()}, expected at most 16 bits'
            )
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    elif image.mode == 'F':
        raise ValueError('floating-point pixels, whose range is not defined')
    # Pillow would warn that the conversion drops transparency, which is intended.
    image.info.pop('transparency', None)
    return image if image.mode == mode else image.convert(mode)


def stored_peak(data: bytes) -> int:
    """Returns the highest value of an image file of more than 8 bits; 0 for any other file.

    Pillow keeps 8 of the 16 bits of colours, and of grey with transparency. For these, returns the
    highest value that they may have had.
    """
    try:
        with open_image(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                return 0
            if image.mode.startswith('I'):
                return int(np.asarray(image).max())
            tiles = image.tile  # type: ignore[attr-defined]
            if not any(SIXTEEN.search(str(tile.args)) for tile in tiles):
                return 0
            peak = int(np.asarray(image.convert('RGB')).max())
            return peak and 256 * peak + 255
    except Exception:  # as in `decode`, which reports it
        return 0


def check_depth(peak: int, name: str) -> None:
    """Checks that images of more than 8 bits use more than a sixteenth of the 16-bit range.

    Args:
      peak: their highest value; 0 = no such images, or black ones.
      name: the image that has it.

    Raises:
      UserError: they do not, as if 12 or 8 bits were stored in wider numbers. Scaled as 16-bit
        images, they would be black.
    """
    if 0 < peak <= NARROW:
        raise UserError(
            f'{name}: 16 or 32 bits, but no image of such a type has a value above {peak}, '
            'expected 0 to 65535: they would be black; store them with 8 bits, or scale them to '
            '65535'
        )


def has_holes(data: bytes, name: str) -> bool:
    """Returns True if an image file has pixels that are not opaque.

    Raises:
      BadImage: corrupt.
    """
    try:
        with open_image(io.BytesIO(data)) as image:
            if not image.has_transparency_data:
                return False
            return bool((np.asarray(image.convert('RGBA'))[..., 3] < 255).any())
    except Exception as error:  # Pillow raises nearly everything on damaged files
        raise BadImage(name, f'cannot be decoded: {one_line(error)}') from None


def _finish(image: Image.Image, shape: Shape, crop: Crop = CENTRE) -> Pixels:
    height, width, channels = shape
    if image.size != (width, height) or crop.share != 1:
        image = _resize(image, height, width, crop)
    return np.asarray(image, np.uint8).reshape(height, width, channels)


def _resize(image: Image.Image, height: int, width: int, crop: Crop) -> Image.Image:
    scale = max(width / image.width, height / image.height) / crop.share
    box_width, box_height = min(width / scale, image.width), min(height / scale, image.height)
    left = (image.width - box_width) * crop.right
    top = (image.height - box_height) * crop.down
    box = (left, top, min(left + box_width, image.width), min(top + box_height, image.height))
    return image.resize(
        (width, height), Image.Resampling.LANCZOS, box=box, reducing_gap=REDUCING_GAP
    )


def fit(
    images: Batch, shape: Shape, name: str, crops: Crops | None = None
) -> UInt8[np.ndarray, 'images new_height new_width new_channels']:
    """Converts and resizes arrays of images like image files.

    Channels other than grey and RGB are resized one by one.

    Args:
      shape: (height, width, channels) to return.
      name: for the error.
      crops: the part of each image to keep; None = the centre.

    Raises:
      UserError: the channels cannot be converted (`check_fit`).
    """
    height, width, channels = shape
    check_fit(images.shape[1:], shape, name)
    if images.shape[1:] == shape and crops is None:
        return images
    found = images.shape[3]
    out = np.empty((len(images), *shape), np.uint8)
    for i, pixels in enumerate(images):
        crop = crop_of(crops, i)
        if found in MODES and channels in MODES:
            image = Image.fromarray(pixels[..., 0] if found == 1 else pixels)
            out[i] = _finish(image.convert(MODES[channels]), shape, crop)
        else:
            for c in range(channels):
                out[i, ..., c : c + 1] = _finish(
                    Image.fromarray(np.ascontiguousarray(pixels[..., c])), (height, width, 1), crop
                )
    return out


def crop_of(crops: Crops | None, row: int) -> Crop:
    """Returns the part of an image to keep; the centre where there are no crops."""
    if crops is None:
        return CENTRE
    return Crop(*crops[row].tolist())


def random_crops(random: np.random.Generator, count: int, side: int, least: float) -> Crops:
    """Draws crops as guided-diffusion's `random_crop_arr`.

    It resizes the shorter side of an image to a random whole number of pixels, from the target's
    side to that side divided by `least`, and cuts the target out anywhere.

    Args:
      side: shorter side of the target, in pixels.
      least: smallest crop, as a share of the largest, above 0 and at most 1.
    """
    resized = random.integers(side, math.ceil(side / least) + 1, count)
    return np.stack([side / resized, *random.random((2, count))], axis=1)


def check_fit(found: tuple[int, ...], shape: Shape, name: str) -> None:
    """Checks that the channels of images of shape `found` convert to those of `shape`, (H, W, C).

    Raises:
      UserError: they do not, or `found` has another order.
    """
    if found[2] > MAX_FLAT >= min(found[:2]):
        raise UserError(
            f'{name}: images of shape {found}, expected (height, width, channels): an image of '
            f'{min(found[:2])} pixels a side with {found[2]} channels cannot be meant, so the '
            'order is another one; for channels first, store images.transpose(0, 2, 3, 1)'
        )
    if found[2] != shape[2] and not (found[2] in MODES and shape[2] in MODES):
        opaque = '; if the last channel is transparency, store the images without it'
        raise UserError(
            f'{name}: images have {found[2]} channels, but model.image_channels is {shape[2]}; '
            f'only 1 (grey) and 3 (RGB) convert into each other, so set it to {found[2]}'
            f'{opaque if found[2] == shape[2] + 1 else ""}'
        )
