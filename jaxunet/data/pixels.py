"""Converts an image file to pixels of a given shape.

Conversion: the first frame of an animation; EXIF orientation applied; palette, CMYK and other modes
through Pillow to RGB or grey; transparent pixels as `data.background` says; 16 bits rounded to 8
unless `data.bits` keeps them, and refused where a set of them ends at 4095 or less and has no
`data.range`. Metadata that cannot be read leave the image as it is stored. `jaxunet.data.crop`
resizes images.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Float32, Shaped
from PIL import Image, PngImagePlugin

from jaxunet.data.crop import CENTRE, Crop, Pixels, Shape, resized
from jaxunet.data.fitting import MODES, fit_levels
from jaxunet.data.png16 import read_png16
from jaxunet.data.reading import PLAIN, Reading
from jaxunet.runtime.errors import UserError, printable
from jaxunet.runtime.untrusted import one_line

MAX_PIXELS = 2**26  # limit for one image file; a larger one may be a decompression bomb
# In Pillow's name of how pixels are stored; PNM has the highest value.
SIXTEEN = re.compile(r";16[BLN]?\b|'RGB', [1-9]\d{3,}")
NARROW = 4095  # values up to this one take 12 bits
ORIENTATION = 0x0112  # EXIF tag
BITS, PLANAR = 0x102, 0x11C  # TIFF tags: bits of each channel, and 2 where these are apart
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


def check_channels(channels: int, reading: Reading = PLAIN) -> None:
    """Checks that image files can provide this many channels: 1 (grey), 3 (RGB) or RGBA's 4.

    Raises:
      UserError: they cannot.
    """
    if channels not in ((4,) if reading.keeps else MODES):
        rgba = '; 4 (RGBA) needs data.background=keep' if channels == 4 else ''
        raise UserError(
            f'model.image_channels: expected 1 (grey) or 3 (RGB) for image files, found '
            f'{channels}; other channels only from .npz, .npy or .bin{rgba}'
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


@contextlib.contextmanager
def _opened(data: bytes, name: str) -> Iterator[Image.Image]:
    """Opens an image file for a block that decodes it.

    Raises:
      BadImage: too large, or the block raised what is no lack of memory and no UserError.
    """
    try:
        with open_image(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                size = f'{image.width}x{image.height}'
                raise BadImage(name, f'{size} pixels, more than the {MAX_PIXELS} accepted')
            yield image
    except (UserError, MemoryError):
        raise
    except Exception as error:  # Pillow's plugins raise nearly everything on damaged files
        raise BadImage(name, f'cannot be decoded: {one_line(error)}') from None


def decode(
    data: bytes, name: str, shape: Shape, crop: Crop = CENTRE, reading: Reading = PLAIN
) -> Pixels:
    """Decodes an image file.

    Args:
      data: the file's bytes.
      name: for the error.
      shape: (height, width, channels) to return; channels is 1, 3, or 4 of `reading.keeps`.
      crop: the part to keep.
      reading: how values become pixels.

    Raises:
      BadImage: corrupt, truncated or too large.
      UserError: values out of the range of the set.
    """
    height, width, channels = shape
    with _opened(data, name) as image:
        if not reading.as_stored or image.mode == 'F' or _is_wide_planar(image):
            values, opacity = _values(image, data)
            return fit_levels(reading.levels(values, name), opacity, shape, reading, crop)
        # Let a JPEG decoder halve the size as it decodes, as long as the part to keep stays twice
        # as large as the target.
        least = math.ceil(2 * max(height, width) / crop.share)
        image.draft(None, (least, least))
        whole = _eight_bits(_upright(image), channels, reading)
        pixels = np.asarray(resized(whole, height, width, crop)).reshape(shape)
        # The filter may overshoot where the opacity ends.
        return np.minimum(pixels, pixels[..., 3:]) if reading.keeps else pixels


def size_of(data: bytes, name: str) -> tuple[int, int]:
    """Returns (height, width) of an image file after EXIF orientation.

    Args:
      data: the file's bytes.
      name: for the error.

    Raises:
      BadImage: corrupt or too large.
    """
    with _opened(data, name) as image:
        width, height = image.size
        turned = _orientation(image) in TURNED
        if turned and image.format == 'TIFF':
            image.load()  # Pillow turns TIFF itself; versions differ in when its size changes
            (width, height), turned = image.size, False
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


def _eight_bits(image: Image.Image, channels: int, reading: Reading) -> Image.Image:
    """Converts an image to the mode of these channels; RGBa has colours multiplied by opacity."""
    image = _without_wide_grey(image)
    if reading.keeps:
        return image.convert('RGBA').convert('RGBa')
    if reading.background != 'drop' and image.has_transparency_data:
        image = image.convert('RGBA')
        ground = Image.new('RGBA', image.size, reading.colour)
        image = Image.alpha_composite(ground, image).convert('RGB')
    # Pillow would warn that the conversion drops transparency, which is intended.
    image.info.pop('transparency', None)
    return image if image.mode == MODES[channels] else image.convert(MODES[channels])


def _without_wide_grey(image: Image.Image) -> Image.Image:
    """Returns 16-bit grey, also in 32-bit containers, as 8-bit grey; other images as they are."""
    if not image.mode.startswith('I'):
        return image
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(
            f'32-bit pixels from {values.min()} to {values.max()}, expected at most 16 bits; '
            'set data.range to the lowest and the highest value of the set'
        )
    grey = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if not isinstance(hidden := image.info.get('transparency'), int):
        return grey
    opaque = Image.fromarray(np.where(values == hidden, 0, 255).astype(np.uint8))
    return Image.merge('LA', (grey, opaque))


def _values(
    image: Image.Image, data: bytes
) -> tuple[
    Shaped[np.ndarray, 'height width channels'], Float32[np.ndarray, 'height width 1'] | None
]:
    """Returns grey or RGB values as they are stored, and opacity, 0 to 1, if there is any."""
    hidden = image.info.get('transparency')
    if image.mode.startswith('I') or image.mode == 'F':
        values = np.asarray(_upright(image))[..., None]
        values = values.astype(values.dtype.newbyteorder('='))
        if values.dtype == np.int32 and values.min() >= 0 and values.max() <= 65535:
            values = values.astype(np.uint16)  # Pillow has no container of 16 bits for all formats
        keyed = isinstance(hidden, int)
    elif _is_wide_planar(image) or SIXTEEN.search(str([tile.args for tile in image.tile])):  # type: ignore[attr-defined]
        turned = _orientation(image)
        if image.format not in ('PNG', 'TIFF'):
            raise ValueError('colours of more than 8 bits; save them as PNG or TIFF')
        values = _turned(read_png16(data) if image.format == 'PNG' else _read_tiff(data), turned)
        if values.shape[2] in (2, 4):
            return values[..., :-1], values[..., -1:] / np.float32(65535)
        keyed = isinstance(hidden, tuple)
    else:
        opaque = not image.has_transparency_data
        image = _upright(image)
        if opaque:
            grey = image.mode in ('1', 'L')
            return np.asarray(image.convert('L' if grey else 'RGB')).reshape(
                image.height, image.width, -1
            ), None
        rgba = np.asarray(image.convert('RGBA'))
        return rgba[..., :3], rgba[..., 3:] / np.float32(255)
    if not keyed:
        return values, None
    return values, 1 - (values == hidden).all(axis=2, keepdims=True).astype(np.float32)


def _is_wide_planar(image: Image.Image) -> bool:
    """Returns True for a TIFF of 16 bits, channel by channel, which Pillow takes for 8 bits."""
    if image.format != 'TIFF' or image.mode.startswith('I'):
        return False
    tags = image.tag_v2  # type: ignore[attr-defined]
    return tags.get(PLANAR, 1) == 2 and max(tags.get(BITS, (8,))) > 8


def _turned(
    values: Shaped[np.ndarray, 'height width channels'], orientation: int
) -> Shaped[np.ndarray, 'new_height new_width channels']:
    """Applies an EXIF orientation to an array, as `_upright` to an image."""
    if orientation in TURNED:
        values = values.swapaxes(0, 1)
    down = -1 if orientation in (3, 4, 7, 8) else 1
    right = -1 if orientation in (2, 3, 6, 7) else 1
    return values[::down, ::right]


def _read_tiff(data: bytes) -> Shaped[np.ndarray, 'height width channels']:
    try:
        import tifffile  # noqa: PLC0415 (an extra)
    except ImportError:
        raise UserError(
            'data.bits: 16 bits of TIFF files with colours need tifffile: pip install '
            '"jaxunet[tiff]"'
        ) from None
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        page = file.pages.first
        if page.size > 4 * MAX_PIXELS:
            raise ValueError(f'{page.size} values, more than the {4 * MAX_PIXELS} accepted')
        values = page.asarray()
        return np.moveaxis(values, 0, 2) if page.planarconfig == 2 else values


def stored_peak(data: bytes) -> int:
    """Returns the highest value of an image file of more than 8 bits; 0 for any other file.

    Pillow keeps 8 of the 16 bits of colours, and of grey with transparency. For these, returns the
    highest value that they may have had.
    """
    try:
        with _opened(data, '') as image:
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
            'expected 0 to 65535: they would be black; set data.range to the values that they '
            f'use, such as data.range=0,{2 ** peak.bit_length() - 1}, or store them with 8 bits'
        )


def has_holes(data: bytes, name: str) -> bool:
    """Returns True if an image file has pixels that are not opaque.

    Raises:
      BadImage: corrupt or too large.
    """
    with _opened(data, name) as image:
        if not image.has_transparency_data:
            return False
        opacity = _without_wide_grey(image).convert('RGBA').getchannel('A')
        return bool(opacity.getextrema()[0] < 255)  # type: ignore[operator]
