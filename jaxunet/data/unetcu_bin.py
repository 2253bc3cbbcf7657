"""Reads and writes unet.cu's data file (clu0/unet.cu, prepare_data.py).

An int32[256] header holds magic 20240620, n, channels, height, width and zeros. Then follow
n · C · H · W float32, channel-first, as pixel / 127.5 − 1. Everything is little-endian.
unet.cu's repository holds its own set as such a file compressed by gzip.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int

from jaxunet.data.crop import Batch, Crops, Pixels, Shape
from jaxunet.data.fitting import check_fit, fit
from jaxunet.data.source import MAX_MEMORY, ArraySource, FileArray, Source, no_labels
from jaxunet.runtime.errors import UserError
from jaxunet.runtime.untrusted import one_line

MAGIC = 20240620
MODEL_MAGIC = 12345678  # in unet.cu's model files
HEADER_BYTES = 1024
MAX_SIDE = 2**16
FIELDS = {1: 'n_images', 2: 'channels', 3: 'height', 4: 'width'}  # index in the header -> name
TOLERANCE = 1e-3  # largest distance of a value from a whole grey level
CHUNK = 2**22  # values of a compressed file that are decoded at once

Values = Float32[np.ndarray, 'images channels height width']


class Header(NamedTuple):
    """The fields of a data file's header; `n` is the number of images."""

    n: int
    channels: int
    height: int
    width: int

    @property
    def image_shape(self) -> Shape:
        """(height, width, channels)."""
        return self.height, self.width, self.channels

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return HEADER_BYTES + math.prod(self) * 4


class BinSource(Source):
    """The images of a data file, read from disk when loaded.

    Args:
      image_shape: (height, width, channels) that `load` returns.

    Raises:
      UserError: another kind of file, a size that contradicts the header, or values that are not
        8-bit pixels; `load` raises it too.
    """

    def __init__(self, path: Path, image_shape: Shape) -> None:
        self.name, self.image_shape = str(path), image_shape
        header = read_header(path)
        check_fit(header.image_shape, image_shape, str(path))
        self._values = FileArray(path, '<f4', tuple(header), HEADER_BYTES)
        self.labels = no_labels(header.n)
        # A file in another scale or layout fails here, not in the middle of training.
        self.load(np.unique([0, header.n - 1]))

    def load(self, indices: Int[np.ndarray, ' rows'], crops: Crops | None = None) -> Batch:
        """Reads the images at these indices; see `Source.load`.

        Raises:
          UserError: values that are not 8-bit pixels.
        """
        pixels = to_pixels(self._values[indices], indices, self.name)
        return fit(pixels, self.image_shape, self.name, crops)

    def stored_size(self, index: int) -> tuple[int, int]:
        """Returns the size that the header gives to all images."""
        return self._values.shape[2], self._values.shape[3]


def open_compressed(path: Path, image_shape: Shape) -> Source:
    """Decodes a data file compressed by gzip into memory, as uint8 pixels.

    Args:
      image_shape: (height, width, channels) that `load` returns.

    Raises:
      UserError: as `BinSource`, not a readable gzip file, or more than `MAX_MEMORY` bytes of
        pixels.
    """
    with gzip.open(path, 'rb') as file:
        try:
            header = parse_header(path, file.read(HEADER_BYTES))
            check_fit(header.image_shape, image_shape, str(path))
            if math.prod(header) > MAX_MEMORY:
                size = f'{header.height}x{header.width}x{header.channels}'
                raise UserError(
                    f'{path}: {header.n} images of {size} exceed {MAX_MEMORY} bytes '
                    'of memory; unpack it with gunzip and give the .bin'
                )
            images = np.empty((header.n, *header.image_shape), np.uint8)
            numbers = math.prod(header.image_shape)  # per image
            rows = max(CHUNK // numbers, 1)
            for start in range(0, header.n, rows):
                part = images[start : start + rows]
                data = file.read(4 * part.size)
                if len(data) < 4 * part.size:
                    raise _wrong_length(
                        path, header, HEADER_BYTES + 4 * start * numbers + len(data)
                    )
                values = np.frombuffer(data, '<f4').reshape(len(part), *header[1:])
                part[:] = to_pixels(values, np.arange(start, start + len(part)), str(path))
            if file.read(1):
                raise _wrong_length(path, header, None)
        except (EOFError, OSError, zlib.error) as error:
            raise UserError(
                f'{path}: not a readable .gz file: {one_line(error)}; it may be truncated, copy or '
                'download it again'
            ) from None
    return ArraySource(str(path), images, image_shape)


def to_pixels(values: Values, indices: Int[np.ndarray, ' images'], name: str) -> Batch:
    """Converts values of a data file to uint8 pixels.

    Args:
      indices: their images' places in the file `name`, for the message.

    Raises:
      UserError: values that are not 8-bit pixels.
    """
    with np.errstate(all='ignore'):
        pixels = (values + np.float32(1)) * np.float32(127.5)
        rounded = np.rint(pixels)
        # NaN fails these comparisons.
        good = (np.abs(pixels - rounded) <= TOLERANCE) & (rounded >= 0) & (rounded <= 255)
    if not good.all():
        row, *place = (int(i) for i in np.argwhere(~good)[0])
        image = int(indices[row])
        flat = image * math.prod(values.shape[1:]) + int(
            np.ravel_multi_index(tuple(place), values.shape[1:])
        )
        raise UserError(
            f'{name}: image {image}, channel {place[0]}, row {place[1]}, column {place[2]} '
            f'(byte {HEADER_BYTES + 4 * flat}): expected pixel / 127.5 - 1 of a pixel 0 to 255, '
            f'found {float(values[(row, *place)])!r}; write the file again with '
            '`python -m jaxunet.prepare_data`'
        )
    return np.ascontiguousarray(rounded.astype(np.uint8).transpose(0, 2, 3, 1))


def read_header(path: Path) -> Header:
    """Reads the header of a data file and checks it against the file's length.

    Raises:
      UserError: a wrong field, named with its byte, expected and found.
    """
    with path.open('rb') as file:
        raw = file.read(HEADER_BYTES)
        size = file.seek(0, 2)
    header = parse_header(path, raw)
    if size != header.file_bytes:
        raise _wrong_length(path, header, size)
    return header


def parse_header(path: Path, raw: bytes) -> Header:
    """Returns the header in the first bytes of a data file.

    Raises:
      UserError: a wrong field, named with its byte, expected and found.
    """
    if len(raw) >= 4:
        magic = int.from_bytes(raw[:4], 'little', signed=True)
        if magic == MODEL_MAGIC:
            raise UserError(
                f'{path}: magic (byte 0): {MODEL_MAGIC}, so this is a unet.cu model file '
                f'(weights), expected a data file ({MAGIC}); '
                'weights go to init_from or --checkpoint'
            )
        if magic != MAGIC:
            raise UserError(
                f'{path}: magic (byte 0): expected {MAGIC} (a unet.cu data file), found {magic}'
            )
    if len(raw) < HEADER_BYTES:
        raise UserError(
            f'{path}: header: expected {HEADER_BYTES} bytes, found {len(raw)}: '
            f'truncated at byte {len(raw)}; copy it again'
        )
    header = np.frombuffer(raw, '<i4')
    sizes = [int(header[i]) for i in FIELDS]
    for (i, name), value in zip(FIELDS.items(), sizes, strict=True):
        most = 2**31 - 1 if name == 'n_images' else MAX_SIDE
        if not 1 <= value <= most:
            raise UserError(f'{path}: {name} (byte {4 * i}): expected 1 to {most}, found {value}')
    return Header(*sizes)


def _wrong_length(path: Path, header: Header, size: int | None) -> UserError:
    """Returns the error of a file whose length contradicts its header.

    Args:
      size: its bytes; None for a compressed file with more than expected.
    """
    expected = header.file_bytes
    if size is None:
        found, what = 'more', f'bytes too many from byte {expected}'
    elif size < expected:
        found, what = f'{size}', f'truncated at byte {size}'
    else:
        found, what = f'{size}', f'{size - expected} bytes too many from byte {expected}'
    return UserError(
        f'{path}: payload: expected {expected} bytes for n_images={header.n}, '
        f'channels={header.channels}, height={header.height}, width={header.width}, '
        f'found {found}: {what}; copy or write it again'
    )


def header_bytes(n: int, shape: Shape) -> bytes:
    """Returns the 1024-byte header of a file of n images of shape (height, width, channels)."""
    header = np.zeros(HEADER_BYTES // 4, '<i4')
    header[:5] = MAGIC, n, shape[2], shape[0], shape[1]
    return header.tobytes()


def to_values(image: Pixels) -> Float[np.ndarray, 'channels height width']:
    """Converts one image to the file's values, with unet.cu's order of float32 operations."""
    return (image.astype('<f4') / np.float32(127.5) - np.float32(1)).transpose(2, 0, 1)
